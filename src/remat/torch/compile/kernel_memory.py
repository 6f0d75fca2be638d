"""What a compiled module allocates and frees while it runs."""

from __future__ import annotations

from collections.abc import Hashable


class Ledger:
    """The storages that are allocated, and the names that hold them; a storage goes with the last of its names.

    Names that were never introduced stand for what is there anyway, a parameter say, and count nothing.

    Attributes:
        bytes: allocated now.
        peak_bytes: the most that was.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self._sizes: list[int] = []
        self._holders: list[int] = []
        self._held: dict[str, dict[Hashable, int]] = {}

    def allocate(self, name: str, size_bytes: int) -> None:
        """One storage."""
        self.allocate_parts(name, {None: size_bytes})

    def allocate_parts(self, name: str, sizes: dict[Hashable, int]) -> None:
        """A storage for each part of what a name stands for: an operator's results."""
        parts = {}
        for part, size_bytes in sizes.items():
            parts[part] = len(self._sizes)
            self._sizes.append(size_bytes)
            self._holders.append(0)
            self.bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self._hold(name, parts)

    def share(self, name: str, of: str, part: Hashable = None) -> None:
        """Let a name hold what another one holds; of its parts only the given one, if it has that."""
        parts = self._held.get(of, {})
        self._hold(name, {part: parts[part]} if part in parts else dict(parts))

    def free(self, name: str) -> None:
        """Let go of whatever the name holds."""
        for storage in self._held.pop(name, {}).values():
            self._holders[storage] -= 1
            if not self._holders[storage]:
                self.bytes -= self._sizes[storage]

    def scratch(self, size_bytes: int) -> None:
        """Bytes that are allocated and freed again within a kernel."""
        self.peak_bytes = max(self.peak_bytes, self.bytes + size_bytes)

    def _hold(self, name: str, parts: dict[Hashable, int]) -> None:
        for storage in parts.values():
            self._holders[storage] += 1
        self.free(name)
        self._held[name] = parts
