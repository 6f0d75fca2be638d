"""How a batch is cut: NumPy's ``array_split``, one check of the count, one way to count samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat import UnsupportedStep
from remat.micro_batches.cut import (
    batch_places,
    check_count,
    check_count_or_auto,
    count_samples,
    cut,
    largest_size,
    names_of_tensors,
)


@given(st.integers(1, 200), st.integers(1, 220))
def test_the_pieces_are_those_of_array_split(samples: int, count: int) -> None:
    expected = [part for part in np.array_split(np.arange(samples), count) if len(part)]

    groups = cut(samples, count)

    found = [np.arange(start, start + group.size) for group in groups for start in group.starts]
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]
    assert len({group.size for group in groups}) == len(groups) <= 2
    assert largest_size(samples, count) == max(map(len, expected))


def test_nine_samples_in_six() -> None:
    assert [group.size for group in cut(9, 6) for _ in group.starts] == [2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "2", None])
def test_what_is_no_count(count: object) -> None:
    for check in (check_count, lambda given: check_count_or_auto(given, "1GiB")):
        with pytest.raises(ValueError, match="micro_batches must be a whole number of at least 1, not"):
            check(count)


def test_auto_needs_a_budget() -> None:
    assert check_count_or_auto("auto", "1GiB") is None
    assert check_count_or_auto(3, None) == check_count(3) == 3
    with pytest.raises(ValueError, match="chooses what a budget costs least with; give one"):
        check_count_or_auto("auto", None)
    with pytest.raises(ValueError, match="not 'auto'"):
        check_count("auto")


def test_which_arguments_hold_the_batch() -> None:
    assert batch_places(None, 3, (1, 2)) == (1, 2)
    assert batch_places(1, 3, ()) == (1,)
    assert batch_places((-1, 0, 2), 3, ()) == (0, 2)
    with pytest.raises(UnsupportedStep, match="names argument 3, and the function got 3 positional arguments"):
        batch_places((0, 3), 3, ())
    assert names_of_tensors("argument 1", 1) == ["argument 1"]
    assert names_of_tensors("x", 2) == ["x (its tensor 0)", "x (its tensor 1)"]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "there is no tensor to split"),
        ([(4, 2), ()], r"tensor 1 has the shape \(\), so it cannot be split"),
        ([(4, 2), None], "tensor 1 has no known shape"),
        ([(4, 2), (None,), (5,)], "tensor 0 has 4 samples and tensor 2 has 5"),
        ([(0, 2)], "the batch has no samples"),
    ],
)
def test_what_cannot_be_cut(shapes: list[tuple[int, ...] | None], message: str) -> None:
    with pytest.raises(UnsupportedStep, match=message):
        count_samples(shapes, [f"tensor {n}" for n in range(len(shapes))])


def test_samples_are_counted_where_every_shape_is_known() -> None:
    assert count_samples([(4, 2), (4,)], ["x", "y"]) == 4
    assert count_samples([(4, 2), (None, 3)], ["x", "y"]) is None
