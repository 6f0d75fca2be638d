"""Blocks, what each can do, and nested recomputation over a chain of them."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from pathlib import Path

import pytest

from remat import Graph, Op, Tensor, load_graph, simulate, validate
from remat.planners import get_planner
from remat.planners.chain import programme
from remat.planners.chain.blocks import find_blocks
from remat.planners.chain.menus import Option, block_menu, option_of, squeezed
from remat.planners.chain.programme import BlockChain
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.view.board import Board, Condensed
from remat.planners.view.problem import Problem
from remat.testing import chain, random_graph, residual_blocks

GRAPHS = Path(__file__).parents[2] / "benchmarks" / "graphs"


@pytest.mark.parametrize("draws", [False, True])
def test_blocks_take_every_op_once_and_repeat_their_structure(draws: bool) -> None:
    graph = residual_blocks(12, draws=draws)
    blocks = find_blocks(Board(Problem.of(graph), whole=False))
    assert len(blocks) >= 10
    assert len({block.structure for block in blocks}) <= (6 if draws else 4)
    forward = [op for block in blocks for op in block.forward]
    backward = [op for block in reversed(blocks) for op in block.backward]
    assert [*forward, *backward] == sorted({*forward, *backward}) == list(range(len(graph.ops)))


def test_layers_of_a_traced_transformer_share_their_menus() -> None:
    """What was left out when the step was reduced grows from layer to layer, and must not tell them apart."""
    graph = load_graph(GRAPHS / "bert_large.json.gz")
    blocks = find_blocks(Board(Condensed.of(Problem.of(graph)).problem, whole=False))
    assert len(blocks) >= 48
    assert len({block.structure for block in blocks}) <= 8


def test_menus_are_worked_out_once_for_equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a step is traced anew for another budget; blocks that take other seconds have menus of their own."""
    asked: list[int] = []

    def counted(graph: Graph, turn: int) -> list[Option]:
        asked.append(turn)
        return block_menu(graph, turn)

    monkeypatch.setattr(programme, "block_menu", counted)
    monkeypatch.setattr(programme, "_menus", OrderedDict())

    def scheduled(factor: float) -> tuple[int, ...] | None:
        plain = residual_blocks(12)
        ops = tuple(dataclasses.replace(op, time_s=factor * op.time_s) for op in plain.ops)
        problem = Problem.of(dataclasses.replace(plain, ops=ops))
        return BlockChain.of(problem).schedule(problem.plain.peak_bytes // 2)

    first, once = scheduled(1.0), len(asked)
    assert scheduled(1.0) == first is not None
    assert len(asked) == once > 0
    scheduled(2.0)
    assert len(asked) == 2 * once


def test_options_are_what_the_simulator_says() -> None:
    graph = residual_blocks(6)
    for block in find_blocks(Board(Problem.of(graph), whole=False)):
        menu = block_menu(block.graph, block.turn)
        for option in menu:
            timeline = simulate(block.graph, option.schedule)
            assert validate(block.graph, option.schedule) == option.peak_bytes == timeline.peak_bytes
            assert option.extra_s == pytest.approx(timeline.time_s - block.graph.time_s)
        assert menu[0].extra_s == 0.0
        least = min(option.peak_bytes for option in menu)
        assert all(option.peak_bytes < least for option in squeezed(block.graph, block.turn, menu))


def test_what_is_stored_is_what_the_backward_part_takes_from_before() -> None:
    #      made, kept | turn brings a gradient | the reader of what was kept, and of what is made again
    ops = (Op(outputs=(0,)), Op(inputs=(0,), outputs=(1,)), Op(outputs=(2,)), Op(inputs=(1, 2), outputs=(3,)))
    graph = Graph(ops, tuple(Tensor(size) for size in (4, 8, 2, 1)), (), (3,), free_order=False)
    assert option_of(graph, 2, (0, 1, 2, 3)).stored == {1}
    again = option_of(graph, 2, (0, 1, 2, 1, 3))
    assert again.stored == {0}
    assert (again.stored_bytes, again.forward_bytes, again.backward_bytes) == (4, 12, 14)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.3])
def test_a_chain_of_blocks_is_planned_within_its_budget(share: float, draws: bool) -> None:
    graph = residual_blocks(30, draws=draws)
    budget_bytes = int(share * simulate(graph, graph.plain_schedule).peak_bytes)
    schedule = get_planner("block_chain")(graph, budget_bytes)
    assert validate(graph, schedule) <= budget_bytes
    assert simulate(graph, schedule).time_s < 1.45 * graph.time_s


def test_the_model_counts_its_own_schedule_right() -> None:
    """Where nothing is left to repair, the cost of the dynamic programme is that of the schedule."""
    graph = residual_blocks(16)
    chained = BlockChain.of(Condensed.of(Problem.of(graph)).problem)
    plain_bytes = simulate(graph, graph.plain_schedule).peak_bytes
    for share in (0.6, 0.4):
        program = chained.program(int(share * plain_bytes))
        schedule = program.schedule(400)
        assert schedule is not None
        timeline = simulate(chained.problem.graph, schedule)
        assert timeline.time_s - graph.time_s == pytest.approx(float(program.first_cost[0][400]), rel=0.1)
        assert timeline.peak_bytes <= 1.1 * share * plain_bytes


def test_nesting_needs_less_than_one_level_of_checkpoints() -> None:
    graph = chain(400, free_order=False)
    schedule = BlockChain.of(Problem.of(graph)).schedule(24)
    assert schedule is not None
    # The square root of 2 * 400 is 28: one extra forward pass does not suffice.
    assert validate(graph, schedule) <= 26
    assert graph.time_s + 400 < simulate(graph, schedule).time_s <= graph.time_s + 1400


@pytest.mark.parametrize("seed", range(40))
def test_a_condensed_step_expands_to_legal_schedules(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(5, 45), free_order=False)
    condensed = Condensed.of(Problem.of(graph))
    problem = condensed.problem
    drop = problem.no_drops()
    for gap in range(len(drop)):
        drop[gap] ^= rng.random() < 0.4
    schedule = rematerialize(problem, drop, max_runs=10**5)
    validate(graph, condensed.expand(schedule))
    assert validate(graph, condensed.expand(problem.graph.plain_schedule)) >= 0


def _deep(layers: int) -> Graph:
    """A mask made in front that every layer reads, and gradients of weights that stay to the end."""
    tensors, ops = [Tensor(6), Tensor(4)], [Op(outputs=(0,)), Op(outputs=(1,))]
    outputs: list[int] = []

    def add(size: int, *inputs: int) -> int:
        tensors.append(Tensor(size))
        ops.append(Op(inputs=inputs, outputs=(len(tensors) - 1,)))
        return len(tensors) - 1

    x, tape = 1, []
    for _ in range(layers):
        wide = add(12, x, 0)
        activation = add(12, wide)
        tape.append((x, wide, activation))
        x = add(4, x, activation)
    gradient = add(4, x)
    for before, wide, activation in reversed(tape):
        inner = add(12, gradient, activation)
        outputs.append(add(8, inner, wide))
        gradient = add(4, gradient, add(12, inner, wide, 0), before)
    return Graph(tuple(ops), tuple(tensors), (), (*outputs, gradient), free_order=False)


def test_more_layers_than_blocks_are_shared_out_evenly() -> None:
    """What crosses every cut, or waits to the end, is no reason to merge all layers in front into one block."""
    blocks = find_blocks(Board(Problem.of(_deep(300)), whole=False))
    assert len(blocks) >= 40
    assert max(len(block.forward) for block in blocks) <= 30
    assert len({block.structure for block in blocks}) <= 6


def test_a_backward_part_of_ops_that_touch_nothing_is_no_block() -> None:
    tensors = (Tensor(18), Tensor(1), Tensor(0, alias_of=1), Tensor(0))
    workspaces = {op: 1 for op in (1, 2, 3, 5, 6, 8, 9, 10)}
    outputs = {0: (0,), 9: (1, 2), 10: (3,)}
    ops = tuple(
        Op(outputs=outputs.get(op, ()), workspace_bytes=workspaces.get(op, 0), after=() if op in (0, 3) else (0,))
        for op in range(12)
    )
    graph = Graph(ops, tensors, inputs=(), outputs=(0, 1, 2, 3))
    plain_bytes = simulate(graph, graph.plain_schedule).peak_bytes

    assert validate(graph, get_planner("block_chain")(graph, plain_bytes - 1)) <= plain_bytes
