"""A step of more than 6,000 ops is planned, and its smallest budget named, in work that is bound for each op."""

from __future__ import annotations

import contextlib
import gc

import pytest

from remat import Graph, InfeasibleBudget, Op, Tensor, simulate
from remat.planners import auto
from remat.planners.methods import peak_greedy
from remat.planners.replay import residents
from remat.planners.replay.rematerialize import _Replay
from remat.planners.replay.residents import TooManyRuns
from remat.planners.view.problem import BoolArray, Problem
from remat.planners.walk.annealing import Walk
from remat.planning.find import find

CELLS = 900
"""Of eleven ops each: 9,901 in all."""


def unrolled(cells: int) -> Graph:
    """A recurrence unrolled in time: gates, a state and an output per cell, and the backward pass through all of them.

    The gradient of the weights adds up over the cells, as in a training step.
    """
    tensors: list[Tensor] = [Tensor(20_000), Tensor(1000), Tensor(1000)]
    ops: list[Op] = []

    def make(size_bytes: int, *inputs: int, time_s: float = 1.0) -> int:
        tensors.append(Tensor(size_bytes))
        ops.append(Op(inputs=inputs, outputs=(len(tensors) - 1,), time_s=time_s))
        return len(tensors) - 1

    hidden, state = 1, 2
    kept = []
    for _ in range(cells):
        gates = make(4000, hidden, 0, time_s=8.0)
        first, second = make(1000, gates), make(1000, gates)
        before, hidden_before = state, hidden
        state = make(1000, first, before)
        hidden = make(1000, second, state)
        kept.append((hidden_before, before, first, second, state))
    d_hidden = make(1000, hidden)
    d_state = d_weights = None
    for hidden_before, before, first, second, state in reversed(kept):
        d_second = make(1000, d_hidden, state)
        d_state = make(1000, d_hidden, second, *([] if d_state is None else [d_state]))
        d_first = make(1000, d_state, before, first)
        d_gates = make(4000, d_first, d_second)
        d_hidden = make(1000, d_gates, 0, time_s=8.0)
        more = [] if d_weights is None else [d_weights]
        d_weights = make(20_000, d_gates, hidden_before, *more, time_s=8.0)
    assert d_weights is not None
    return Graph(tuple(ops), tuple(tensors), (0, 1, 2), (d_weights,), free_order=False, turning_point=5 * cells - 1)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each replay of a test comes to: ops that it runs, and ops that evictions look at."""
    counted: list[int] = []
    schedule = _Replay.schedule

    def watched(self: _Replay) -> tuple[int, ...]:
        try:
            return schedule(self)
        finally:
            counted.append(len(self.runs) + self.visits)

    monkeypatch.setattr(_Replay, "schedule", watched)
    return counted


def test_the_smallest_budget_of_a_large_step_is_named_in_little_work(work: list[int]) -> None:
    """Eviction alone names 4.2 % of this step's peak, and looks at 393 ops for each op of it."""
    graph = unrolled(CELLS)
    plain_bytes = simulate(graph, graph.plain_schedule).peak_bytes

    with pytest.raises(InfeasibleBudget) as caught:
        find(graph, 1)

    assert caught.value.minimum_bytes <= 0.025 * plain_bytes
    assert 0 < sum(work) <= 350 * len(graph.ops)


def test_eviction_and_walks_are_left_out_of_a_large_step_where_something_fits(
    work: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an LSTM over 512 steps eviction took half of the time, and a walk a quarter; they won .07 % at most."""
    walks: list[int] = []
    run = Walk.run

    def watched(self: Walk, steps: int, hot: float, cold: float, deadline_s: float | None) -> int:
        walks.append(steps)
        return run(self, steps, hot, cold, deadline_s)

    monkeypatch.setattr(Walk, "run", watched)
    monkeypatch.setattr(auto, "anneal_anew", lambda search: None)  # Of steps of up to 1,000 ops.
    thorough = find(unrolled(CELLS // 10), "30%")
    assert walks
    work_before = sum(work)
    work.clear()
    walks.clear()
    monkeypatch.setattr(auto, "_LARGE", CELLS)

    plan = find(unrolled(CELLS // 10), "30%")

    assert not walks
    assert 0 < sum(work) <= 0.7 * work_before
    assert plan.overhead <= thorough.overhead + 0.02


def test_a_storage_that_is_too_dear_is_looked_at_once_in_a_large_step(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.of(unrolled(CELLS // 10))
    budget_bytes = int(0.15 * problem.plain.peak_bytes)
    visits = []
    for fewest in (problem.count + 1, problem.count):
        monkeypatch.setattr(residents, "_FEWEST_OPS_REMEMBERED", fewest)
        replay = _Replay(problem, problem.no_drops(), budget_bytes, 0.5, 1.0, 0.05 * problem.graph.time_s, None, None)
        with contextlib.suppress(TooManyRuns):
            replay.schedule()
        visits.append(replay.visits)

    assert 0 < visits[1] < 0.6 * visits[0]


@pytest.mark.parametrize(("many_ops", "choices"), [(CELLS, 1), (100 * CELLS, 4)])
def test_of_a_large_step_the_greedy_offers_its_first_schedule_that_fits(
    many_ops: int, choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further one takes a second on 17,000 ops, and none was cheaper there."""
    chosen: list[int] = []
    drops = peak_greedy.greedy_drops

    def watched(problem: Problem, budget_bytes: int, deadline_s: float | None = None) -> BoolArray:
        chosen.append(budget_bytes)
        return drops(problem, budget_bytes, deadline_s)

    monkeypatch.setattr(peak_greedy, "greedy_drops", watched)
    monkeypatch.setattr(peak_greedy, "_MANY_OPS", many_ops)

    plan = find(unrolled(CELLS // 10), "50%", planner="peak_greedy")

    assert plan.peak_bytes <= plan.budget_bytes
    assert len(chosen) == choices


def test_garbage_is_looked_for_rarely_while_a_planner_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector took a fifth of the time that an LSTM over 512 steps is planned in."""
    thresholds: list[int] = []
    drops = peak_greedy.greedy_drops

    def watched(problem: Problem, budget_bytes: int, deadline_s: float | None = None) -> BoolArray:
        thresholds.append(gc.get_threshold()[0])
        return drops(problem, budget_bytes, deadline_s)

    monkeypatch.setattr(peak_greedy, "greedy_drops", watched)
    before = gc.get_threshold()

    find(unrolled(CELLS // 10), "60%", planner="peak_greedy")

    assert thresholds
    assert min(thresholds) >= 100_000
    assert gc.get_threshold() == before
