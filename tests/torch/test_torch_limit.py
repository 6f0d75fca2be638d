"""limit_memory: plans by itself, again where a step departs, and gets out of the way of evaluation."""

from __future__ import annotations

import copy

import pytest
import torch
from steps import QUICK
from torch import nn
from torch_models import mlp

import remat
import remat.torch

pytestmark = pytest.mark.usefixtures("no_compiled_code")


def gradients(module, loss_fn, *args, **kwargs):
    module.zero_grad()
    torch.manual_seed(7)
    result = loss_fn(*args, **kwargs)
    loss = result["loss"] if isinstance(result, dict) else result
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", ["auto", "eager"])
def test_other_shapes_are_planned_too(mode):
    case = mlp(layers=8, dropout=0.1)
    limited = remat.torch.limit_memory(case.loss, "70%", mode=mode, **QUICK)
    for rows in (256, 200, 256):
        x = torch.randn(rows, 64)
        assert same(gradients(case.module, limited, x), gradients(case.module, case.loss, x))
    assert len(limited.plans) == 2
    assert all(plan.recomputed > 0 for plan in limited.plans[:1])
    assert limited.plans[1].budget_bytes == limited.plans[0].budget_bytes
    assert {plan.mode for plan in limited.plans} == {"graph" if mode == "auto" else mode}


@pytest.mark.parametrize("mode", ["auto", "eager"])
def test_another_branch_is_planned_once_it_was_taken(mode):
    case = mlp(layers=8)
    limited = remat.torch.limit_memory(case.loss, "70%", mode=mode, **QUICK)
    gradients(case.module, limited, *case.args)
    for place in range(1, 16, 2):
        case.module[place] = nn.GELU()
    for _ in range(3):
        assert same(gradients(case.module, limited, *case.args), gradients(case.module, case.loss, *case.args))
    assert len(limited.plans) == 2
    assert limited.plans[1].recomputed > 0


def test_a_change_can_be_let_pass(caplog):
    case = mlp(layers=8)
    limited = remat.torch.limit_memory(case.loss, "70%", on_change="keep", **QUICK)
    for rows in (256, 200):
        x = torch.randn(rows, 64)
        assert same(gradients(case.module, limited, x), gradients(case.module, case.loss, x))
    assert [plan.mode for plan in limited.plans] == ["eager"]
    assert caplog.text.count("departs from the plan") == 1


def test_methods_mappings_and_evaluation():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(layers=8).module

        @remat.torch.limit_memory(budget="70%", **QUICK)
        def loss(self, batch, *, scale):
            return {"loss": self.body(batch["x"]).square().mean() * scale, "rows": len(batch["x"])}

    module = Model()
    batch = {"x": torch.randn(256, 64)}
    with torch.no_grad():
        assert module.loss(batch, scale=1.0)["rows"] == 256
    assert not Model.loss.plans
    plain = Model.loss.__wrapped__.__get__(module)
    assert same(gradients(module, module.loss, batch, scale=2.0), gradients(module, plain, batch, scale=2.0))
    assert Model.loss.plans[0].recomputed > 0


def test_what_cannot_be():
    with pytest.raises(remat.InvalidBudget):
        remat.torch.limit_memory(lambda x: x, "many")
    with pytest.raises(ValueError, match="on_change='ignore'"):
        remat.torch.limit_memory(lambda x: x, "1GiB", on_change="ignore")


def test_what_graph_mode_cannot_capture_runs_eagerly_and_says_so_once(caplog):
    case = mlp(layers=8)

    def loss(x):
        print(end="")  # Python's own output breaks the capture.
        return case.loss(x)

    limited = remat.torch.limit_memory(loss, "70%", **QUICK)
    for _ in range(2):
        assert same(gradients(case.module, limited, *case.args), gradients(case.module, case.loss, *case.args))
    assert [plan.mode for plan in limited.plans] == ["eager"]
    (line,) = [record.message for record in caplog.records if record.name == "remat"]
    assert "runs eagerly within its budget, not in graph mode" in line
    assert "test_torch_limit.py" in line


class Counts(nn.Module):
    """Scales by the number of its calls, and by how often it was set up."""

    def __init__(self, sets_up: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
        self.sets_up, self.calls, self.scale = sets_up, 0, 0.5

    def forward(self, x):
        if self.sets_up and not self.calls:
            self.layers[0].register_forward_hook(lambda module, args, result: 2 * result)
        self.calls += 1
        self.scale *= 1.25
        if torch.any(torch.isnan(x)):  # Ends a capture.
            return self.layers(x).sum()
        return self.layers(x).square().mean() * self.calls * self.scale


@pytest.mark.parametrize("mode", ["auto", "eager"])
def test_a_trace_counts_nothing_up(mode):
    torch.manual_seed(0)
    module = Counts(sets_up=False)
    plain = copy.deepcopy(module)
    limited = remat.torch.limit_memory(module.forward, "80%", mode=mode, **QUICK)
    for rows in (512, 512, 480):
        x = torch.randn(rows, 16)
        assert same(gradients(module, limited, x), gradients(plain, plain, x))
    assert {plan.mode for plan in limited.plans} == {"eager"}
    assert (module.calls, module.scale) == (plain.calls, plain.scale)


def test_a_trace_that_sets_a_module_up_leaves_its_numbers():
    """Else the first step would set it up once more: the module would have two hooks."""
    module = Counts(sets_up=True)
    limited = remat.torch.limit_memory(module.forward, "100%", mode="eager", **QUICK)
    gradients(module, limited, torch.randn(64, 16))
    assert len(module.layers[0]._forward_hooks) == 1
    assert module.calls == 2


def test_a_loss_that_is_computed_outside_runs_in_graph_mode():
    """The gradients of what the function returns come from outside; what the loss itself holds is no part of it."""
    module, (x,) = mlp(layers=8).module, mlp(layers=8).args
    limited = remat.torch.limit_memory(module, "80%", **QUICK)
    for run in range(2):
        expected = gradients(module, lambda x: module(x).pow(3).mean(), x)
        assert same(gradients(module, lambda x: limited(x).pow(3).mean(), x), expected), run
    (plan,) = limited.plans
    assert plan.mode == "graph"
    assert plan.recomputed > 0
    assert plan.measured_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("mode", ["auto", "eager"])
def test_options_of_both_modes(mode):
    case = mlp(layers=4)
    optimizer = torch.optim.Adam(case.module.parameters())
    beside = {"accumulates": True, "resident": [torch.zeros(1000)], "resident_bytes": 500}
    plans = []
    for more in ({}, {"optimizer": optimizer, **beside}):
        limited = remat.torch.limit_memory(case.loss, 1 << 24, mode=mode, **more, **QUICK)
        gradients(case.module, limited, *case.args)
        plans.append(limited.plans[0])
    parameters = sum(p.numel() * 4 for p in case.module.parameters())
    assert plans[1].peak_bytes - plans[0].peak_bytes >= 2 * parameters + 4500
    assert not optimizer.state


def held_beside(case, size):
    """The case's loss, which holds more in a real step than in one that is traced."""
    calls = []

    def loss(*args):
        calls.append(case.loss(*args))
        if len(calls) > 1:
            extra = torch.ones(size // 4)  # Made of nothing, so that no operator of the plan reads it.
            return calls[-1] + extra.mul(0).sum().detach() + 0 * extra.requires_grad_().exp().sum()
        return calls[-1]

    return loss


def test_a_step_over_its_budget_is_planned_again_for_what_it_took(caplog):
    case = mlp(layers=8, batch=2048)
    limited = remat.torch.limit_memory(held_beside(case, 1 << 18), "90%", mode="eager", **QUICK)
    for _ in range(3):
        gradients(case.module, limited, *case.args)
    first, second = limited.plans[:2]
    assert first.measured_peak_bytes > 1.01 * first.budget_bytes
    assert second.measured_peak_bytes <= 1.01 * second.budget_bytes
    assert "more than the budget" not in caplog.text


def test_a_budget_that_holds_after_no_plan_is_said(caplog):
    case = mlp(layers=8)
    limited = remat.torch.limit_memory(held_beside(case, 1 << 22), "90%", mode="eager", **QUICK)
    for _ in range(3):
        gradients(case.module, limited, *case.args)
    assert caplog.text.count("no plan leaves so much room") == 1


class Branching(nn.Module):
    """Layers that save more in one of two branches: too little each time to depart from the plan."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(layers=8).module
        self.more = False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.neg() if self.more else x)
        return x.square().mean()


def test_a_branch_over_the_budget_is_planned_for(caplog):
    module, x = Branching(), torch.randn(256, 64)
    limited = remat.torch.limit_memory(module, "100%", mode="eager", **QUICK)
    for more in (False, True, True, True):
        module.more = more
        assert same(gradients(module, limited, x), gradients(module, module, x))
    assert len(limited.plans) == 2
    assert limited.plans[1].measured_peak_bytes <= limited.plans[0].budget_bytes


@pytest.mark.parametrize("strict", [False, True])
def test_a_branch_that_cannot_be_planned_runs_on(caplog, strict):
    case = mlp(layers=4)
    x = torch.randn(256, 64)

    def loss(x):
        y = case.module(x)
        if (y * 0 + 1).any():  # Nobody knows beforehand, and a plan hears no.
            y = y[(y.detach()[:, 0] > 0).nonzero(as_tuple=True)]
        return y.square().mean()

    limited = remat.torch.limit_memory(loss, "90%", mode="eager", strict=strict, **QUICK)
    for number in range(3):
        if strict and number:
            with pytest.raises(remat.UnsupportedStep, match="without values"):
                limited(x)
        else:
            assert same(gradients(case.module, limited, x), gradients(case.module, loss, x))
    assert caplog.text.count("another branch than was planned") == (not strict)
