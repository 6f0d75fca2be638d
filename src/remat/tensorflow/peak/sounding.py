"""Which free chunks TensorFlow's heap has now on a CPU, found by asking for blocks and looking where they lie.

The heap hands out the best free chunk, so blocks of one small size fill its holes one after the other, the smallest
first. Where they lie tells how large each hole is. Nothing is written into the blocks, and they are given back at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

import numpy as np
import tensorflow as tf

from remat.running.best_fit_heap import ENDLESS_BYTES
from remat.tensorflow.peak.device import Device

_MOST_BLOCKS: Final = 2000
"""Of a sounding: some 50 us each. More of them find smaller holes in a large heap."""

_ALIGNMENT_BYTES: Final = 256
"""Of all chunks."""

_ODD_BYTES: Final = 4096
"""A block of a multiple of these, less one alignment, hardly ever fills a whole chunk: those have rounder sizes."""


def free_chunks(device: Device, most_bytes: int) -> tuple[int, ...] | None:
    """The bytes of the heap's free chunks that are smaller than ``most_bytes`` together, the lowest address first.

    While this looks, the device's counter shows up to ``most_bytes`` more, which then stand in its peak. Chunks below
    the smallest block that the counter knows of are not found.

    Args:
        device: whose heap; its garbage has been collected.
        most_bytes: that may be asked for, in all.

    Returns:
        Of the largest one at least so many bytes where its end cannot be found within ``most_bytes``, and
        ``ENDLESS_BYTES`` where it holds whatever may be asked for. None where nothing can be told: with fewer bytes
        than a block has, without memory for one, on a GPU, on a CPU without a counter or one that several devices
        share, and where TensorFlow makes graphs only.
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
            holes = _joined(_blocks(device, itertools.repeat(block_bytes, most_bytes // block_bytes)))
            if not holes:
                return None
            start = holes[-1][0]  # The smallest is filled first.
            ends = {**dict(holes), start: _whole(device, start, max(size for _, size in holes), most_bytes)}
            return tuple(size for _, size in sorted(ends.items()))


def _whole(device: Device, start: int, least_bytes: int, most_bytes: int) -> int:
    """The bytes of the largest hole, of which the search may have seen the beginning only.

    The heap hands out a chunk as a whole where it has less than twice of what is asked for, and the counter shows that.

    Args:
        device: whose heap.
        start: where the hole begins.
        least_bytes: that it has; no other hole that was found has more.
        most_bytes: that may be asked for.
    """
    half_bytes = most_bytes // 2 // _ODD_BYTES * _ODD_BYTES - _ALIGNMENT_BYTES
    if half_bytes < device.allocator.min_counted_bytes:
        return least_bytes
    for asked_bytes in (half_bytes, least_bytes + _ALIGNMENT_BYTES):
        if asked_bytes > half_bytes:  # What fits in no other hole fits in this one.
            return ENDLESS_BYTES
        for address, size in _blocks(device, [asked_bytes]):
            if address == start:
                return ENDLESS_BYTES if size == half_bytes else size
    return least_bytes


def _blocks(device: Device, sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Address and bytes of chunk after chunk, all of which are held until the last one is there."""
    held = []
    chunks = []
    in_use = device.counted_bytes
    for size in sizes:
        try:
            held.append(tf.raw_ops.Empty(shape=[size], dtype=tf.uint8, init=False))
        except tf.errors.ResourceExhaustedError:
            break
        before, in_use = in_use, device.counted_bytes
        chunks.append((int(np.asarray(memoryview(held[-1])).ctypes.data), in_use - before))
    return chunks


def _joined(chunks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Address and bytes of stretches of chunks that lie side by side and came one after the other."""
    holes: list[tuple[int, int]] = []
    for address, size in chunks:
        if holes and address == sum(holes[-1]):
            holes[-1] = holes[-1][0], holes[-1][1] + size
        else:
            holes.append((address, size))
    return holes
