"""``remat frontier``: what it prints and draws."""

from __future__ import annotations

import json

import pytest

import remat


def test_json_is_the_frontier(run, graph, graph_file):
    result = run("frontier", graph_file, "--points", 4, "--planner", "sqrt_n", "--json")

    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    plans = remat.frontier(graph, 4, "sqrt_n")
    assert [point["budget_bytes"] for point in printed["points"]] == [plan.budget_bytes for plan in plans]
    assert [point["overhead"] for point in printed["points"]] == [plan.overhead for plan in plans]
    assert printed["points"][0]["overhead"] > printed["points"][-1]["overhead"] == 0
    assert printed["baseline_peak_bytes"] == printed["points"][-1]["peak_bytes"]
    assert printed["planner"] == "sqrt_n"


def test_table_and_picture(run, graph, graph_file, tmp_path):
    picture = tmp_path / "frontier.png"
    result = run("frontier", graph_file, "--points", 3, "--planner", "peak_greedy", "--plot", picture)

    assert result.exit_code == 0
    for plan in remat.frontier(graph, 3, "peak_greedy"):
        assert remat.format_bytes(plan.budget_bytes) in result.stdout
        assert f"{plan.overhead:.2%}" in result.stdout
    assert "━" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--planner", "nope"), "no planner 'nope'"),
        (("--plot", "x.doc"), "picture format"),
        (("--points", 1), "greater than or equal to 2"),
    ],
)
def test_mistakes_are_one_line(fails, graph_file, arguments, says):
    assert says in fails("frontier", graph_file, *arguments)
