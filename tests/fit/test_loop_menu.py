"""What a forward loop stores: the cheapest way for a share of the bytes, and menus of several loops as one."""

from __future__ import annotations

import pytest

from remat.fit.loop_menu import BodyValues, Option, merged

# h, gate = product(h), curve = tanh(gate): the backward body wants all three, and h is given.
BODY = BodyValues(
    size_bytes=[100, 100, 100],
    made_by=[None, 0, 1],
    wanted=[0, 1, 2],
    time_s=[1.0, 0.1],
    made_bytes=[100, 100],
    may_repeat=[True, True],
    reads=[[0], [1]],
    iterations=50,
)


def test_what_is_cheap_is_made_again_first() -> None:
    assert BODY.cheapest(1.0) == (frozenset({0, 1, 2}), frozenset())
    assert BODY.cheapest(0.7) == (frozenset({0, 1}), frozenset({1}))
    assert BODY.cheapest(0.0) == (frozenset({0}), frozenset({0, 1}))


def test_what_may_not_be_repeated_is_stored() -> None:
    fixed = BodyValues(
        BODY.size_bytes, BODY.made_by, BODY.wanted, BODY.time_s, BODY.made_bytes, [False, True], BODY.reads, 50
    )
    assert fixed.cheapest(0.0) == (frozenset({0, 1}), frozenset({1}))
    assert fixed.all_again() == (frozenset({0, 1}), frozenset({1}))
    assert BODY.all_again() == (frozenset({0}), frozenset({0, 1}))


def test_options_cost_more_the_less_they_hold() -> None:
    options = BODY.options([1.0, 0.7, 0.6, 0.0])
    assert [option.held_bytes for option in options] == [15_000, 10_100, 5_200]
    assert [round(option.again_s, 6) for option in options] == [0.0, 5.0, 55.0]


def test_of_several_loops_the_one_that_saves_most_steps_first() -> None:
    menus = [
        [Option("a0", 100.0, 0.0), Option("a1", 50.0, 5.0)],
        [Option("b0", 100.0, 0.0), Option("b1", 50.0, 1.0), Option("b2", 0.0, 9.0)],
    ]
    assert merged(menus) == [("a0", "b0"), ("a0", "b1"), ("a1", "b1"), ("a1", "b2")]


def test_a_way_that_fits_several_shares_is_looked_for_once(monkeypatch):
    shares = [1.0 - 0.05 * step for step in range(20)] + [0.0]
    one_by_one = [BODY.option(*BODY.cheapest(share)) for share in shares]
    asked = []
    cheapest = BodyValues.cheapest

    def watched(self: BodyValues, share: float) -> tuple[frozenset[int], frozenset[int]]:
        asked.append(share)
        return cheapest(self, share)

    monkeypatch.setattr(BodyValues, "cheapest", watched)
    together = [BODY.option(*way) for way in BODY.cheapest_for(shares)]
    for one, other in zip(together, one_by_one, strict=True):
        assert (one.held_bytes, one.again_s) == (other.held_bytes, other.again_s)
    assert asked == [1.0, 0.95, pytest.approx(0.65), pytest.approx(0.3)]
