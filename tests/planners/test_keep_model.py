"""The keep MILP against enumeration of all choices."""

from __future__ import annotations

import itertools
import random

import pytest

from remat.planners.linear.keep import KeepModel


@pytest.mark.parametrize("seed", range(12))
def test_the_cheapest_choice_of_all_is_found(seed: int) -> None:
    """Up to four values, each made by one op from some of those before it; the first may have no maker at all."""
    rng = random.Random(seed)
    count = rng.randint(2, 4)
    made_by = [None if rng.random() < 0.3 else 0, *range(1, count)]
    reads = [[value for value in range(op) if rng.random() < 0.6] for op in range(count)]
    may_repeat = [rng.random() < 0.8 for _ in range(count)]
    wanted = [value for value in range(count) if rng.random() < 0.7] or [count - 1]
    keep_bytes = [rng.randint(1, 9) for _ in range(count)]
    again_bytes = [rng.randint(0, 3) for _ in range(count)]
    keep_cost, again_cost = [0.01] * count, [float(rng.randint(1, 9)) for _ in range(count)]
    room = rng.randint(1, sum(keep_bytes))

    def cost_of(kept: tuple[int, ...], again: tuple[int, ...]) -> float | None:
        def there(value: int) -> bool:
            maker = made_by[value]
            return bool(kept[value] or (maker is not None and again[maker]))

        legal = (
            all(there(value) for value in wanted)
            and all(there(value) for op in range(count) if again[op] for value in reads[op])
            and all(may or not one for may, one in zip(may_repeat, again, strict=True))
            and sum(k * b for k, b in zip((*kept, *again), (*keep_bytes, *again_bytes), strict=True)) <= room
        )
        return sum(k * c for k, c in zip((*kept, *again), (*keep_cost, *again_cost), strict=True)) if legal else None

    choices = itertools.product(itertools.product((0, 1), repeat=count), repeat=2)
    costs = [cost for kept, again in choices if (cost := cost_of(kept, again)) is not None]

    model = KeepModel(keep_cost, again_cost, made_by, may_repeat)
    for value in wanted:
        model.require(value)
    for op in range(count):
        for value in reads[op]:
            model.require_read(op, value)
    model.limit(enumerate(keep_bytes), enumerate(again_bytes), room)
    found = model.solve(time_limit_s=10.0, gap=0.0)
    if not costs:
        assert found is None
        return
    assert found is not None
    kept, again = (tuple(int(one) for one in part) for part in found)
    assert cost_of(kept, again) == pytest.approx(min(costs))


def test_both_ends_are_met_by_the_cases() -> None:
    """Nothing to choose is no test: some cases recompute, and without room there is no solution."""
    model = KeepModel([0.0, 0.0], [1.0, 1.0], [None, 1])
    model.require(1)
    model.require_read(1, 0)
    model.limit([(0, 1.0), (1, 5.0)], [], 1.0)
    found = model.solve(time_limit_s=10.0, gap=0.0)
    assert found is not None
    assert [part.tolist() for part in found] == [[True, False], [False, True]]
    model.limit([(0, 1.0)], [], 0.0)
    assert model.solve(time_limit_s=10.0, gap=0.0) is None
