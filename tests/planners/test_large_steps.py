"""A step of more than 6,000 ops is planned, and its smallest budget named, in work that is bound for each op."""

from __future__ import annotations

import contextlib

import pytest

from remat import Graph, InfeasibleBudget, Op, Tensor, simulate
from remat.planners import auto
from remat.planners.replay import residents
from remat.planners.replay.rematerialize import _Replay
from remat.planners.replay.residents import TooManyRuns
from remat.planners.view.problem import Problem
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


def test_eviction_is_left_out_of_a_large_step_where_something_fits(
    work: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an LSTM over 512 steps eviction took half of the time and found nothing cheaper."""
    thorough = find(unrolled(CELLS // 10), "30%")
    work_before = sum(work)
    work.clear()
    monkeypatch.setattr(auto, "_LARGE", CELLS)

    plan = find(unrolled(CELLS // 10), "30%")

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
