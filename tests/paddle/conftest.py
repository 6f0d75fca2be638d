"""Makes the models beside these tests importable; each test starts in eager mode from the same random state."""

from __future__ import annotations

import sys
from pathlib import Path

import paddle
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def seeded_and_eager():
    paddle.disable_static()
    paddle.seed(0)
    yield
    paddle.disable_static()
