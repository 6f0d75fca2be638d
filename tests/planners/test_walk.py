"""Wherever the walk goes, its state is a legal schedule whose bytes are counted right."""

from __future__ import annotations

import random

import numpy as np
import pytest

from remat import Graph, Op, Tensor, simulate, validate
from remat.core.schedule import keeps_program_order
from remat.planners import get_planner
from remat.planners.view.board import Board, expand
from remat.planners.view.problem import Problem
from remat.planners.walk.annealing import Walk
from remat.planners.walk.edits import _UNKNOWN, Edits
from remat.testing import chain, layered, random_graph


def walked(graph: Graph, share: float, seed: int, steps: int = 400, *, bold: bool = False) -> Walk:
    problem = Problem.of(graph)
    board = Board(problem, whole=graph.free_order)
    walk = Walk(board, graph.plain_schedule, int(share * problem.plain.peak_bytes), seed, bold=bold)
    walk.run(steps, 1e-1, 1e-3, None)
    return walk


@pytest.mark.parametrize("seed", range(120))
def test_every_state_is_a_legal_schedule(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(5, 40)) if seed % 2 else layered(rng.randint(10, 60), seed)
    walk = walked(graph, rng.uniform(0.3, 0.95), seed, bold=seed % 3 == 0)
    counted = walk.slots.bytes.copy()
    walk.slots._count_all()
    np.testing.assert_array_equal(counted, walk.slots.bytes)
    np.testing.assert_array_equal(walk.over, np.maximum(counted - walk.budget, 0))
    validate(graph, walk.slots.schedule())


@pytest.mark.parametrize("seed", range(20))
def test_the_best_fits_and_costs_what_it_says(seed: int) -> None:
    graph = layered(40, seed)
    problem = Problem.of(graph)
    share = 0.7 + 0.3 * problem.largest_step_bytes / problem.plain.peak_bytes
    walk = walked(graph, share, seed, steps=6000)
    assert walk.best is not None
    timeline = simulate(graph, expand(walk.board, walk.best))
    assert timeline.peak_bytes <= walk.budget
    assert timeline.time_s - graph.time_s == pytest.approx(walk.best_s)


@pytest.mark.parametrize(("share", "patience", "tried"), [(0.0, 6000, 2000), (0.99, 200, 5999)])
def test_a_walk_gives_up_where_it_gets_nowhere(share: float, patience: int, tried: int) -> None:
    """Far above its budget after a third of its edits; and right below what it can reach, after edits in vain."""
    graph = layered(40, 3, free_order=False)
    problem = Problem.of(graph)
    board = Board(problem, whole=False)
    budget_bytes = int(share * problem.largest_step_bytes)
    patient, hasty = (Walk(board, graph.plain_schedule, budget_bytes, 0, patience=n) for n in (None, patience))

    assert patient.run(6000, 1e-2, 1e-4, None) == 6000
    assert hasty.run(6000, 1e-2, 1e-4, None) <= tried
    assert hasty.best is None
    assert hasty.is_hopeless == (share == 0.0)


def test_a_walk_that_finds_something_goes_on() -> None:
    graph = layered(40, 3, free_order=False)
    problem = Problem.of(graph)
    board = Board(problem, whole=False)
    budget_bytes = int(0.8 * problem.plain.peak_bytes + 0.2 * problem.largest_step_bytes)
    patient, hasty = (Walk(board, graph.plain_schedule, budget_bytes, 0, patience=n) for n in (None, 2000))

    assert patient.run(6000, 1e-2, 1e-4, None) == hasty.run(6000, 1e-2, 1e-4, None)
    assert patient.best is not None
    assert patient.best == hasty.best


def across_wide_ops(count: int) -> Graph:
    """A dear tensor is read at the end; before that come wide ops, each with a cheap tensor that is read behind it."""
    ops, tensors = [Op("dear", inputs=(0,), outputs=(1,), time_s=1000.0)], [Tensor(0), Tensor(10)]
    for _ in range(count):
        cheap = len(tensors)
        tensors += [Tensor(10), Tensor(30), Tensor(0)]
        ops.append(Op("cheap", inputs=(0,), outputs=(cheap,), time_s=1.0))
        ops.append(Op("wide", inputs=(0,), outputs=(cheap + 1,)))
        ops.append(Op("use", inputs=(cheap,), outputs=(cheap + 2,)))
    ops.append(Op("last", inputs=(1,), outputs=(len(tensors),)))
    return Graph(tuple(ops), (*tensors, Tensor(0)), (0,), (), free_order=False)


@pytest.mark.parametrize(("bold", "found"), [(False, False), (True, True)])
def test_a_bold_walk_keeps_a_storage_across_many_tight_steps_in_one_edit(bold: bool, found: bool) -> None:
    graph = across_wide_ops(5)
    board = Board(Problem.of(graph), whole=False)
    reached = False
    for seed in range(20):
        walk = Walk(board, [*graph.plain_schedule[:-1], 0, len(graph.ops) - 1], 40, seed, bold=bold)
        assert walk.over_sum == 0
        assert walk.slots.extra_s == 1000.0
        walk.slots.mark()
        if walk.drop_repeat() and walk.repair():
            reached |= walk.slots.extra_s == 5.0 and walk.slots.bytes.max() <= 40
    assert reached == found


def test_a_fixed_order_stays() -> None:
    free, fixed = layered(20, 2), layered(20, 2, free_order=False)
    budget_bytes = int(0.85 * simulate(free, free.plain_schedule).peak_bytes)
    moved = get_planner("simulated_annealing")(free, budget_bytes)
    kept = get_planner("simulated_annealing")(fixed, budget_bytes)
    assert keeps_program_order(kept)
    assert not keeps_program_order(moved)
    assert simulate(free, moved).peak_bytes <= budget_bytes
    assert simulate(free, moved).time_s < simulate(free, kept).time_s


def test_the_same_seed_walks_the_same_way() -> None:
    graph = layered(60, 1)
    first, second = (walked(graph, 0.8, 5, steps=3000) for _ in range(2))
    assert first.slots.order() == second.slots.order()
    assert first.slots.order() != walked(graph, 0.8, 6, steps=3000).slots.order()


def test_what_is_remembered_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which storages lie idle across a slot is looked up again only once the schedule is another one."""
    graph = layered(60, 2, free_order=False)
    remembering = walked(graph, 0.7, 3, steps=3000)
    monkeypatch.setattr(Edits, "_readers_behind", lambda edits, hot: [_UNKNOWN] * len(edits.candidates))
    looking = walked(graph, 0.7, 3, steps=3000)

    assert remembering._readers
    assert remembering.slots.order() == looking.slots.order() != list(graph.plain_schedule)


def test_a_chain_at_half_its_peak_costs_half_a_forward_pass() -> None:
    """The known optimum: what does not fit is recomputed once, from the last kept activation before it."""
    graph = chain(20)
    assert simulate(graph, get_planner("simulated_annealing")(graph, 12)).time_s - graph.time_s <= 12


def test_layered_graphs_are_as_described() -> None:
    for seed in range(5):
        graph = layered(500, seed)
        assert len(graph.ops) == 500
        assert [op for op, readers in enumerate(graph.readers) if not readers] == [499]
        assert [op for op in range(500) if not graph.ops[op].inputs] == [0]
        # In the published instance of 250 ops the last op reads one tensor, where skips would bring it dozens.
        assert len(graph.ops[499].inputs) <= 20
        sizes = sorted(t.size_bytes for t in graph.tensors)
        assert sum(sizes) / 500 == pytest.approx(2000, rel=0.12)
        assert sizes[125] == pytest.approx(700, rel=0.25)
        assert sizes[250] == pytest.approx(1500, rel=0.2)
        assert sizes[375] == pytest.approx(3100, rel=0.15)
    assert layered(100, 1) == layered(100, 1) != layered(100, 2)
