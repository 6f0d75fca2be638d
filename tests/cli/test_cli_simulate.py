"""``remat simulate``: the timeline of a graph file, plain and planned."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import remat
from remat.testing import chain


@pytest.fixture
def plan_file(graph, tmp_path):
    path = tmp_path / "plan.json"
    remat.plan(graph, "60%").save(path)
    return path


def test_json_of_the_plain_step_is_the_timeline(run, graph, graph_file):
    result = run("simulate", graph_file, "--json")

    printed = json.loads(result.stdout)
    timeline = remat.simulate(graph, graph.plain_schedule)
    assert printed["peak_bytes"] == timeline.peak_bytes == max(printed["bytes"])
    assert printed["bytes"] == list(timeline.bytes)
    assert printed["peak_step"] == timeline.peak_step
    assert printed["peak_op"]["index"] == graph.plain_schedule[timeline.peak_step]
    assert [entry["tensor"] for entry in printed["live_at_peak"]] == list(timeline.live_at_peak)
    assert printed["time_s"] == timeline.time_s
    assert printed["pinned_bytes"] == graph.pinned_bytes


def test_json_of_a_plan_is_the_timeline_of_its_schedule(run, graph, graph_file, plan_file):
    printed = json.loads(run("simulate", graph_file, "--plan", plan_file, "--json").stdout)

    plan = remat.load_plan(plan_file)
    assert printed["peak_bytes"] == plan.peak_bytes < plan.baseline_peak_bytes
    assert len(printed["bytes"]) == len(plan.schedule)


def test_tables_tell_peak_step_op_tensors_and_time(run, graph, graph_file):
    result = run("simulate", graph_file)

    assert result.exit_code == 0
    timeline = remat.simulate(graph, graph.plain_schedule)
    at_peak = graph.plain_schedule[timeline.peak_step]
    for figure in (
        remat.format_bytes(timeline.peak_bytes),
        f"{timeline.peak_step} (of 0 to {len(graph.ops) - 1})",
        graph.describe_op(at_peak),
        f"{len(graph.ops)} ms a step",
        f"op {graph.producer[timeline.live_at_peak[0]]}",
    ):
        assert figure in result.stdout
    assert result.stderr == ""


def test_empty_graph_has_a_timeline(run, tmp_path):
    path = tmp_path / "empty.json"
    remat.Graph((), ()).save(path)

    assert run("simulate", path).exit_code == 0
    assert json.loads(run("simulate", path, "--json").stdout)["peak_op"] is None


def test_plot_writes_a_picture(run, graph_file, plan_file, tmp_path):
    picture = tmp_path / "memory.png"

    result = run("simulate", graph_file, "--plan", plan_file, "--plot", picture)

    assert result.exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in result.stdout


def test_plan_for_another_graph_is_refused(fails, plan_file, tmp_path):
    other = tmp_path / "other.json"
    chain(23, size_bytes=2**20).save(other)

    assert "made for another graph" in fails("simulate", other, "--plan", plan_file)


def test_edited_plan_is_refused(fails, graph_file, plan_file):
    plan = remat.load_plan(plan_file)
    # Without its last op the schedule can be replayed all the same.
    replace(plan, schedule=plan.schedule[:-1]).save(plan_file)

    assert "missing op:" in fails("simulate", graph_file, "--plan", plan_file)


def test_files_that_are_swapped(fails, graph_file, plan_file):
    assert "no remat.graph file" in fails("simulate", plan_file, "--plan", graph_file)


@pytest.mark.parametrize("missing", ["graph", "plan"])
def test_missing_file(fails, graph_file, tmp_path, missing):
    none = tmp_path / "none.json"
    files = [none] if missing == "graph" else [graph_file, "--plan", none]

    assert fails("simulate", *files) == f"remat: {none}: No such file or directory"


def test_unreadable_file(fails, tmp_path):
    assert "Is a directory" in fails("simulate", tmp_path)


def test_picture_of_an_unknown_format_is_refused_before_any_work(fails, tmp_path):
    line = fails("simulate", tmp_path / "none.json", "--plot", tmp_path / "memory.docx")

    assert "docx" in line
    assert "png" in line


def test_picture_into_a_missing_folder(fails, graph_file, tmp_path):
    assert "there is no folder" in fails("simulate", graph_file, "--plot", tmp_path / "missing" / "memory.png")
