"""What a loss function may return, by reduction."""

from __future__ import annotations

import pytest

from remat import UnsupportedStep
from remat.micro_batches.reduce import REDUCTIONS, check_reduction, sum_and_denominator


def test_names() -> None:
    assert [check_reduction(name) for name in REDUCTIONS] == ["mean", "sum", "ratio"]
    with pytest.raises(ValueError, match="reduction must be one of 'mean', 'sum', 'ratio', not 'average'"):
        check_reduction("average")


def test_what_a_loss_returns() -> None:
    assert sum_and_denominator(3.0, "mean") == sum_and_denominator(3.0, "sum") == (3.0, None)
    assert sum_and_denominator((3.0, 2.0), "ratio") == (3.0, 2.0)


@pytest.mark.parametrize(
    ("result", "reduction", "message"),
    [
        (3.0, "ratio", r"with reduction='ratio' the function must return a pair \(sum, denominator\).*one value"),
        ((1.0, 2.0, 3.0), "ratio", "3 values"),
        ((3.0, 2.0), "mean", "with reduction='mean' the function must return one scalar, and it returned 2 values"),
    ],
)
def test_what_a_loss_must_not_return(result: object, reduction: str, message: str) -> None:
    with pytest.raises(UnsupportedStep, match=message):
        sum_and_denominator(result, reduction)
