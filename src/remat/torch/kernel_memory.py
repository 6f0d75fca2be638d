"""What compiled kernels need at their peak, from the lifetimes of their buffers.

Inductor frees a buffer after its last use, lets a kernel write over an input that nobody reads later, and hands a freed
buffer on to a later one of the same size. The last costs memory in between, and is done only where that does not raise
the peak that Inductor knows of, which takes nothing to be written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Buffer:
    """One buffer of a compiled module.

    Attributes:
        name: unique.
        size_bytes: what is allocated when it is made; 0 for the parts of a result that are allocated together.
        freed_bytes: what is freed at its end.
        start: number of the kernel that makes it.
        end: the kernel after which it is freed; None for what outlives the module.
        is_pooled: may it be given the memory of a buffer that was freed before?
        kind: device, type and size; memory is handed on among buffers of a kind only, and not at all where it is "".
        takes_over: the buffer that it is written over.
        is_stored: False for a value that never leaves a fused kernel; Inductor counts it when it looks for the peak.
    """

    name: str
    size_bytes: int
    freed_bytes: int
    start: int
    end: int | None
    is_pooled: bool
    kind: str
    takes_over: str | None = None
    is_stored: bool = True


def peak_of_kernels(buffers: Sequence[Buffer], kernels: int) -> int:
    """Peak bytes of so many kernels in their order."""
    changes = np.zeros(kernels + 1, dtype=np.int64)
    for buffer in buffers:
        changes[buffer.start] += buffer.size_bytes
        if buffer.end is not None:
            changes[buffer.end + 1] -= buffer.freed_bytes
    known = np.cumsum(changes)
    real = known.copy()
    peak_known = int(known.max(initial=0))
    taken_over = {buffer.takes_over for buffer in buffers}
    starts: list[list[Buffer]] = [[] for _ in range(kernels)]
    ends: list[list[Buffer]] = [[] for _ in range(kernels)]
    for buffer in buffers:
        starts[buffer.start].append(buffer)
        if buffer.end is not None and buffer.kind and buffer.is_stored and buffer.name not in taken_over:
            ends[buffer.end].append(buffer)
    pools: dict[str, list[Buffer]] = {}
    for step in range(kernels):
        for buffer in starts[step]:
            if buffer.takes_over is not None or not buffer.is_stored:
                real[step] -= buffer.size_bytes
                continue
            pool = pools.get(buffer.kind)
            if not buffer.is_pooled or not pool:
                continue
            end = pool[-1].end
            assert end is not None, "only what was freed is in a pool"
            between = slice(end + 1, step)
            if end + 1 == step or buffer.size_bytes + known[between].max() <= peak_known:
                pool.pop()
                known[between] += buffer.size_bytes
                real[between] += buffer.size_bytes
        for buffer in ends[step]:
            pools.setdefault(buffer.kind, []).append(buffer)
    return int(real.max(initial=0))
