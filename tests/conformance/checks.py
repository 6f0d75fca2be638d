"""What every front end must show. Each check raises AssertionError for a front end that does not."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from front_ends import FrontEnd

import remat
from remat.core.budget import format_bytes
from remat.fit import plan_cache
from remat.planners import registry
from remat.planning import prove
from remat.running.measurement import Measurement

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


def squares(front_end: FrontEnd) -> Callable[..., Any]:
    """One number for each sample: the sum of the squares that the chain makes of it."""

    def values(params: Any, x: Any) -> Any:
        for w in params:
            x = front_end.tanh(x @ w)
        return front_end.sum(x * x, 1)

    return values


def assert_close(front_end: FrontEnd, found: Any, expected: Any) -> None:
    assert len(found[1]) == len(expected[1])
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        one, other = front_end.numpy(one), front_end.numpy(other)
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
    step = front_end.step(chain(front_end), budget=front_end.kept_share)
    found = step(*args)
    measured = front_end.peak_bytes(step, *args)
    plan = step.plan

    assert_close(front_end, found, expected)
    assert plan.recomputed > 0
    assert measured <= plan.budget_bytes
    assert measured < 0.8 * whole
    assert abs(plan.peak_bytes - measured) <= front_end.accuracy * measured
    assert format_bytes(plan.peak_bytes) in str(plan)
    plan.save(folder / "plan.json")
    assert json.loads((folder / "plan.json").read_text())["format"] == "remat.plan"
    loaded = remat.load_plan(folder / "plan.json")
    assert loaded.to_json() == plan.to_json()


def a_saved_plan_is_followed(front_end: FrontEnd, folder: Path) -> None:
    args = weights(front_end), batch(front_end)
    first = front_end.step(chain(front_end), budget="65%", planner="peak_greedy")
    first(*args)
    assert first.plan.recomputed > 0
    first.plan.save(folder / "plan.json")
    followed = front_end.step(chain(front_end), plan=remat.load_plan(folder / "plan.json"))
    assert_close(front_end, followed(*args), front_end.step(chain(front_end))(*args))
    assert front_end.peak_bytes(followed, *args) <= first.plan.budget_bytes


def a_plan_of_an_earlier_run_is_followed(front_end: FrontEnd, folder: Path) -> None:
    args = weights(front_end), batch(front_end)
    with noted_time_limits() as asked, pytest.MonkeyPatch.context() as patch:
        patch.setenv(plan_cache.ENVIRONMENT_VARIABLE, str(folder / "plans"))
        first = front_end.step(chain(front_end), budget="65%", planner=NOTING)
        expected = first(*args)
        assert "find" in dict(asked), "the first run plans"
        asked.clear()
        again = front_end.step(chain(front_end), budget="65%", planner=NOTING)
        assert_close(front_end, again(*args), expected)
        assert not asked, "the second run follows the plan of the first"
        assert again.plan.schedule == first.plan.schedule
        assert again.plan.budget_bytes == first.plan.budget_bytes
        front_end.step(chain(front_end), budget="75%", planner=NOTING)(*args)
        assert asked, "another budget is another plan"


def random_draws_are_those_of_the_plain_step(front_end: FrontEnd, folder: Path) -> None:
    args = weights(front_end, 5), batch(front_end)

    def run(seed: int, budget: str | None) -> tuple[Any, Any]:
        drop, source = front_end.dropout(seed)

        def loss(params: Any, x: Any, *source: Any) -> Any:
            for w in params:
                x = drop(front_end.tanh(x @ w), *source)
            return front_end.mean(x * x)

        step = front_end.step(loss, budget=budget, planner="peak_greedy")
        return step(*args, *source), step.plan

    expected, _ = run(3, None)
    found, plan = run(3, "75%")
    other, _ = run(4, "75%")

    assert plan.recomputed > 0
    assert_close(front_end, found, expected)
    assert abs(float(other[0]) - float(expected[0])) > 1e-6


def a_budget_that_nothing_fits_is_refused_with_one_that_does(front_end: FrontEnd, folder: Path) -> None:
    args = weights(front_end), batch(front_end)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        front_end.step(chain(front_end), budget=1000, planner="peak_greedy")(*args)
    minimum = caught.value.minimum_bytes
    assert caught.value.budget_bytes == 1000
    assert "1000 bytes" in str(caught.value)
    assert str(minimum) in str(caught.value)
    step = front_end.step(chain(front_end), budget=minimum, planner="peak_greedy")
    assert_close(front_end, step(*args), front_end.step(chain(front_end))(*args))
    assert front_end.peak_bytes(step, *args) <= minimum


def a_plan_for_another_step_is_refused(front_end: FrontEnd, folder: Path) -> None:
    x = batch(front_end)
    plan = remat.plan(front_end.traced(chain(front_end), weights(front_end), x), "70%", planner="peak_greedy")
    with pytest.raises(remat.PlanMismatch, match="plan again for this graph"):
        front_end.step(chain(front_end), plan=plan)(weights(front_end, LAYERS - 1), x)


def a_budget_that_cannot_be_read_is_refused(front_end: FrontEnd, folder: Path) -> None:
    with pytest.raises(remat.InvalidBudget, match="plenty"):
        front_end.step(chain(front_end), budget="plenty")(weights(front_end, 2), batch(front_end, 8))


def times_are_those_of_the_device_that_the_environment_names(front_end: FrontEnd, folder: Path) -> None:
    args = weights(front_end, 2), batch(front_end)

    def plain_time_s(device: str) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REMAT_DEVICE", device)
            step = front_end.step(chain(front_end), budget="100%", planner="peak_greedy")
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


def the_environment_switches_recompute_off(front_end: FrontEnd, folder: Path) -> None:
    recomputed = front_end.verbs.recompute(lambda x, w: front_end.tanh(front_end.tanh(front_end.tanh(x @ w) @ w) @ w))

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = recomputed(x, w)
        return front_end.mean(x * x)

    def peak_bytes(switch: str) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REMAT_RECOMPUTE", switch)
            step, arguments = front_end.step(loss), (weights(front_end, 5), batch(front_end))
            # Without a plan TensorFlow runs what it likes first. The least of its steps was 17.9 to 23.2 MB plain and
            # 9.4 to 12.7 recomputed in eight processes, on one core and on two; .7 was passed once.
            return min(front_end.peak_bytes(step, *arguments) for _ in range(8))

    assert peak_bytes("1") < 0.75 * peak_bytes("0")


def nothing_is_measured_in_no_runs(front_end: FrontEnd, folder: Path) -> None:
    assert front_end.verbs.Measurement is Measurement
    args = weights(front_end, 1), batch(front_end, 8)
    step = front_end.step(chain(front_end))
    with pytest.raises(ValueError, match="repeats=0 measures nothing; give 1 or more"):
        front_end.verbs.measure(step, *args, repeats=0)
    assert type(front_end.verbs.measure(step, *args, repeats=1)) is Measurement


def a_step_goes_with_its_last_user(front_end: FrontEnd, folder: Path) -> None:
    """With all that it holds: who trains one model after another must not run out of memory."""

    def used() -> weakref.ref[Any]:  # A function of its own: frameworks look at the variables of those that call them.
        loss = chain(front_end)
        step = front_end.step(loss, budget=front_end.kept_share, planner="peak_greedy")
        step(weights(front_end), batch(front_end))
        assert step.plan.recomputed > 0
        return weakref.ref(loss)

    loss = used()
    gc.collect()
    assert loss() is None


def no_time_is_no_time(front_end: FrontEnd, folder: Path) -> None:
    with noted_time_limits() as limits:
        step = front_end.step(chain(front_end), budget="80%", planner=NOTING, time_limit_s=0)
        step(weights(front_end), batch(front_end))
        assert step.plan.recomputed > 0
    assert {kind for kind, _ in limits} == {"find", "prove"}
    assert {limit for _, limit in limits} == {0}


NOTING = "noting"


@contextlib.contextmanager
def noted_time_limits() -> Iterator[list[tuple[str, float | None]]]:
    """The wall seconds that are given to the planner ``NOTING`` and to the proofs of its plans."""
    limits: list[tuple[str, float | None]] = []
    bound_of = prove.overhead_lower_bound

    def planner(graph: Any, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
        limits.append(("find", time_limit_s))
        return registry.get_planner("peak_greedy")(graph, budget_bytes)

    def bound(graph: Any, budget_bytes: int, time_limit_s: float | None, *more: Any, **options: Any) -> Any:
        limits.append(("prove", time_limit_s))
        return bound_of(graph, budget_bytes, time_limit_s, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._PLANNERS, NOTING, planner)
        patch.setattr(prove, "overhead_lower_bound", bound)
        yield limits


def micro_batches_give_the_numbers_of_the_whole_batch(front_end: FrontEnd, folder: Path) -> None:
    """Samples that do not divide evenly, sums, and denominators that differ from piece to piece."""
    params, x = weights(front_end, 2), batch(front_end, 37)
    mask = np.random.default_rng(5).random(37) < 0.5
    mask[:10] = False  # The first of four pieces is all masked.
    for reduction in ("mean", "sum", "ratio"):
        data = (x, front_end.array(mask.astype("float32"))) if reduction == "ratio" else (x,)
        found = front_end.micro_batched(squares(front_end), 4, reduction)(params, *data)
        assert_close(front_end, found, front_end.whole(squares(front_end), reduction)(params, *data))


def a_batch_that_is_all_masked_gives_nothing(front_end: FrontEnd, folder: Path) -> None:
    params, x = weights(front_end, 2), batch(front_end, 9)
    nothing = front_end.array(np.zeros(9, "float32"))
    for count in (1, 4):
        value, gradients = front_end.micro_batched(squares(front_end), count, "ratio")(params, x, nothing)
        assert float(value) == 0.0
        assert [np.abs(front_end.numpy(gradient)).max() for gradient in gradients] == [0.0, 0.0]


def batches_are_cut_as_numpy_cuts_them(front_end: FrontEnd, folder: Path) -> None:
    """The square of a piece's sum tells which samples it holds."""

    def values(params: Any, x: Any) -> Any:
        total = front_end.sum(x) / WIDTH
        return front_end.sum(x * total, 1) / WIDTH + 0 * front_end.sum(params[0])

    x = np.repeat(np.arange(1, 10, dtype="float32")[:, None], WIDTH, 1)
    for count in (6, 4, 9):
        value, _ = front_end.micro_batched(values, count, "sum")(weights(front_end, 1), front_end.array(x))
        assert float(value) == sum(piece[:, 0].sum() ** 2 for piece in np.array_split(x, count))


def a_share_with_micro_batches_is_one_of_the_whole_batch(front_end: FrontEnd, folder: Path) -> None:
    args, values = (weights(front_end), batch(front_end)), squares(front_end)
    whole = front_end.micro_batched(values, 1, "mean", budget="100%", planner="peak_greedy")
    step = front_end.micro_batched(values, 3, "mean", budget="60%", planner="peak_greedy")
    assert_close(front_end, step(*args), whole(*args))
    assert step.plan.budget_bytes == pytest.approx(0.6 * whole.plan.baseline_peak_bytes, rel=0.05)
    assert step.plan.recomputed == 0  # Each piece takes some 40 % of what the whole batch does.
    assert front_end.peak_bytes(step, *args) <= step.plan.budget_bytes


CHECKS: tuple[Callable[[FrontEnd, Path], None], ...] = (
    the_graph_is_legal_and_holds_no_framework_objects,
    a_budget_is_kept_with_the_same_numbers,
    a_saved_plan_is_followed,
    a_plan_of_an_earlier_run_is_followed,
    random_draws_are_those_of_the_plain_step,
    a_budget_that_nothing_fits_is_refused_with_one_that_does,
    a_budget_that_cannot_be_read_is_refused,
    a_plan_for_another_step_is_refused,
    times_are_those_of_the_device_that_the_environment_names,
    recompute_saves_memory_and_takes_any_arguments,
    the_environment_switches_recompute_off,
    nothing_is_measured_in_no_runs,
    a_step_goes_with_its_last_user,
    no_time_is_no_time,
    micro_batches_give_the_numbers_of_the_whole_batch,
    a_batch_that_is_all_masked_gives_nothing,
    batches_are_cut_as_numpy_cuts_them,
    a_share_with_micro_batches_is_one_of_the_whole_batch,
)
