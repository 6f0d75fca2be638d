"""Makes the models beside these tests importable, and keeps what PyTorch's profiler prints out of the output."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def no_compiled_code():
    """Each test captures anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def under(monkeypatch):
    """Graph mode under a schedule of the test's own."""
    import remat.torch
    from remat.torch.graph_mode.candidate import GraphCandidate  # Dynamo, which it imports, takes seconds.

    def compiled(loss_fn, schedule):
        monkeypatch.setattr(GraphCandidate, "fitted", lambda self, request: schedule(self.graph))
        return remat.torch.compile(loss_fn, backend="aten")

    return compiled
