"""Graph mode: what counts against a budget, and what happens where a first step takes more."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from steps import QUICK, outcome
from torch import nn
from torch_models import mlp
from typer.testing import CliRunner

import remat
import remat.torch
from remat.cli.app import app
from remat.core.budget import format_bytes
from remat.core.plan import load_plan_and_graph
from remat.report import Report
from remat.torch.trace import cpu_trials

pytestmark = pytest.mark.usefixtures("no_compiled_code")


def test_a_budget_that_cannot_be_kept_names_one_that_can():
    case = mlp(4)
    planned = remat.torch.compile(case.loss, budget=1000, backend="aten", **QUICK)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        planned(*case.args)
    planned = remat.torch.compile(case.loss, budget=caught.value.minimum_bytes, backend="aten", **QUICK)
    planned(*case.args).backward()
    assert planned.plan.peak_bytes <= caught.value.minimum_bytes
    case.module.zero_grad()
    measured = remat.torch.measure(planned, *case.args, repeats=1).peak_bytes
    assert measured <= 1.01 * caught.value.minimum_bytes


def test_what_is_returned_is_held_and_counts():
    """The caller holds it over the backward pass, so that dropping it would free nothing."""
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    def step(x):
        found = []
        for layer in layers:
            found.append(layer(x).tanh())
            x = found[-1]
        return x.square().mean(), found

    x = torch.randn(1024, 64)
    limited = remat.torch.compile(step, budget="100%", backend="aten", **QUICK)
    loss, _ = limited(x)
    loss.backward()
    graph, returned = limited.plan.graph, []
    for op in graph.ops:
        if op.kind.startswith("aten.tanh.") and op.phase == "forward":
            returned.append(op)
    assert len(returned) == 4
    assert not any(op.recomputable for op in returned)
    held_bytes = sum(graph.tensors[op.outputs[0]].size_bytes for op in returned)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        remat.torch.compile(step, budget=held_bytes, backend="aten", **QUICK)(x)
    assert caught.value.minimum_bytes > held_bytes


def test_an_optimizers_state_counts():
    case = mlp(4)
    optimizer = torch.optim.Adam(case.module.parameters())
    plain = remat.torch.compile(case.loss, budget="100%", backend="aten")
    plain(*case.args)
    torch._dynamo.reset()
    counted = remat.torch.compile(case.loss, budget="100%", backend="aten", optimizer=optimizer)
    counted(*case.args)
    parameters = sum(p.numel() * 4 for p in case.module.parameters())
    assert counted.plan.peak_bytes - plain.plan.peak_bytes == pytest.approx(2 * parameters, rel=0.01)
    assert not optimizer.state


def test_micro_batches_of_a_captured_loss():
    case = mlp(4, width=48, batch=512)
    captured = remat.torch.compile(case.loss, budget="97%", backend="aten", accumulates=True, **QUICK)
    step = remat.torch.micro_batches(captured, 4)
    plain = remat.torch.micro_batches(case.loss, 4)
    found = {}
    for name, run in (("plain", plain), ("captured", step)):
        case.module.zero_grad()
        loss = run(*case.args)
        found[name] = [loss, *(p.grad.clone() for p in case.module.parameters())]
    assert all(map(torch.equal, found["plain"], found["captured"]))
    plan = captured.plan
    gradients = sum(p.numel() * 4 for p in case.module.parameters())
    assert len(captured.plans) == 1
    assert plan.peak_bytes == remat.simulate(plan.graph, plan.schedule).peak_bytes + gradients

    def update(x):
        case.module.zero_grad()
        step(x)
        case.module.zero_grad()

    assert remat.torch.measure(update, *case.args, repeats=1).peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)


def test_a_limit_in_graph_mode():
    case = mlp(4)

    @remat.torch.limit_memory(budget="97%", mode="graph", **QUICK)
    def loss_fn(x):
        return {"loss": case.loss(x), "more": x}

    for batch in (256, 256, 128):
        (x,) = (case.args[0][:batch],)
        expected = outcome(case.module, case.loss, x)
        assert outcome(case.module, lambda x: loss_fn(x)["loss"], x).same_as(expected)
    assert [plan.mode for plan in loss_fn.plans] == ["graph", "graph"]
    # A share stays one of the first plan's step.
    assert loss_fn.plans[0].budget_bytes == loss_fn.plans[1].budget_bytes
    with pytest.raises(ValueError, match="keep"):
        remat.torch.limit_memory(case.loss, mode="graph", on_change="keep")
    with pytest.raises(ValueError, match="eager"):
        remat.torch.limit_memory(case.loss, mode="lazy")


def test_a_saved_plan_is_followed_again(tmp_path):
    case = mlp(4)
    first = remat.torch.compile(case.loss, budget="90%", backend="aten", **QUICK)
    first(*case.args)
    first.plan.save(tmp_path / "plan.json", first.plan.graph)
    torch._dynamo.reset()
    loaded = remat.load_plan(tmp_path / "plan.json")
    assert loaded.mode == "graph"
    again = remat.torch.compile(case.loss, plan=loaded, backend="aten")
    assert outcome(case.module, again, *case.args).same_as(outcome(case.module, case.loss, *case.args))
    assert again.plan.schedule == first.plan.schedule
    other = mlp(5)
    with pytest.raises(remat.PlanMismatch, match="plan again for this graph"):
        remat.torch.compile(other.loss, plan=loaded, backend="aten")(*other.args)
    with pytest.raises(remat.PlanMismatch, match="made in mode 'graph', and a step in mode 'eager' has a graph"):
        remat.torch.plan(case.loss, *case.args, plan=loaded)


@pytest.fixture
def scratch_memory(monkeypatch):
    """A step takes 20 kB more than its trace says: the scratch memory of operators."""
    knows = mock.Mock(wraps=cpu_trials)
    knows.known_bytes = lambda func, args, kwargs, out: 20_000
    monkeypatch.setattr("remat.torch.emit.first_step.cpu_trials", knows)


def test_a_first_step_over_its_budget_is_planned_again(scratch_memory, caplog):
    case = mlp(4)
    expected = outcome(case.module, case.loss, *case.args)
    limited = remat.torch.limit_memory(case.loss, "90%", mode="graph", strict=True, **QUICK)
    with caplog.at_level(logging.WARNING, "remat"):
        for _ in range(3):
            assert outcome(case.module, limited, *case.args).same_as(expected)
    first, second = limited.plans
    assert first.measured_peak_bytes > 1.01 * first.budget_bytes
    assert second.budget_bytes == first.budget_bytes
    assert second.measured_peak_bytes <= second.budget_bytes
    # The excess counts as there from the start.
    excess = first.measured_peak_bytes - first.peak_bytes
    assert second.peak_bytes == remat.simulate(second.graph, second.schedule).peak_bytes + excess
    assert not caplog.records
    # Other shapes are planned by themselves, and those from before keep their plan.
    (x,) = case.args
    limited(x[:128]).backward()
    limited(x).backward()
    assert limited.plans[:2] == [first, second]
    assert len(limited.plans) == 3


def test_a_first_step_over_its_budget_where_no_plan_leaves_room(scratch_memory, caplog):
    case = mlp(4)
    tight = remat.torch.compile(case.loss, budget=1, backend="aten", **QUICK)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        tight(*case.args)
    smallest = caught.value.minimum_bytes
    torch._dynamo.reset()
    quiet = remat.torch.compile(case.loss, budget=smallest, backend="aten", **QUICK)
    with caplog.at_level(logging.WARNING, "remat"):
        for _ in range(3):
            quiet(*case.args).backward()
    assert len(quiet.plans) == 1
    (said,) = [one.getMessage() for one in caplog.records if one.name == "remat"]
    assert "no plan leaves so much room" in said
    torch._dynamo.reset()
    loud = remat.torch.compile(case.loss, budget=smallest, backend="aten", strict=True, **QUICK)
    loud(*case.args).backward()
    with pytest.raises(remat.InfeasibleBudget):
        loud(*case.args)


def test_a_first_step_over_the_budget_of_a_plan_that_was_given(scratch_memory, caplog):
    case = mlp(4)
    planned = remat.torch.compile(case.loss, budget="90%", backend="aten", **QUICK)
    planned(*case.args)
    torch._dynamo.reset()
    loud = remat.torch.compile(case.loss, plan=planned.plan, backend="aten", strict=True)
    with pytest.raises(remat.PlanMismatch, match="took"):
        loud(*case.args).backward()
    torch._dynamo.reset()
    quiet = remat.torch.compile(case.loss, plan=planned.plan, backend="aten")
    with caplog.at_level(logging.WARNING, "remat"):
        quiet(*case.args).backward()
        quiet(*case.args).backward()
    assert len([one for one in caplog.records if one.name == "remat" and "took" in one.getMessage()]) == 1


@pytest.mark.slow
def test_a_step_is_checked_in_graph_mode():
    case = mlp(3, dropout=0.2)
    result = remat.torch.check(case.loss, *case.args, budget="97%", steps=2, mode="graph")
    assert result.passed
    assert all(one.difference == 0 for one in result.comparisons)


def test_a_report_of_a_captured_step(tmp_path):
    """From the file of its plan: the mode, both peaks, and in the largest tensors' rows names that a user knows."""
    case = mlp(4, dropout=0.1)
    captured = remat.torch.compile(case.loss, budget="97%", backend="aten", **QUICK)
    captured(*case.args).backward()
    plan = captured.plan
    plan.save(tmp_path / "plan.json", plan.graph)
    arguments = ["report", str(tmp_path / "plan.json"), "--out", str(tmp_path / "r.html"), "--points", "0"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "r.html").read_text()
    assert ", mode graph" in page
    assert f"the first step took {format_bytes(plan.measured_peak_bytes)}" in page
    loaded, graph = load_plan_and_graph(tmp_path / "plan.json")
    assert Report(graph, loaded).html().count("mode graph") == 1
    names = dict(case.module.named_parameters())
    assert {tensor.name for tensor in graph.tensors if tensor.role == "parameter"} == set(names)
    lines = {op.source for op in graph.ops if op.kind.startswith("aten.")}
    assert all("torch_models.py:" in line for line in lines), lines
    assert any(op.layer for op in graph.ops if op.phase == "backward")
    assert "torch_models.py:" in page


def test_constants_of_the_captured_function_count():
    """A tensor that a forward pass makes of numbers is made once, when the step is captured, and stays."""
    case = mlp(4)
    (x,) = case.args
    numbers = torch.linspace(0.5, 2, x.shape[-1]).tolist()

    def loss_fn(x):
        return case.loss(x * torch.tensor(numbers))

    with pytest.raises(remat.InfeasibleBudget) as refused:
        remat.torch.compile(loss_fn, budget=1, backend="aten", **QUICK)(x)
    least_bytes = refused.value.minimum_bytes
    planned = remat.torch.compile(loss_fn, budget=least_bytes, backend="aten", **QUICK)
    assert outcome(case.module, planned, x).same_as(outcome(case.module, loss_fn, x))
    measured_bytes = remat.torch.measure(planned, x, repeats=1).peak_bytes
    assert measured_bytes <= least_bytes < measured_bytes + 4 * len(numbers)
