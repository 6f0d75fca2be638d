"""Tables: the figures they show are the plan's and the timeline's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

import remat
from remat import Graph, Op, Plan, Tensor
from remat.report import text
from remat.report.recomputed import RecomputedGroup, recomputed_kinds

MIB = 2**20


@pytest.fixture
def graph() -> Graph:
    """A batch (pinned), two cheap ops, a dear one, and two readers at the end."""
    tensors = (
        Tensor(3 * MIB, name="batch"),
        Tensor(4 * MIB, name="a", shape=(1024, 1024), dtype="float32"),
        Tensor(2 * MIB),
        Tensor(MIB),
        Tensor(MIB),
    )
    ops = (
        Op("one [dim]", "Relu", (0,), (1,), 0.25),
        Op("two", "Relu", (1,), (2,), 0.25),
        Op("three", "MatMul", (2,), (3,), 1.5),
        Op("four", "Add", (1, 3), (4,), 0.5),
    )
    return Graph(ops, tensors, inputs=(0,), outputs=(4,))


@pytest.fixture
def plan(graph: Graph) -> Plan:
    schedule = (0, 1, 2, 0, 1, 2, 0, 3)
    return Plan(
        schedule=schedule,
        fingerprint=graph.fingerprint,
        peak_bytes=6 * MIB,
        baseline_peak_bytes=10 * MIB,
        time_s=5.0,
        baseline_time_s=2.5,
        overhead=1.0,
        overhead_lower_bound=0.125,
        lower_bound_meaning="any order [sic]",
        planner="by hand",
        budget_bytes=7 * MIB,
        plan_seconds=0.75,
    )


def rendered(table: object, width: int = 160) -> list[str]:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def row(table: object, label: str) -> str:
    found = [line for line in rendered(table) if label in line]
    assert len(found) == 1, found
    return found[0]


def test_recomputed_kinds_are_counted_by_hand(graph: Graph, plan: Plan) -> None:
    assert recomputed_kinds(graph, plan) == (
        RecomputedGroup("MatMul", kinds=("MatMul",), ops=1, total_ops=1, extra_runs=1, extra_time_s=1.5),
        RecomputedGroup("Relu", kinds=("Relu",), ops=2, total_ops=2, extra_runs=3, extra_time_s=0.75),
    )


def test_kinds_table_shows_shares_of_the_extra_time(graph: Graph, plan: Plan) -> None:
    table = text.recomputed_kinds_table(graph, plan)

    assert "66.7%" in row(table, "MatMul")
    assert "750 ms" in row(table, "Relu")
    assert "2 of 2" in row(table, "Relu")


def test_kinds_beyond_the_first_are_summed_in_one_row() -> None:
    count = 11
    tensors = tuple(Tensor(1) for _ in range(count))
    ops = tuple(Op(kind=f"Kind{index:02}", outputs=(index,), time_s=1.0 + index) for index in range(count))
    graph = Graph(ops, tensors)
    plan = replace(remat.plan(graph, "100%"), schedule=graph.plain_schedule * 2)

    table = text.recomputed_kinds_table(graph, plan)

    assert "Kind10" in "".join(rendered(table))
    # The three cheapest: 1, 2 and 3 s.
    assert "6 s" in row(table, "3 other kinds")
    assert "3 of 3" in row(table, "3 other kinds")


def test_plan_table_shows_every_figure(graph: Graph, plan: Plan) -> None:
    table = text.plan_table(graph, plan)

    assert "7 MiB (70.0% of plain)" in row(table, "Budget")
    assert "6 MiB (60.0% of plain)" in row(table, "Predicted peak")
    assert "10 MiB" in row(table, "Plain peak")
    assert "3 MiB" in row(table, "Resident inputs")
    assert "100.00% (5 s a step, plain 2.5 s)" in row(table, "Overhead")
    # What stands in brackets is text, not a style.
    assert "12.50% (any order [sic])" in row(table, "Lower bound")
    assert "by hand, in 0.75 s" in row(table, "Planner")
    assert "3 of 4 ops, in 4 extra runs" in row(table, "Recomputed")


def test_what_runs_are_expected_to_take_is_shown_where_it_is_known(graph: Graph, plan: Plan) -> None:
    assert not any("Expected" in line for line in rendered(text.plan_table(graph, plan)))

    known = replace(plan, expected_time_s=4.0, baseline_expected_time_s=5.0)
    assert "-20.00% (4 s a step, plain 5 s), memory and calls counted" in row(text.plan_table(graph, known), "Expected")


def test_timeline_table_names_the_op_at_the_peak(graph: Graph) -> None:
    timeline = remat.simulate(graph, graph.plain_schedule)

    table = text.timeline_table(graph, graph.plain_schedule, timeline)

    # batch 3 + a 4 + second 2 + third 1, while op 2 runs
    assert "10 MiB" in row(table, "Peak  ")
    assert "2 (of 0 to 3)" in row(table, "Peak step")
    assert "op 2 (MatMul 'three')" in row(table, "Op at the peak")


def test_live_tensors_table_lists_the_largest_and_sums_the_rest(graph: Graph) -> None:
    timeline = remat.simulate(graph, graph.plain_schedule)

    first = row(text.live_tensors_table(graph, timeline), "op 0")

    assert all(figure in first for figure in ("4 MiB", "40.0%", "1 [1024, 1024] float32", "Relu", "one [dim]"))


def test_live_tensors_beyond_the_first_are_summed_in_one_row() -> None:
    count = 13
    tensors = tuple(Tensor(MIB) for _ in range(count + 1))
    ops = (*(Op(outputs=(index,)) for index in range(count)), Op(inputs=tuple(range(count)), outputs=(count,)))
    graph = Graph(ops, tensors)

    table = text.live_tensors_table(graph, remat.simulate(graph, graph.plain_schedule))

    assert "4 MiB" in row(table, "4 others")


@pytest.mark.parametrize(
    ("time_s", "expected"),
    [
        (0.0, "0 s"),
        (47769.0, "47,769 s"),
        (1.5, "1.5 s"),
        (0.0827, "82.7 ms"),
        (1e-3, "1 ms"),
        (0.000123, "123 us"),
        (4.2e-9, "4.2 ns"),
    ],
)
def test_format_time(time_s: float, expected: str) -> None:
    assert text.format_time(time_s) == expected
