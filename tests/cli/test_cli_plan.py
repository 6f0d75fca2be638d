"""``remat plan`` on graph files: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import remat
from remat.cli import plan_commands
from remat.running.cost_model import DeviceProfile

KEYS = {
    "peak_bytes",
    "baseline_peak_bytes",
    "budget_bytes",
    "overhead",
    "overhead_lower_bound",
    "planner",
    "plan_seconds",
    "schedule",
}


def test_json_is_the_whole_of_stdout_and_a_legal_plan_within_the_budget(run, graph, graph_file):
    result = run("plan", graph_file, "--budget", "60%", "--json")

    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert printed.keys() >= KEYS
    plain = remat.simulate(graph, graph.plain_schedule)
    assert printed["baseline_peak_bytes"] == plain.peak_bytes
    assert printed["budget_bytes"] == plain.peak_bytes * 60 // 100
    assert printed["peak_bytes"] == remat.validate(graph, tuple(printed["schedule"])) <= printed["budget_bytes"]
    extra_s = remat.simulate(graph, printed["schedule"]).time_s - plain.time_s
    assert printed["overhead"] == pytest.approx(extra_s / plain.time_s)
    assert printed["overhead"] > 0
    assert 0 <= printed["overhead_lower_bound"] <= printed["overhead"]
    assert printed["planner"] == "auto"
    assert printed["plan_seconds"] > 0


def test_table_tells_the_figures_of_the_plan(run, graph_file, tmp_path):
    result = run("plan", graph_file, "--budget", "60%", "--out", tmp_path / "plan.json")

    assert result.exit_code == 0
    plan = remat.load_plan(tmp_path / "plan.json")
    for figure in (
        remat.format_bytes(plan.budget_bytes),
        remat.format_bytes(plan.peak_bytes),
        remat.format_bytes(plan.baseline_peak_bytes),
        f"{plan.overhead:.2%}",
        f"{plan.overhead_lower_bound:.2%}",
        "auto",
        f"{plan.recomputed} extra runs",
        str(tmp_path / "plan.json"),
    ):
        assert figure in result.stdout
    assert result.stderr == ""


def test_plan_within_a_budget_that_the_plain_step_meets_recomputes_nothing(run, graph, graph_file):
    result = run("plan", graph_file, "--budget", "1GiB", "--json")

    assert json.loads(result.stdout)["schedule"] == list(graph.plain_schedule)
    assert json.loads(result.stdout)["overhead"] == 0


def test_out_writes_the_plan_that_was_printed(run, graph, graph_file, tmp_path):
    out = tmp_path / "plan.json"

    result = run("plan", graph_file, "--budget", "60%", "--out", out, "--json")

    plan = remat.load_plan(out)
    plan.check_graph(graph)
    assert list(plan.schedule) == json.loads(result.stdout)["schedule"]


def test_planner_can_be_chosen(run, graph_file):
    result = run("plan", graph_file, "--budget", "80%", "--planner", "sqrt_n", "--time-limit", "5", "--json")

    assert json.loads(result.stdout)["planner"] == "sqrt_n"


def test_compressed_graph_is_read_and_saved(run, graph, graph_file, tmp_path):
    first, second = tmp_path / "copy.json.gz", tmp_path / "copy.json"

    assert run("plan", graph_file, "--save-graph", first).exit_code == 0
    assert run("plan", first, "--save-graph", second).exit_code == 0

    assert remat.load_graph(second) == graph


def test_empty_graph_has_a_plan(run, tmp_path):
    path = tmp_path / "empty.json"
    remat.Graph((), ()).save(path)

    assert run("plan", path, "--budget", "1MB").exit_code == 0
    assert json.loads(run("plan", path, "--budget", "1MB", "--json").stdout)["schedule"] == []


def test_infeasible_budget_names_a_minimum_that_is_feasible(run, fails, graph_file, tmp_path):
    out = tmp_path / "plan.json"

    line = fails("plan", graph_file, "--budget", "10", "--planner", "peak_greedy", "--out", out)

    assert "10 bytes" in line
    assert not out.exists()
    minimum = int(line.rpartition("at least ")[2].split()[0])
    assert run("plan", graph_file, "--budget", minimum, "--planner", "peak_greedy", "--out", out).exit_code == 0
    assert remat.load_plan(out).peak_bytes == minimum
    assert "op " in line


@pytest.mark.parametrize("budget", ["", "much", "-1GiB", "0", "60 percent", "nan", "1e9"])
def test_budget_that_cannot_be_read(fails, graph_file, budget):
    assert repr(budget) in fails("plan", graph_file, f"--budget={budget}")


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf"])
def test_time_limit_that_is_no_duration(fails, graph_file, limit):
    assert "--time-limit" in fails("plan", graph_file, f"--time-limit={limit}")


def test_unknown_planner_lists_the_planners(fails, graph_file):
    line = fails("plan", graph_file, "--planner", "magic")

    assert "'magic'" in line
    assert "sqrt_n" in line


def test_unknown_device_lists_the_devices(fails):
    line = fails("plan", "some:model", "--device", "abacus")

    assert "abacus" in line
    assert "h200" in line


@pytest.mark.parametrize("command", ["plan", "frontier", "measure", "check"])
def test_unknown_device_of_the_environment(fails, monkeypatch, command):
    monkeypatch.setenv("REMAT_DEVICE", "abacus")

    assert fails(command, "some:model").startswith("remat: REMAT_DEVICE=abacus: there is no device profile")


def test_this_machine_was_not_measured(fails, monkeypatch, tmp_path):
    monkeypatch.setattr("remat.running.cost_model.measured_path", lambda: tmp_path / "profile.json")
    for command in (("plan",), ("frontier",), ("check",), ("measure", "--no-calibrate")):
        line = fails(*command, "some:model", "--device", "measured")
        assert line.startswith(f"remat: no measured device profile at {tmp_path / 'profile.json'}; `remat measure")


def test_the_measured_device_is_this_machine(monkeypatch, graph):
    profile = DeviceProfile("measured by jax", {"float32": 1e12}, 1e11, memory_bytes=2**30)
    monkeypatch.setattr(plan_commands, "get_profile", lambda name: profile)

    fits = plan_commands.fits_device("measured", remat.plan(graph, "100%"))

    assert fits["sentence"].startswith("Memory of this machine: 1 GiB, less 8% in reserve: the plain step fits")


def test_model_options_are_refused_for_a_graph_file(fails, graph_file):
    line = fails("plan", graph_file, "--batch-size", "8", "--dtype-policy", "float32")

    assert "--batch-size, --dtype-policy" in line


def test_out_into_a_missing_folder_is_refused_before_planning(fails, tmp_path):
    # The graph does not exist either: what comes first is checked first.
    line = fails("plan", tmp_path / "none.json", "--out", tmp_path / "missing" / "plan.json")

    assert str(tmp_path / "missing") in line
    assert not (tmp_path / "missing").exists()


def test_out_that_is_a_folder(fails, graph_file, tmp_path):
    assert "this is a folder" in fails("plan", graph_file, "--out", tmp_path)


@pytest.mark.parametrize("option", ["--out", "--save-graph"])
def test_output_never_overwrites_the_graph(fails, graph_file, option):
    before = graph_file.read_bytes()

    assert "overwrite" in fails("plan", graph_file, option, graph_file)

    assert graph_file.read_bytes() == before


def test_out_and_save_graph_need_two_names(fails, graph_file, tmp_path):
    assert "same file" in fails("plan", graph_file, "--out", tmp_path / "x.json", "--save-graph", tmp_path / "x.json")


def test_failed_write_leaves_nothing_behind(fails, graph_file, tmp_path):
    # A file name that no file system takes.
    line = fails("plan", graph_file, "--out", tmp_path / ("x" * 300))

    assert "too long" in line
    assert list(tmp_path.iterdir()) == [graph_file]


def test_missing_graph_file(fails, tmp_path):
    line = fails("plan", tmp_path / "none.json")

    assert str(tmp_path / "none.json") in line
    assert "module:callable" in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("", "JSON", id="empty"),
        pytest.param('{"format": "remat.graph", "vers', "truncated", id="truncated"),
        pytest.param('{"format": "remat.graph", "version": 99}', "version 99", id="future version"),
        pytest.param('{"format": "other", "version": 1}', '"other"', id="other format"),
        pytest.param("[]", "JSON object", id="not an object"),
        pytest.param(
            '{"format": "remat.graph", "version": 1, "tensors": [{"size_bytes": -5}], "ops": [],'
            ' "inputs": [0], "outputs": []}',
            "is -5, a negative size",
            id="negative size",
        ),
    ],
)
def test_file_that_is_no_graph(fails, tmp_path: Path, content, expected):
    path = tmp_path / "none.json"
    path.write_text(content)

    assert expected in fails("plan", path)


def test_graph_with_a_cycle(fails, tmp_path):
    path = tmp_path / "graph.json"
    op = {"name": "a", "kind": "A", "inputs": [1], "outputs": [0], "time_s": 1.0}
    other = {"name": "b", "kind": "B", "inputs": [0], "outputs": [1], "time_s": 1.0}
    tensors = [{"size_bytes": 1}, {"size_bytes": 1}]
    graph = {"format": "remat.graph", "version": 1, "inputs": [], "outputs": [], "tensors": tensors, "ops": [op, other]}
    path.write_text(json.dumps(graph))

    assert "the graph has a cycle" in fails("plan", path)
