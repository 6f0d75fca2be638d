"""The buffers of a program that XLA has compiled."""

from __future__ import annotations

from dataclasses import dataclass

from remat.tensorflow import _private


@dataclass(frozen=True)
class CompiledMemory:
    """Buffers that one call of a compiled function allocates, parameters left out.

    Attributes:
        output_bytes: one entry for each output that is not written into a parameter.
        temporary_bytes: blocks for everything in between, allocated before the program runs; mostly one.
    """

    output_bytes: tuple[int, ...]
    temporary_bytes: tuple[int, ...]

    def in_one_block(self, more: float) -> CompiledMemory:
        """The memory where outputs, too, are temporary, as in the middle of a larger program that adds ``more``."""
        together = sum(self.output_bytes) + sum(self.temporary_bytes)
        return CompiledMemory((), (int(together * (1 + more)),))


def program_memory(compiled: _private.CompiledProgram) -> CompiledMemory:
    """The buffers of a compiled program."""
    allocations = [
        a
        for a in compiled.buffer_assignment.buffer_allocations
        if not (a.is_entry_computation_parameter or a.is_constant or a.is_thread_local)
    ]
    return CompiledMemory(
        output_bytes=tuple(a.size for a in allocations if a.maybe_live_out),
        temporary_bytes=tuple(a.size for a in allocations if not a.maybe_live_out),
    )
