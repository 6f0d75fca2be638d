"""The device that a step runs on: its counter of memory, its size, what is resident there already."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import tensorflow as tf

from remat.errors import InvalidBudget
from remat.tensorflow import _private
from remat.tensorflow.allocator import AllocatorModel

_CPU_STATISTICS_FROM_BYTES = 256 << 10
_ALL_OF_A_GPU_BYTES = 1 << 40
_GPU_MARGIN = 0.08


@dataclass(frozen=True)
class Device:
    """One device of this process.

    Attributes:
        name: as in ``tf.config.experimental.get_memory_info``: "CPU:0", "GPU:0".
    """

    name: str

    @property
    def is_gpu(self) -> bool:
        """Is it a GPU?"""
        return self.name.startswith("GPU")

    @property
    def allocator(self) -> AllocatorModel:
        """How this device uses and counts memory."""
        if self.is_gpu:
            return AllocatorModel(min_counted_bytes=0, first_region_bytes=_ALL_OF_A_GPU_BYTES)
        return AllocatorModel(_CPU_STATISTICS_FROM_BYTES, converts_half=True)

    @property
    def in_use_bytes(self) -> int:
        """Bytes in use now by this device's own counter, after garbage is gone; 0 where there is no counter."""
        gc.collect()
        return self._statistics("current")

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes in use since the last reset; 0 where there is no counter."""
        return self._statistics("peak")

    def reset_peak(self) -> None:
        """Start a new peak."""
        tf.config.experimental.reset_memory_stats(self.name)

    def auto_budget_bytes(self) -> int:
        """The device's memory less a margin for the context, libraries' workspaces and fragmentation.

        Raises:
            InvalidBudget: on a CPU, whose memory is shared with everything else.
        """
        if not self.is_gpu:
            raise InvalidBudget(
                f"budget 'auto' means a GPU's memory less a margin, but the step runs on {self.name}; "
                'give a number of bytes such as "4GiB", or a share of the plain step such as "60%"'
            )
        return int(_private.memory_limit_bytes(self.name) * (1 - _GPU_MARGIN))

    def _statistics(self, key: str) -> int:
        if not self.is_gpu and os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0":
            return 0  # Without oneDNN the CPU allocator keeps no statistics.
        return int(tf.config.experimental.get_memory_info(self.name)[key])


def current_device() -> Device:
    """The device that TensorFlow puts operations on: the first GPU, else the CPU."""
    return Device("GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0")
