"""Which free chunks TensorFlow's heap has now on a CPU, found by asking for blocks and looking where they lie.

The heap hands out the best free chunk, so blocks of one small size fill its holes one after the other, the smallest
first. Where they lie tells how large each hole is. Nothing is written into the blocks, and they are given back at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import tensorflow as tf

from remat.tensorflow.peak.device import Device

_MOST_BLOCKS: Final = 2000
"""Of a sounding: some 50 us each. More of them find smaller holes in a large heap."""


def free_chunks(device: Device, most_bytes: int) -> tuple[int, ...] | None:
    """The bytes of the heap's free chunks, the smallest first; the last one is at least so large.

    While this looks, the device's counter shows up to ``most_bytes`` more, which then stand in its peak. Chunks behind
    the first ``most_bytes`` are not found, and none below the smallest block that the counter knows of.

    Args:
        device: whose heap; its garbage has been collected.
        most_bytes: that may be asked for, in all.

    Returns:
        None where it cannot be told: with fewer bytes than a block has, on a GPU, on a CPU without a counter or one
        that several devices share, and where TensorFlow makes graphs only.
    """
    if (
        device.is_gpu
        or not device.has_counter
        or device.shared_by > 1
        or most_bytes < device.allocator.min_counted_bytes
    ):
        return None
    block_bytes = max(device.allocator.min_counted_bytes, most_bytes // _MOST_BLOCKS)
    with tf.init_scope():
        if not tf.executing_eagerly():
            return None
        with tf.device(device.name):
            return tuple(_joined(_blocks(device, block_bytes, most_bytes // block_bytes)))


def _blocks(device: Device, block_bytes: int, count: int) -> Iterator[tuple[int, int]]:
    """Address and bytes of chunk after chunk, all of which are held until the last one is there."""
    held = []
    in_use = device.counted_bytes
    for _ in range(count):
        try:
            held.append(tf.raw_ops.Empty(shape=[block_bytes], dtype=tf.uint8, init=False))
        except tf.errors.ResourceExhaustedError:
            return
        before, in_use = in_use, device.counted_bytes
        yield int(np.asarray(memoryview(held[-1])).ctypes.data), in_use - before


def _joined(chunks: Iterator[tuple[int, int]]) -> list[int]:
    """The bytes of stretches of chunks that lie side by side and came one after the other."""
    holes: list[int] = []
    end = -1
    for address, size in chunks:
        if address == end:
            holes[-1] += size
        else:
            holes.append(size)
        end = address + size
    return holes
