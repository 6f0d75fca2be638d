"""``remat report``: a whole page or picture, or one line that says what is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import remat
from remat.testing import chain


@pytest.fixture
def plan_file(run, graph_file, tmp_path) -> Path:
    path = tmp_path / "plan.json"
    assert run("plan", graph_file, "--planner", "sqrt_n", "--out", path).exit_code == 0
    return path


@pytest.mark.parametrize(
    ("name", "start"), [("r.html", b"<!doctype html>"), ("r.png", b"\x89PNG"), ("r.svg", b"<?xml")]
)
def test_report_of_a_plan_that_holds_its_graph(run, plan_file, tmp_path, name, start):
    result = run("report", plan_file, "--out", tmp_path / name, "--points", 3)

    assert result.exit_code == 0, result.stderr
    assert (tmp_path / name).read_bytes().startswith(start)
    assert str(tmp_path / name) in result.stdout


def test_json_tells_where_the_report_is(run, plan_file, tmp_path):
    out = tmp_path / "r.html"

    printed = json.loads(run("report", plan_file, "--out", out, "--points", 3, "--json").stdout)

    assert printed == {"report": str(out), "size_bytes": out.stat().st_size, "points": 3}
    assert out.read_text().count('"overhead":') == 4  # Three points, and the plan.


def test_plan_without_its_graph_needs_the_graphs_file(run, fails, graph, graph_file, tmp_path):
    alone = tmp_path / "alone.json"
    remat.plan(graph, "60%", "sqrt_n").save(alone)

    line = fails("report", alone, "--out", tmp_path / "r.html")
    assert "--graph" in line
    assert not (tmp_path / "r.html").exists()
    assert run("report", alone, "--graph", graph_file, "--points", 0, "--out", tmp_path / "r.html").exit_code == 0


def test_plan_of_another_version_is_one_line_and_no_file(fails, plan_file, tmp_path):
    values = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps({**values, "version": 2}))

    line = fails("report", plan_file, "--out", tmp_path / "r.html")

    assert "remat.plan version 2 was written by a newer remat" in line
    assert not (tmp_path / "r.html").exists()


def test_graph_of_another_version_in_a_plan(fails, plan_file, tmp_path):
    values = json.loads(plan_file.read_text())
    values["graph"]["version"] = 7
    plan_file.write_text(json.dumps(values))

    assert "remat.graph version 7" in fails("report", plan_file, "--out", tmp_path / "r.html")


def test_plan_of_another_graph(fails, plan_file, tmp_path):
    other = tmp_path / "other.json"
    chain(5).save(other)

    line = fails("report", plan_file, "--graph", other, "--out", tmp_path / "r.html")

    assert "another graph" in line


def test_schedule_that_was_edited(fails, plan_file, tmp_path):
    values = json.loads(plan_file.read_text())
    values["schedule"] = values["schedule"][:-1]
    plan_file.write_text(json.dumps(values))

    assert f"{plan_file}: missing op" in fails("report", plan_file, "--out", tmp_path / "r.html")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--out", "r.docx"), "in html for the interactive page"),
        (("--out", "missing/r.html"), "there is no folder missing"),
        (("--points", 1), "a frontier has two ends"),
        (("--planner", "magic"), "no planner 'magic'"),
        (("--time-limit", 0), "above 0"),
    ],
)
def test_mistakes_are_one_line(fails, plan_file, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)

    assert says in fails("report", plan_file, *arguments)
    assert [path.name for path in tmp_path.glob("r.*")] == []


def test_out_that_would_overwrite_the_plan(fails, plan_file):
    before = plan_file.read_bytes()

    assert "overwrite" in fails("report", plan_file, "--out", plan_file)
    assert plan_file.read_bytes() == before


@pytest.mark.parametrize("command", ["plan", "report"])
def test_folder_that_cannot_be_written(fails, plan_file, graph_file, tmp_path, command):
    # Root may write everywhere but into the kernel's own folders.
    folder = Path("/proc/self") if os.geteuid() == 0 and sys.platform == "linux" else tmp_path / "closed"
    if folder.parent == tmp_path:
        folder.mkdir(mode=0o500)
    source = plan_file if command == "report" else graph_file

    line = fails(command, source, "--out", folder / "out.html", *(["--points", 0] if command == "report" else []))

    assert f"{folder / 'out.html'}: " in line


def test_plan_that_is_no_file(fails, tmp_path):
    assert str(tmp_path / "none.json") in fails("report", tmp_path / "none.json")
