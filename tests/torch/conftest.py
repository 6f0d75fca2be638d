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
