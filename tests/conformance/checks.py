"""What every front end must show. Each check raises AssertionError for a front end that does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from front_ends import FrontEnd

import remat

# Activations of 1 MiB: blocks under 256 KiB are missing from TensorFlow's counter.
WIDTH, BATCH, LAYERS = 64, 4096, 8


def weights(front_end: FrontEnd, layers: int = LAYERS) -> list[Any]:
    random = np.random.default_rng(0)
    return [front_end.array((random.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype("float32")) for _ in range(layers)]


def batch(front_end: FrontEnd, samples: int = BATCH, seed: int = 1) -> Any:
    return front_end.array(np.random.default_rng(seed).normal(size=(samples, WIDTH)).astype("float32"))


def chain(front_end: FrontEnd) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = front_end.tanh(x @ w)
        return front_end.mean(x * x)

    return loss


def assert_close(front_end: FrontEnd, found: Any, expected: Any) -> None:
    assert len(found[1]) == len(expected[1])
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        assert float(np.abs(one - other).max()) <= front_end.rounding * float(np.abs(other).max())


def the_graph_is_legal_and_holds_no_framework_objects(front_end: FrontEnd, folder: Path) -> None:
    graph = front_end.traced(chain(front_end), weights(front_end), batch(front_end))

    remat.validate(graph, graph.plain_schedule)
    assert len(graph.ops) >= 3 * LAYERS
    assert graph.outputs
    sizes = [tensor.size_bytes for tensor in graph.tensors]
    assert sizes.count(BATCH * WIDTH * 4) >= LAYERS
    held = [value for part in (*graph.ops, *graph.tensors) for value in vars(part).values()]
    flat = [inner for value in held for inner in (value if isinstance(value, tuple) else (value,))]
    flat = [inner for value in flat for inner in (value if isinstance(value, tuple) else (value,))]
    assert {type(value) for value in flat} <= {int, float, str, bool, type(None)}
    graph.save(folder / "graph.json")
    assert remat.load_graph(folder / "graph.json") == graph
    assert front_end.traced(chain(front_end), weights(front_end), batch(front_end)).fingerprint == graph.fingerprint


def a_budget_is_kept_with_the_same_numbers(front_end: FrontEnd, folder: Path) -> None:
    args = weights(front_end), batch(front_end)
    plain = front_end.step(chain(front_end))
    expected = plain(*args)
    whole = front_end.peak_bytes(plain, *args)
    step = front_end.step(chain(front_end), budget="65%")
    found = step(*args)
    measured = front_end.peak_bytes(step, *args)
    plan = step.plan

    assert_close(front_end, found, expected)
    assert plan.recomputed > 0
    assert measured <= plan.budget_bytes
    assert measured < 0.8 * whole
    assert abs(plan.peak_bytes - measured) <= front_end.accuracy * measured
    plan.save(folder / "plan.json")
    assert json.loads((folder / "plan.json").read_text())["format"] == "remat.plan"
    loaded = remat.load_plan(folder / "plan.json")
    assert loaded.to_json() == plan.to_json()
    followed = front_end.step(chain(front_end), plan=loaded)
    assert_close(front_end, followed(*args), expected)
    assert front_end.peak_bytes(followed, *args) <= plan.budget_bytes


def random_draws_are_those_of_the_plain_step(front_end: FrontEnd, folder: Path) -> None:
    args = weights(front_end, 5), batch(front_end)

    def run(seed: int, budget: str | None) -> tuple[Any, Any]:
        drop, source = front_end.dropout(seed)

        def loss(params: Any, x: Any, *source: Any) -> Any:
            for w in params:
                x = drop(front_end.tanh(x @ w), *source)
            return front_end.mean(x * x)

        step = front_end.step(loss, budget=budget)
        return step(*args, *source), step.plan

    expected, _ = run(3, None)
    found, plan = run(3, "70%")
    other, _ = run(4, "70%")

    assert plan.recomputed > 0
    assert_close(front_end, found, expected)
    assert abs(float(other[0]) - float(expected[0])) > 1e-6


def a_budget_that_nothing_fits_is_refused_with_one_that_does(front_end: FrontEnd, folder: Path) -> None:
    args = weights(front_end), batch(front_end)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        front_end.step(chain(front_end), budget=1000)(*args)
    minimum = caught.value.minimum_bytes
    assert caught.value.budget_bytes == 1000
    assert "1000 bytes" in str(caught.value)
    assert str(minimum) in str(caught.value)
    step = front_end.step(chain(front_end), budget=minimum)
    assert_close(front_end, step(*args), front_end.step(chain(front_end))(*args))
    assert front_end.peak_bytes(step, *args) <= minimum


def a_plan_for_another_step_is_refused(front_end: FrontEnd, folder: Path) -> None:
    x = batch(front_end)
    plan = remat.plan(front_end.traced(chain(front_end), weights(front_end), x), "70%", time_limit_s=0.5)
    with pytest.raises(remat.PlanMismatch, match="plan again for this graph"):
        front_end.step(chain(front_end), plan=plan)(weights(front_end, LAYERS - 1), x)
    with pytest.raises(remat.InvalidBudget, match="plenty"):
        front_end.step(chain(front_end), budget="plenty")(weights(front_end), x)


def times_are_those_of_the_device_that_the_environment_names(front_end: FrontEnd, folder: Path) -> None:
    args = weights(front_end, 2), batch(front_end)

    def plain_time_s(device: str) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REMAT_DEVICE", device)
            step = front_end.step(chain(front_end), budget="100%")
            step(*args)
        return float(step.plan.baseline_time_s)

    assert plain_time_s("h200") < plain_time_s("cpu") / 5


def recompute_saves_memory_and_takes_any_arguments(front_end: FrontEnd, folder: Path) -> None:
    def pair(x: Any, a: Any, scale: float = 1.0, *, mask: Any = None, twice: bool = False) -> Any:
        assert mask is None
        hidden = front_end.tanh(front_end.tanh(front_end.tanh(x @ a) @ a) @ a)
        return hidden * scale if twice else hidden

    def loss_with(block: Callable[..., Any]) -> Callable[..., Any]:
        def loss(params: Any, x: Any) -> Any:
            for w in params:
                x = block(x, w, 2.0, mask=None, twice=True)
            return front_end.mean(x * x)

        return loss

    args = weights(front_end, 5), batch(front_end)
    plain, ours = (front_end.step(loss_with(f)) for f in (pair, front_end.verbs.recompute(pair)))
    assert_close(front_end, ours(*args), plain(*args))
    assert front_end.peak_bytes(ours, *args) < 0.7 * front_end.peak_bytes(plain, *args)


def micro_batches_give_the_numbers_of_the_whole_batch(front_end: FrontEnd, folder: Path) -> None:
    """Samples that do not divide evenly, sums, and denominators that differ from part to part."""
    params, x = weights(front_end, 2), batch(front_end, 37)
    mask = front_end.array((np.random.default_rng(5).random(37) < 0.5).astype("float32"))

    def total(params: Any, x: Any) -> Any:
        for w in params:
            x = front_end.tanh(x @ w)
        return front_end.sum(x * x)

    def ratio(params: Any, x: Any, mask: Any) -> Any:
        for w in params:
            x = front_end.tanh(x @ w)
        return front_end.sum(front_end.sum(x * x, 1) * mask), front_end.sum(mask)

    def quotient(params: Any, x: Any, mask: Any) -> Any:
        value, count = ratio(params, x, mask)
        return value / count

    cases = (("mean", chain(front_end), chain(front_end), (x,)), ("sum", total, total, (x,)))
    for reduction, loss, whole, data in (*cases, ("ratio", ratio, quotient, (x, mask))):
        found = front_end.micro_batched(loss, 4, reduction)(params, *data)
        assert_close(front_end, found, front_end.step(whole)(params, *data))


CHECKS: tuple[Callable[[FrontEnd, Path], None], ...] = (
    the_graph_is_legal_and_holds_no_framework_objects,
    a_budget_is_kept_with_the_same_numbers,
    random_draws_are_those_of_the_plain_step,
    a_budget_that_nothing_fits_is_refused_with_one_that_does,
    a_plan_for_another_step_is_refused,
    times_are_those_of_the_device_that_the_environment_names,
    recompute_saves_memory_and_takes_any_arguments,
    micro_batches_give_the_numbers_of_the_whole_batch,
)
