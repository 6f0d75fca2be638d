"""``remat plan --mesh``: what it prints, and what it says of a mesh that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mesh", "fsdp=8"), "--mesh needs --device"),
        (("--mesh", "pipe=8", "--device", "h100"), "there is no axis 'pipe'; the axes are data, fsdp, tensor"),
        (("--mesh", "fsdp=8", "--device", "h100", "--network", "tin-cans"), "there is no network 'tin-cans'"),
        (("--network", "efa-400"), "--network can be given with --mesh only"),
        (("--mixed-precision", "bfloat16"), "--mixed-precision can be given with --mesh only"),
    ],
)
def test_what_cannot_be_says_so_before_anything_is_built(run, options, said):
    result = run("plan", "no_such_module:build", *options)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_graph_file_is_of_one_device(run, graph_file):
    result = run("plan", graph_file, "--mesh", "fsdp=8", "--device", "cpu")
    assert result.exit_code == 2
    assert "--device can be given with a model (module:callable) only" in result.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[1]", "write a JSON object of patterns and styles"), ('{"\xfcber": 1}'.encode("latin-1"), "can't decode byte")],
)
def test_styles_that_cannot_be_read_say_so(run, tmp_path, content, said):
    (tmp_path / "styles.json").write_bytes(content)
    options = ("--mesh", "tensor=2", "--device", "h100", "--tensor-styles", tmp_path / "styles.json")
    result = run("plan", "no_such_module:build", *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "styles.json" in result.stderr


@pytest.mark.thorough
def test_json_holds_the_answer_for_each_device(run, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    saved = tmp_path / "graph.json.gz"
    options = ("--mesh", "fsdp=2,tensor=2", "--device", "h100", "--kwargs", '{"layers": 2}', "--save-graph", saved)
    result = run("plan", "cluster_plan:small_llama", *options, "--json")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert (printed["mesh"], printed["devices"]) == ({"fsdp": 2, "tensor": 2}, 4)
    assert (printed["batch_size"], printed["samples_per_device"]) == (2, 1)
    assert printed["fits"]
    assert printed["peak_bytes"] <= printed["budget_bytes"]
    assert printed["collectives"]["by_axis_s"].keys() == {"fsdp", "tensor"}
    shown = run("simulate", saved, "--json")
    assert json.loads(shown.stdout)["peak_bytes"] == printed["baseline_peak_bytes"]
