"""What a device or a compiler shows as the peak of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeakRange:
    """The peak of one schedule on the device.

    Attributes:
        expected_bytes: what a run of a few steps is expected to show.
        highest_bytes: the most that it may show, which a budget has to hold; the same where the figure is exact.
        block_bytes: of the block that a run asks for at once and gives back at its end; 0 where memory is asked for
            in another way.
    """

    expected_bytes: int
    highest_bytes: int
    block_bytes: int = 0

    @classmethod
    def exactly(cls, peak_bytes: int) -> PeakRange:
        """A peak that every run shows."""
        return cls(peak_bytes, peak_bytes)

    @classmethod
    def with_reserve(cls, peak_bytes: int, reserve: float) -> PeakRange:
        """A peak that may rise by a share of itself: by scratch memory of kernels that nobody can ask for."""
        return cls(peak_bytes, int(peak_bytes * (1 + reserve)))

    @property
    def likely_bytes(self) -> int:
        """What most runs stay below."""
        return (self.expected_bytes + self.highest_bytes) // 2

    def __add__(self, more_bytes: int) -> PeakRange:
        return PeakRange(self.expected_bytes + more_bytes, self.highest_bytes + more_bytes, self.block_bytes)
