"""The validator against hand-computed cases, and each rule of a legal schedule broken once."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from memory_cases import CASES

from remat import Graph, InvalidSchedule, Op, Tensor, validate
from remat.core import validator
from remat.core.schedule import RULES, Schedule, recomputed_ops
from remat.testing import graphs_with_schedules


@pytest.mark.parametrize("name", CASES)
def test_peak(name: str) -> None:
    case = CASES[name]
    assert validate(case.graph, case.schedule) == max(case.bytes, default=case.graph.pinned_bytes)


def diamond(**changes: Any) -> Graph:
    """a -> (b, c) -> d, where c must come after b and b must not repeat."""
    parts: dict[str, Any] = {
        "ops": (
            Op("a", "Make", (), (0,)),
            Op("b", "Draw", (0,), (1,), recomputable=False),
            Op("c", "Map", (0,), (2,), after=(1,)),
            Op("d", "Join", (1, 2), (3,)),
        ),
        "tensors": (Tensor(1, "x"), Tensor(1, "left"), Tensor(1, "right"), Tensor(1, "y")),
        "outputs": (3,),
    }
    return Graph(**{**parts, **changes})


@pytest.mark.parametrize(
    ("schedule", "rule", "message"),
    [
        ((0, 1, 2, 4), "index out of range", "position 3 is 4, .* has 4 ops"),
        ((0, 1, 2, -1), "index out of range", "position 3 is -1"),
        ((0, True, 2, 3), "index out of range", "position 1 is True"),
        ((0, 1.0, 2, 3), "index out of range", r"position 1 is 1\.0"),
        ((0, 1, 2), "missing op", r"op 3 \(Join 'd'\) never runs"),
        ((), "missing op", r"op 0 \(Make 'a'\) never runs"),
        ((0, 1, 1, 2, 3), "repeated op", r"op 1 \(Draw 'b'\) runs 2 times"),
        ((1, 0, 2, 3), "unmade input", r"position 0 runs op 1 \(Draw 'b'\), which reads tensor 0 \('x'\)"),
        ((0, 2, 1, 3), "after", r"position 1 runs op 2 \(Map 'c'\) before op 1 \(Draw 'b'\)"),
    ],
)
def test_broken_rule_is_named(schedule: Schedule, rule: str, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message) as caught:
        validate(diamond(), schedule)
    assert caught.value.rule == rule
    assert rule in RULES


def test_fixed_order_concerns_first_runs_only() -> None:
    ops = tuple(Op(name) for name in "abc")
    fixed = Graph(ops, (), free_order=False)
    assert validate(fixed, (0, 1, 0, 2, 1, 0)) == 0
    with pytest.raises(InvalidSchedule, match=r"position 1 runs op 2 .* before op 1") as caught:
        validate(fixed, (0, 2, 1))
    assert caught.value.rule == "fixed order"
    assert validate(Graph(ops, (), free_order=True), (0, 2, 1)) == 0


def test_after_concerns_the_first_run_only() -> None:
    # c runs again although nothing of b stands before that run alone; b's run before c's first is enough.
    assert validate(diamond(), (0, 1, 2, 0, 2, 3)) == 3


def test_a_recomputed_op_may_run_after_its_reader() -> None:
    assert validate(diamond(), (0, 1, 2, 3, 0)) == 3


@settings(max_examples=150, deadline=None)
@given(graphs_with_schedules(max_ops=8))
def test_legal_schedules_pass_and_lose_their_legality(pair: tuple[Graph, Schedule]) -> None:
    graph, schedule = pair
    assert validate(graph, schedule) >= graph.pinned_bytes
    for op in set(schedule):
        with pytest.raises(InvalidSchedule):
            validate(graph, tuple(step for step in schedule if step != op))
        if not graph.ops[op].recomputable:
            with pytest.raises(InvalidSchedule, match="repeated op"):
                validate(graph, (*schedule, op))


def test_recomputed_ops() -> None:
    assert recomputed_ops((0, 1, 2, 0, 1, 0)) == {0: 2, 1: 1}
    assert recomputed_ops(()) == {}


def test_shares_no_code_with_simulator_or_planners() -> None:
    tree = ast.parse(inspect.getsource(validator))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in imported if module and module.startswith("remat")} == {
        "remat.core.errors",
        "remat.core.graph",
    }
