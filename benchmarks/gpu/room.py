"""How much of the device a step needs: what its tensors take, and what PyTorch's allocator cannot hand out besides."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

SHARES: Final = (1.0, 1.01, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0)
"""Of a step's peak: the allocator may take no more than this of the device, until a step runs."""

STEPS: Final = 3
"""That must run within a share: later ones begin with what the first has left behind."""


def lines(steps: Iterator[tuple[str, int, Callable[[], None]]]) -> Iterator[dict[str, Any]]:
    """A line for each step: the smallest share of ``SHARES`` in which it runs.

    Args:
        steps: what each is called, its peak in bytes, and what runs it.
    """
    if not torch.cuda.is_available():
        yield {"name": "room", "error": "only PyTorch's allocator of a GPU has a limit: run it where CUDA is"}
        return
    total = torch.cuda.get_device_properties(0).total_memory
    for name, peak_bytes, run in steps:
        line = {"name": name, "peak_bytes": peak_bytes, "freed": 0}
        for share in SHARES:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_accumulated_memory_stats()
            torch.cuda.set_per_process_memory_fraction(min(1.0, share * peak_bytes / total))
            try:
                for _ in range(STEPS):
                    run()
            except torch.OutOfMemoryError:
                continue
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            line |= {"share": share, "freed": torch.cuda.memory_stats()["num_alloc_retries"]}
            break
        yield line
