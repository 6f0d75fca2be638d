"""The command line on Paddle: plans of models and programs, their report, and what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import build
from typer.testing import CliRunner

import remat
import remat.paddle
from remat.cli import app

STEP = """
import paddle


def net():
    paddle.seed(0)
    return paddle.nn.Sequential(*[paddle.nn.Sequential(paddle.nn.Linear(64, 64), paddle.nn.GELU()) for _ in range(6)])


def step(batch_size=1024):
    model = net()

    def loss(x):
        return model(x).square().mean()

    return loss, paddle.ones([batch_size, 64])
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A command in this process, in a folder with the module ``training``."""
    (tmp_path / "training.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)

    def command(*args):
        done = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.stderr or done.exception
        return done.stdout

    return command


def test_plan_of_a_loss_and_the_table_of_its_largest_tensors(run):
    printed = run("plan", "training:step", "--budget", "60%", "--planner", "peak_greedy", "--out", "plan.json.gz")

    assert "training.py" in printed, "tensors at the peak stand with the line that made them"
    found = json.loads(
        run("plan", "training:net", "--input", "64", "--batch-size", "1024", "--planner", "peak_greedy", "--json")
    )
    assert found["peak_bytes"] <= found["budget_bytes"] < found["baseline_peak_bytes"]
    assert remat.load_plan("plan.json.gz").recomputed > 0


def test_report_of_a_static_program_lists_each_operator(run):
    built = build("attention")
    plan = remat.paddle.plan_program(built.main, "85%", fetch_list=[built.loss], planner="peak_greedy")
    plan.graph.save("graph.json")
    plan.save("plan.json")

    run("report", "plan.json", "--graph", "graph.json", "--points", "0", "--out", "report.html")
    run("report", "plan.json", "--graph", "graph.json", "--points", "0", "--out", "report.png")

    page = Path("report.html").read_text()
    for one in ("layer_norm_grad", "softmax", "dropout", "adam_", "programs.py:"):
        assert one in page, one
    assert Path("report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough  # Fresh processes, each of which imports Paddle.
def test_measure_and_check_of_a_loss(run):
    measured = json.loads(run("measure", "training:step", "--budget", "80%", "--no-calibrate", "--json"))
    checked = json.loads(run("check", "training:step", "--budget", "80%", "--json"))

    assert measured["planned"]["losses"] == measured["plain"]["losses"]
    assert measured["planned"]["measured_peak_bytes"] < measured["plain"]["measured_peak_bytes"]
    assert checked["passed"] is True
