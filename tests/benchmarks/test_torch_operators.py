"""The table of PyTorch's operators on a CPU."""

from __future__ import annotations

import pytest

from benchmarks import torch_operators


def test_what_is_counted_stands_beside_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_operators, "seconds", lambda function: 1e-3)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in torch_operators.rows()]
    counted = {name: (taken, figure, ratio) for name, taken, figure, ratio in rows}
    # Each took as long as a product of 512 x 512, and so its 268 million operations.
    assert {taken for taken, _, _ in counted.values()} == {"268.4"}
    assert counted["native_dropout"] == ("268.4", "173.0", "0.64")
    assert counted["pow 1.7"][1] == counted["tanh"][1] == "68.2"
    assert len(counted) == len(rows) == 29
