"""A memory model of TensorFlow that is too low, so that what runs breaks its budget."""

from __future__ import annotations

import dataclasses

import pytest


def sees_only(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every predicted peak is this share of what it was, as if operations had scratch memory unknown to the model."""
    from remat.tensorflow.peak.allocator import AllocatorModel

    own = AllocatorModel.peak_range

    def too_low(self, graph, schedule, *how):
        found = own(self, graph, schedule, *how)
        return dataclasses.replace(
            found, expected_bytes=int(share * found.expected_bytes), highest_bytes=int(share * found.highest_bytes)
        )

    monkeypatch.setattr(AllocatorModel, "peak_range", too_low)
