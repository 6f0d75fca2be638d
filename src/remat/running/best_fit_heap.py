"""A heap that hands out the best free chunk and joins free neighbours, as TensorFlow's BFC allocator does."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

# Those of TensorFlow's bfc_allocator.h and bfc_allocator.cc: kMinAllocationSize, kDefaultMaxInternalFragmentation, and
# kNumBins - 1. With other values the simulated chunks are not those of the device.
_ALIGNMENT_BYTES: Final = 256
_MAX_UNSPLIT_BYTES: Final = 128 << 20
_LARGEST_BIN: Final = 20

ENDLESS_BYTES: Final = 1 << 50
"""Of a hole in which everything fits."""


@dataclass(slots=True)
class _Chunk:
    size: int
    used: bool
    before: int | None
    behind: int | None


@dataclass
class Heap:
    """A best-fit heap with coalescing.

    Attributes:
        region_bytes: of the first region; every further one is twice as large, or large enough.
        in_use_bytes: of the chunks handed out, which may be larger than the blocks asked for.
        of_inputs: the addresses of pinned inputs, by the tensor that owns the storage.
    """

    region_bytes: int
    in_use_bytes: int = 0
    of_inputs: dict[int, int] = field(default_factory=dict)
    _chunks: dict[int, _Chunk] = field(default_factory=dict)
    _free: list[tuple[int, int, int]] = field(default_factory=list)  # (bin, size, address), sorted
    _end: int = 0

    def add_hole(self, size_bytes: int) -> None:
        """A free chunk more, which touches no other one, at an address above all others; the next region is larger."""
        self.region_bytes = max(self.region_bytes, size_bytes)
        self._add_region(size_bytes)

    def add_hole_behind(self, sizes: Iterable[int], size_bytes: int) -> list[int]:
        """A free chunk more, and right before it chunks of these sizes: their addresses, one after the other."""
        sizes = [_aligned(size) for size in sizes]
        address = self._end
        self.add_hole(sum(sizes) + size_bytes)
        found = []
        for size in sizes:
            self._remove_free(address)
            self._split(address, size)
            self._chunks[address].used = True
            self.in_use_bytes += size
            found.append(address)
            address += size
        return found

    def allocate(self, size_bytes: int) -> int:
        """The address of a chunk of at least this size."""
        size = _aligned(size_bytes)
        place = self._find(size)
        if place == len(self._free):
            self._extend(size)
            place = self._find(size)
        address = self._free.pop(place)[2]
        chunk = self._chunks[address]
        if chunk.size >= 2 * size or chunk.size - size >= _MAX_UNSPLIT_BYTES:
            self._split(address, size)
        chunk.used = True
        self.in_use_bytes += chunk.size
        return address

    def allocate_alone(self, size_bytes: int) -> int:
        """The address of a chunk that touches no other one."""
        address = self._end
        self.add_hole(size_bytes)
        chunk = self._chunks[address]
        self._remove_free(address)
        chunk.used = True
        self.in_use_bytes += chunk.size
        return address

    def free(self, address: int) -> None:
        """Give a chunk back and join it with its free neighbours."""
        chunk = self._chunks[address]
        chunk.used = False
        self.in_use_bytes -= chunk.size
        if chunk.behind is not None and not self._chunks[chunk.behind].used:
            self._remove_free(chunk.behind)
            self._join(address, chunk.behind)
        if chunk.before is not None and not self._chunks[chunk.before].used:
            self._remove_free(chunk.before)
            self._join(chunk.before, address)
            address = chunk.before
        self._add_free(address)

    def move_input(self, root: int, address: int) -> int:
        """Let a chunk be that of a pinned input from now on; the address of the one that was."""
        before, self.of_inputs[root] = self.of_inputs[root], address
        return before

    def _find(self, size: int) -> int:
        return bisect.bisect_left(self._free, (_bin(size), size, -1))

    def _extend(self, size: int) -> None:
        grown = self.region_bytes < size
        while self.region_bytes < size:
            self.region_bytes *= 2
        self._add_region(self.region_bytes)
        if not grown:
            self.region_bytes *= 2

    def _add_region(self, size: int) -> None:
        self._chunks[self._end] = _Chunk(size, False, None, None)
        self._add_free(self._end)
        self._end += size + _ALIGNMENT_BYTES  # Regions never join.

    def _split(self, address: int, size: int) -> None:
        chunk = self._chunks[address]
        rest = address + size
        self._chunks[rest] = _Chunk(chunk.size - size, False, address, chunk.behind)
        if chunk.behind is not None:
            self._chunks[chunk.behind].before = rest
        chunk.size, chunk.behind = size, rest
        self._add_free(rest)

    def _join(self, first: int, second: int) -> None:
        gone = self._chunks.pop(second)
        kept = self._chunks[first]
        kept.size += gone.size
        kept.behind = gone.behind
        if gone.behind is not None:
            self._chunks[gone.behind].before = first

    def _add_free(self, address: int) -> None:
        size = self._chunks[address].size
        bisect.insort(self._free, (_bin(size), size, address))

    def _remove_free(self, address: int) -> None:
        size = self._chunks[address].size
        del self._free[bisect.bisect_left(self._free, (_bin(size), size, address))]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@functools.lru_cache(maxsize=1 << 16)  # A step asks for the same few sizes over and over.
def _bin(size: int) -> int:
    return min(_LARGEST_BIN, (size // _ALIGNMENT_BYTES).bit_length() - 1)
