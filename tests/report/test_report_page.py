"""``Report`` without a browser: what is in the page, and files that are written whole or not at all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import remat
from remat import Graph, Op, PlanMismatch, Tensor
from remat.core.plan import Split, Update
from remat.report import Report
from remat.report.recomputed import recomputed_layers
from remat.report.sliced import sliced_layers
from remat.testing import chain

MIB = 2**20


@pytest.fixture
def graph() -> Graph:
    return chain(24, size_bytes=MIB, time_s=1e-3)


@pytest.fixture
def report(graph: Graph) -> Report:
    plan = remat.plan(graph, "60%", "sqrt_n")
    return Report(graph, plan, (plan, remat.plan(graph, "100%")), "A <chain> & more")


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_page_holds_the_simulators_bytes(report: Report) -> None:
    data = data_of(report.html())

    plain, planned = data["curves"]
    assert plain["bytes"] == list(remat.simulate(report.graph, report.graph.plain_schedule).bytes)
    assert planned["ops"] == list(report.plan.schedule)
    assert planned["bytes"] == list(remat.simulate(report.graph, report.plan.schedule).bytes)
    assert data["budget"] == report.plan.budget_bytes
    assert [point["overhead"] for point in data["frontier"]] == [report.plan.overhead, 0]


def test_page_asks_for_nothing_and_says_so_to_the_browser(report: Report) -> None:
    page = report.html()

    assert "default-src 'none'" in page
    assert re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*["']""", page) == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)", page)


def test_names_are_escaped(report: Report) -> None:
    page = report.html()

    assert "A &lt;chain&gt; &amp; more" in page
    assert "A <chain>" not in page


def test_notebook_shows_the_page_in_a_frame_of_its_own(report: Report) -> None:
    shown = report._repr_html_()

    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert shown.count("<") == 2  # The frame and its end: all of the page is escaped.


@pytest.mark.parametrize(("name", "start"), [("r.html", b"<!doctype"), ("r.png", b"\x89PNG"), ("r.svg", b"<?xml")])
def test_ending_chooses_the_format(report: Report, tmp_path: Path, name: str, start: bytes) -> None:
    report.save(tmp_path / name)

    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_unknown_ending_is_refused(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no picture format"):
        report.save(tmp_path / "report.docx")


def test_plan_of_another_graph_is_refused(report: Report) -> None:
    with pytest.raises(PlanMismatch):
        Report(chain(5), report.plan)


def test_graph_without_times_is_drawn_by_runs(graph: Graph) -> None:
    timeless = Graph(tuple(replace(op, time_s=0.0) for op in graph.ops), graph.tensors, graph.inputs, graph.outputs)

    page = Report(timeless, remat.plan(timeless, "60%", "sqrt_n")).html()

    assert data_of(page)["timed"] is False
    assert 'value="time"' not in page


def split_report(graph: Graph) -> Report:
    """A plan whose graph runs two ops in two slices each, and updates early."""
    pairs = ((0, 0), (1, 1), (2, 0), (3, 1))
    plan = replace(
        remat.plan(graph, "100%"),
        split=Split(2, 8 * MIB, 1e-3, "of another graph", pairs),
        update=Update(3, 5 * MIB, "a_norm", 2 * MIB),
        baseline_peak_bytes=40 * MIB,
        baseline_time_s=0.9 * graph.time_s,
        overhead=1 / 0.9 - 1,
        overhead_lower_bound=0.1,
    )
    return Report(graph, plan, (), "slices")


def test_slices_and_early_updates_are_shown(graph: Graph) -> None:
    found = split_report(graph)
    page = found.html()

    assert "What else the plan changes" in page
    assert "2 ops in 2 slices: 8 MiB between them become 4 MiB" in page
    assert "3 ops of updates run as soon as their gradient is final: 5 MiB less" in page
    assert "2 MiB of gradients wait for a_norm" in page
    assert "the widest part of the step runs in 2 slices, and nothing is recomputed" in page
    assert "differ by rounding" in page
    assert "plain, in 2 slices: peak" in page
    assert "this plan is the plain step, in 2 slices" in page
    # The curve of the frontier is of the graph with the slices, and so is the plan's point beside it.
    assert data_of(page)["chosen"]["overhead"] == pytest.approx(0)
    layers = sliced_layers(graph, found.plan)
    assert sum(layer.parts for layer in layers) == 4
    assert sum(layer.time_s for layer in layers) == pytest.approx(sum(op.time_s for op in graph.ops[:4]))


def test_a_plan_that_runs_one_by_one_says_so(graph: Graph) -> None:
    page = Report(graph, replace(remat.plan(graph, "100%"), one_by_one=True), (), "one by one").html()

    assert "What else the plan changes" in page
    assert "every op waits for the end of the one before it" in page


def test_a_plan_that_only_recomputes_changes_nothing_else(report: Report) -> None:
    assert "What else the plan changes" not in report.html()
    assert sliced_layers(report.graph, report.plan) == ()


def test_empty_graph_has_a_page() -> None:
    empty = Graph((), ())

    assert "nothing is recomputed" in Report(empty, remat.plan(empty, 1)).html()


def test_recomputed_layers_are_counted_by_hand() -> None:
    tensors = tuple(Tensor(MIB) for _ in range(4))
    ops = (
        Op("a/one", "Relu", (), (0,), 0.25, layer="first"),
        Op("a/two", "MatMul", (0,), (1,), 1.0, layer="first"),
        Op("b/three", "Relu", (1,), (2,), 0.5),
        Op("b/four", "Add", (0, 2), (3,), 0.5),
    )
    graph = Graph(ops, tensors, outputs=(3,))
    plan = replace(remat.plan(graph, "100%"), schedule=(0, 1, 0, 1, 2, 0, 2, 3))

    first, second = recomputed_layers(graph, plan)

    assert (first.name, first.ops, first.extra_runs, first.extra_time_s) == ("first", 2, 3, 1.5)
    assert first.kinds == ("Relu", "MatMul")
    # Without a layer the path in the name stands for it.
    assert (second.name, second.extra_runs, second.extra_time_s) == ("b", 1, 0.5)
