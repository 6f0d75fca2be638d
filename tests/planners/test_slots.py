"""An edited schedule counts its bytes as a fresh one does, and as the simulator does."""

from __future__ import annotations

import random

import numpy as np
import pytest

from remat import Graph, Op, Tensor, simulate, validate
from remat.planners.view.board import Board
from remat.planners.view.problem import Problem
from remat.planners.walk.slots import Slots
from remat.testing import random_graph


def edit(slots: Slots, rng: random.Random) -> None:
    """One random legal insertion or removal."""
    board = slots.board
    again = [slot for op, runs in enumerate(slots.runs) for slot in runs[1:]]
    assert sorted(again) == sorted(slots.repeats)
    if again and rng.random() < 0.4:
        slots.remove(rng.choice(again))
        return
    ops = [op for op in range(board.problem.count) if board.repeatable[op] and slots.runs[op]]
    empty = [slot for slot, op in enumerate(slots.op_at) if op < 0]
    if not ops or not empty:
        return
    op = rng.choice(ops)
    late = [slot for slot in empty if slot > slots.runs[op][0]]
    if late:
        slots.insert(rng.choice(late), op)


@pytest.mark.parametrize("seed", range(150))
def test_edits_count_as_a_fresh_start_and_undo_as_if_nothing_was(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 25))
    slots = Slots(Board(Problem.of(graph), whole=rng.random() < 0.7), graph.plain_schedule)
    for _ in range(12):
        slots.mark()
        before = slots.bytes.copy()
        edit(slots, rng)
        after = slots.bytes.copy()
        kept = slots.op_at.copy()
        slots._count_all()
        # Base bytes are laid out by slots, which an edit does not move.
        np.testing.assert_array_equal(after, slots.bytes)
        changed = np.flatnonzero(before != after)
        assert not len(changed) or (slots.low <= changed[0] and changed[-1] < slots.high)
        if rng.random() < 0.3:
            slots.undo()
            np.testing.assert_array_equal(before, slots.bytes)
        else:
            assert slots.op_at == kept
        schedule = slots.schedule()
        assert validate(graph, schedule) >= 0
        extra_s = simulate(graph, schedule).time_s - graph.time_s
        assert extra_s <= slots.extra_s + 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_bytes_are_the_simulators_where_no_views_are(seed: int) -> None:
    rng = random.Random(seed)
    drawn = random_graph(rng, rng.randint(3, 25))
    tensors = tuple(Tensor(t.size_bytes) for t in drawn.tensors)
    # One pair for each op: which of several is taken over is a choice that the board does not follow.
    ops = tuple(Op(**{**vars(op), "in_place": op.in_place[:1]}) for op in drawn.ops)
    graph = Graph(ops, tensors, drawn.inputs, drawn.outputs, drawn.free_order)
    slots = Slots(Board(Problem.of(graph), whole=True), graph.plain_schedule)
    for _ in range(10):
        edit(slots, rng)
    timeline = simulate(graph, slots.schedule())
    counted = [int(slots.bytes[slot]) for slot, op in enumerate(slots.op_at) if op >= 0]
    assert counted == list(timeline.bytes)
    assert slots.extra_s == pytest.approx(timeline.time_s - graph.time_s)
