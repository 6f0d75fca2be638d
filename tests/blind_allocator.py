"""A memory model of TensorFlow that is too low, so that what runs breaks its budget."""

from __future__ import annotations

import dataclasses

import pytest


def misses_three_tenths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every predicted peak is seven tenths of what it was, as if operations had scratch memory unknown to the model."""
    from remat.tensorflow.peak.allocator import AllocatorModel

    own = AllocatorModel.peak_range

    def too_low(self, graph, schedule):
        found = own(self, graph, schedule)
        return dataclasses.replace(
            found, expected_bytes=int(0.7 * found.expected_bytes), highest_bytes=int(0.7 * found.highest_bytes)
        )

    monkeypatch.setattr(AllocatorModel, "peak_range", too_low)
