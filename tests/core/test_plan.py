"""``remat.plan`` from budget to checked plan, with real planners and with deliberately wrong ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

import remat
from remat import Graph, InfeasibleBudget, InvalidBudget, InvalidSchedule, Op, PlanMismatch, RematError, Tensor
from remat.core.plan import Update
from remat.planners import planner_names, registry
from remat.planners.linear import bounds as lower_bound
from remat.testing import chain, graphs

PLANNERS = planner_names()

Use = Callable[..., None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Registers, for one test, a planner that returns a given schedule, and notes how it was called."""

    def register(schedule: tuple[int, ...], calls: list[dict[str, Any]] | None = None) -> None:
        def planner(graph: Graph, budget_bytes: int, **keywords: Any) -> tuple[int, ...]:
            if calls is not None:
                calls.append({"budget_bytes": budget_bytes, **keywords})
            return schedule

        monkeypatch.setitem(registry._PLANNERS, "given", planner)

    return register


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replaces the lower bound, in extra seconds."""

    def fix(time_s: float) -> None:
        found = lower_bound.LowerBound(time_s, "as the test says")
        monkeypatch.setattr("remat.planning.prove.overhead_lower_bound", lambda *_, **__: found)

    return fix


# Recomputes activation 1 of chain(3): 7 runs instead of 6, and 4 bytes instead of 5.
RECOMPUTED = (0, 1, 2, 3, 0, 4, 5)


def test_everything_in_a_plan(use: Use, bound: Callable[[float], None]) -> None:
    use(RECOMPUTED)
    bound(0.5)
    graph = chain(3, time_s=2.0)
    plan = remat.plan(graph, 4, planner="given")
    assert dataclasses.asdict(plan) == {
        "schedule": RECOMPUTED,
        "fingerprint": graph.fingerprint,
        "measured_peak_bytes": None,
        "peak_bytes": 4,
        "baseline_peak_bytes": 5,
        "time_s": 14.0,
        "baseline_time_s": 12.0,
        "overhead": 2.0 / 12.0,
        "overhead_lower_bound": 0.5 / 12.0,
        "lower_bound_meaning": "as the test says",
        "planner": "given",
        "budget_bytes": 4,
        "plan_seconds": plan.plan_seconds,
        "traced_peak_bytes": None,
        "traced_budget_bytes": None,
        "split": None,
        "update": None,
        "one_by_one": False,
        "mode": None,
        "expected_time_s": None,
        "baseline_expected_time_s": None,
    }
    assert plan.recomputed == 1
    assert 0 < plan.plan_seconds < 60


def test_report_names_what_matters(use: Use, bound: Callable[[float], None]) -> None:
    use(RECOMPUTED)
    bound(1.0)
    report = str(remat.plan(chain(3, size_bytes=2**20), "80%", planner="given"))
    assert len(report.splitlines()) <= 8
    for part in ("'given'", "4 MiB", "80.0% of plain", "5 MiB", "16.67%", "as the test says", "1 of 6 ops", "1 extra"):
        assert part in report


def test_what_runs_are_expected_to_take_stands_beside_the_overhead(use: Use, tmp_path: Path) -> None:
    use(RECOMPUTED)
    plan = remat.plan(chain(3, time_s=2.0), 4, planner="given")
    assert plan.expected_overhead == plan.overhead == pytest.approx(2.0 / 12.0)
    assert "expected " not in str(plan)

    known = dataclasses.replace(plan, expected_time_s=9.0, baseline_expected_time_s=10.0)
    assert known.expected_overhead == pytest.approx(-0.1)
    assert known.overhead == plan.overhead
    assert "expected       -10.00% (9 s, plain 10 s)" in str(known)
    known.save(tmp_path / "plan.json")
    assert remat.load_plan(tmp_path / "plan.json").expected_overhead == known.expected_overhead


def test_planner_gets_budget_limit_and_options(use: Use) -> None:
    calls: list[dict[str, Any]] = []
    use(RECOMPUTED, calls)
    remat.plan(chain(3), "80%", planner="given", time_limit_s=3.0, seed=7)
    assert calls == [{"budget_bytes": 4, "time_limit_s": 3.0, "seed": 7}]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("budget", ["100%", 5, "1GiB"])
def test_plain_step_that_fits_is_the_plan(planner: str, budget: int | str) -> None:
    graph = chain(3)
    plan = remat.plan(graph, budget, planner=planner)
    assert plan.schedule == graph.plain_schedule
    assert plan.overhead == plan.overhead_lower_bound == 0.0
    assert (plan.recomputed, plan.planner) == (0, planner)


@pytest.mark.parametrize("planner", PLANNERS)
def test_empty_and_one_op_graphs(planner: str) -> None:
    assert remat.plan(Graph((), ()), planner=planner).schedule == ()
    one = Graph((Op(outputs=(0,)),), (Tensor(4),), outputs=(0,))
    assert remat.plan(one, 4, planner=planner).schedule == (0,)
    with pytest.raises(InfeasibleBudget) as caught:
        remat.plan(one, 3, planner=planner)
    assert caught.value.minimum_bytes == 4


def test_step_that_takes_no_time_has_no_overhead(use: Use) -> None:
    use(RECOMPUTED)
    plan = remat.plan(chain(3, time_s=0.0), 4, planner="given")
    assert (plan.overhead, plan.overhead_lower_bound, plan.recomputed) == (0.0, 0.0, 1)


def test_unknown_planner_lists_the_names() -> None:
    # Also where the plain step fits and no planner is needed.
    with pytest.raises(ValueError, match=r"'best'.*store_all"):
        remat.plan(chain(2), "100%", planner="best")


def test_unreadable_budget() -> None:
    with pytest.raises(InvalidBudget, match="'lots'"):
        remat.plan(chain(2), "lots")


def test_infeasible_budget_says_what_binds(use: Use) -> None:
    tensors = (
        Tensor(2**20, "weights"),
        Tensor(2**30, "conv1/output", (64, 56, 56, 256), "float32"),
        Tensor(3 * 2**20, "mask"),
        Tensor(2**21, "loss"),
        Tensor(1, "small"),
    )
    ops = (
        Op("conv1", "Conv2D", (0,), (1, 4), 1.0, workspace_bytes=1024),
        Op("dropout", "Random", (1, 4), (2,), 1.0),
        Op("loss", "Sum", (1, 2, 4), (3,), 1.0, workspace_bytes=2048),
    )
    use((0, 1, 2))
    graph = Graph(ops, tensors, inputs=(0,), outputs=(3,))
    with pytest.raises(InfeasibleBudget) as caught:
        remat.plan(graph, "1MiB", planner="given")
    error = caught.value
    minimum = 2**20 + 2**30 + 3 * 2**20 + 2**21 + 1 + 2048
    assert (error.minimum_bytes, error.budget_bytes) == (minimum, 2**20)
    assert error.binding_op == (
        "op 2 (Sum 'loss'), with tensor 1 'conv1/output' (1 GiB, shape (64, 56, 56, 256), float32); "
        "tensor 2 'mask' (3 MiB, unknown shape); tensor 3 'loss' (2 MiB, unknown shape); 2 KiB of workspace; "
        "1 MiB of inputs resident for the whole step"
    )
    message = str(error)
    assert "1048576 bytes (1 MiB)" in message
    assert f"at least {minimum} bytes" in message
    assert error.binding_op in message
    assert isinstance(error, RematError)
    assert isinstance(error, ValueError)


def test_inputs_alone_can_be_too_large() -> None:
    with pytest.raises(InfeasibleBudget, match="What binds there is 8 B of inputs resident") as caught:
        remat.plan(Graph((), (Tensor(8),), inputs=(0,)), 4, planner="store_all")
    assert caught.value.minimum_bytes == 8


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(graphs(min_ops=1, max_ops=7))
def test_minimum_is_reached_and_below_it_is_not(graph: Graph) -> None:
    plain = remat.simulate(graph, graph.plain_schedule).peak_bytes
    for planner in PLANNERS:
        try:
            minimum = remat.plan(graph, 1, planner=planner, time_limit_s=2.0).peak_bytes
        except InfeasibleBudget as error:
            minimum = error.minimum_bytes
            assert remat.plan(graph, minimum, planner=planner, time_limit_s=2.0).peak_bytes <= minimum
        assert minimum <= max(plain, 1)


@pytest.mark.parametrize(
    ("schedule", "rule"),
    [((0, 1, 2, 3, 4), "missing op"), ((0, 1, 2, 3, 4, 6), "index out of range"), ((1, 0, 2, 3, 4, 5), "unmade input")],
)
def test_wrong_schedule_of_a_planner_is_caught(use: Use, schedule: tuple[int, ...], rule: str) -> None:
    use(schedule)
    with pytest.raises(InvalidSchedule) as caught:
        remat.plan(chain(3), 4, planner="given")
    assert caught.value.rule == rule


def test_validator_and_simulator_must_agree(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use(RECOMPUTED)
    monkeypatch.setattr("remat.core.validator._taken_over", lambda *_: 1)
    with pytest.raises(AssertionError, match=r"'given' the simulator counts 4 bytes and the validator 3"):
        remat.plan(chain(3), 4, planner="given")


def test_bound_above_the_plan_is_an_internal_error(use: Use, bound: Callable[[float], None]) -> None:
    use(RECOMPUTED)
    bound(1.01)
    with pytest.raises(AssertionError, match=r"internal error: the lower bound .*as the test says"):
        remat.plan(chain(3), 4, planner="given")


@pytest.mark.parametrize("extra_s", [1.01, math.inf])
def test_bound_for_program_order_does_not_bind_a_plan_that_leaves_it(
    use: Use, bound: Callable[[float], None], extra_s: float
) -> None:
    makes = (Op("a", outputs=(0,), time_s=1.0), Op("b", outputs=(1,), time_s=1.0))
    reads = (Op("c", inputs=(1,), time_s=1.0), Op("d", inputs=(0,), time_s=1.0))
    graph = Graph((*makes, *reads), (Tensor(4), Tensor(4)))
    use((1, 2, 0, 0, 3))
    bound(extra_s)
    plan = remat.plan(graph, 4, planner="given")
    assert (plan.overhead, plan.overhead_lower_bound) == (0.25, 0.0)
    assert "moves first runs" in plan.lower_bound_meaning


def test_bound_within_rounding_is_clipped(use: Use, bound: Callable[[float], None]) -> None:
    use(RECOMPUTED)
    bound(1.0 + 1e-9)
    plan = remat.plan(chain(3), 4, planner="given")
    assert plan.overhead_lower_bound == plan.overhead == pytest.approx(1 / 6)


def test_real_bound_stays_below_every_plan() -> None:
    graph = chain(12, free_order=False)
    for planner in PLANNERS:
        try:
            plan = remat.plan(graph, "70%", planner=planner)
        except InfeasibleBudget:
            continue
        assert 0 <= plan.overhead_lower_bound <= plan.overhead
        assert math.isfinite(plan.overhead)
        assert plan.lower_bound_meaning


def test_check_graph(use: Use) -> None:
    graph = chain(3)
    plan = remat.plan(graph, "100%", planner="store_all")
    plan.check_graph(graph)
    plan.check_graph(chain(3, time_s=9.0))
    with pytest.raises(PlanMismatch, match=r"covers 6 ops .* the graph has 8 ops .* plan again"):
        plan.check_graph(chain(4))
    with pytest.raises(PlanMismatch):
        plan.check_graph(chain(3, size_bytes=2))


def test_a_mode_is_printed_and_saved(use: Use, bound: Callable[[float], None], tmp_path: Path) -> None:
    use(RECOMPUTED)
    bound(0.5)
    plan = remat.plan(chain(3), 4, planner="given")
    assert "mode" not in str(plan)
    plan = dataclasses.replace(plan, mode="graph")
    assert "mode           graph" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert remat.load_plan(tmp_path / "plan.json").mode == "graph"


def test_an_update_goes_to_json_and_back_and_has_a_line(
    use: Use, bound: Callable[[float], None], tmp_path: Path
) -> None:
    use(RECOMPUTED)
    bound(0.0)
    plan = remat.plan(chain(3), 4, planner="given")
    for update, said in (
        (Update(6, 2**20, "", 0), "6 ops of updates run as soon as their gradient is final: 1 MiB less"),
        (Update(0, 0, "norm (clip.py:3)", 2**20), "1 MiB of gradients wait for norm (clip.py:3)"),
    ):
        changed = dataclasses.replace(plan, update=update)
        changed.save(tmp_path / "plan.json")
        assert remat.load_plan(tmp_path / "plan.json") == changed
        assert said in str(changed)


def test_an_order_goes_to_json_and_back_and_has_a_line(
    use: Use, bound: Callable[[float], None], tmp_path: Path
) -> None:
    use(RECOMPUTED)
    bound(0.0)
    plan = remat.plan(chain(3), 4, planner="given")
    assert "one_by_one" not in plan.to_json()
    assert "order" not in str(plan)
    plan = dataclasses.replace(plan, one_by_one=True)
    assert "order          every op waits for the end of the one before it" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert remat.load_plan(tmp_path / "plan.json") == plan
