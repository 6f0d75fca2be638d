"""Graph mode: what is captured as one graph and how often, and what runs eagerly or in pieces and says so."""

from __future__ import annotations

import contextvars
import logging

import pytest
import torch
import torch.distributed as dist
from steps import QUICK, made_again_once, outcome
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch_models import mlp

import remat
import remat.torch

pytestmark = pytest.mark.usefixtures("no_compiled_code")


def test_each_combination_of_shapes_has_a_plan():
    case = mlp(4)
    planned = remat.torch.compile(case.loss, budget="97%", backend="aten", **QUICK)
    (x,) = case.args
    for batch in (256, 224, 256):
        expected = outcome(case.module, case.loss, x[:batch])
        assert outcome(case.module, planned, x[:batch]).same_as(expected)
    assert [plan.mode for plan in planned.plans] == ["graph", "graph"]
    with torch.no_grad():
        assert torch.equal(planned(x), case.loss(x))
    assert len(planned.plans) == 2


def test_a_compiled_module_has_the_attributes_of_the_module():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    inductor = remat.torch.compile(module)
    for planned in (
        remat.torch.compile(module, budget="1GiB", backend="aten"),
        remat.torch.limit_memory(module, "1GiB"),
        inductor,
    ):
        assert [id(one) for one in planned.parameters()] == [id(one) for one in module.parameters()]
        planned.eval()
        assert not module.training
        planned.train()
        assert planned.state_dict().keys() == module.state_dict().keys()
        assert planned.plans == []
        with pytest.raises(AttributeError, match="no_such"):
            _ = planned.no_such


def test_captures_may_come_before_backward_passes(under):
    layer = nn.Linear(16, 16)
    loss_fn = lambda x: (layer(x) + 1).relu().square().mean()  # noqa: E731
    planned = under(loss_fn, made_again_once)
    found = []
    for run in (loss_fn, planned):
        losses = [run(torch.ones(rows, 16)) for rows in (4, 6, 4)]
        sum(losses).backward()
        found.append(layer.weight.grad.clone())
        layer.zero_grad()
    assert torch.equal(*found)


def test_what_cannot_be_captured_runs_eagerly_and_says_why(caplog):
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def loss_fn(x):
        y = module(x)
        torch._dynamo.graph_break()
        return y.square().mean()

    x = torch.randn(256, 64)
    planned = remat.torch.compile(loss_fn, budget="90%", backend="aten", **QUICK)
    expected = outcome(module, loss_fn, x)
    with caplog.at_level(logging.WARNING, "remat"):
        assert outcome(module, planned, x).same_as(expected)
    (message,) = [record.getMessage() for record in caplog.records if "cannot be captured" in record.getMessage()]
    assert "loss_fn" in message
    assert "graph_break" in message
    assert "test_torch_graph_mode_capture.py:" in message  # Where it broke.
    assert "Hint" not in message
    assert "\n" not in message
    assert planned.reason in message
    assert planned.plan.mode == "eager"
    assert "mode           eager" in str(planned.plan)


def test_what_asks_for_values_runs_in_pieces(caplog):
    body = [m for _ in range(5) for m in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))]
    module = nn.ModuleList([nn.Sequential(*body), nn.Linear(64, 64), nn.Linear(64, 64)])

    def loss_fn(x):
        y = module[0](x)
        y = module[1 if y.sum().item() > 0 else 2](y)
        return torch.tanh(module[0](y)).square().mean()

    x = torch.randn(512, 64)
    expected = outcome(module, loss_fn, x)
    planned = remat.torch.compile(loss_fn, budget="80%", backend="aten", **QUICK)
    with caplog.at_level(logging.WARNING, "remat"):
        assert outcome(module, planned, x).same_as(expected)
        assert outcome(module, planned, x).same_as(expected)
    (message,) = [one.getMessage() for one in caplog.records if one.name == "remat"]
    assert "runs in pieces" in message
    assert "runs eagerly" not in message
    assert message.count("test_torch_graph_mode_capture.py:") == 2  # Where each of both ways broke.
    assert planned.reason in message
    assert len(planned.plans) == 2
    assert all(plan.mode == "graph" and plan.recomputed for plan in planned.plans)
    fixed = remat.torch.compile(loss_fn, budget=10**6, backend="aten", **QUICK)
    caplog.clear()
    with pytest.raises(remat.UnsupportedStep, match="share"):
        fixed(x)
    assert not [one for one in caplog.records if one.name == "remat"]


def by_a_number(z, number):
    return z / number


def by_what_is_made_of_a_number(z, number):
    return z * torch.full_like(z, 2 * number) + torch.clamp(z, -number, number)


def test_a_condition_on_a_number_of_elements_ends_a_piece(caplog):
    """Dynamo lets an error of its symbols pass there, and not one of its own."""
    torch.manual_seed(0)
    body = [m for _ in range(5) for m in (nn.Linear(64, 64), nn.Tanh())]
    module = nn.ModuleList([nn.Sequential(*body), nn.Linear(64, 64), nn.Linear(64, 64)])

    def loss_fn(x):
        y = module[0](x)
        total = y.square().mean()
        for number, layer in enumerate(module[1:]):
            chosen = (y[:, number] > 0).nonzero()[:, 0]
            if len(chosen):
                total = total + torch.tanh(layer(y[chosen])).square().mean()
        return total

    x = torch.randn(512, 64)
    expected = outcome(module, loss_fn, x)
    planned = remat.torch.limit_memory(loss_fn, "80%", **QUICK)
    with caplog.at_level(logging.WARNING, "remat"):
        assert outcome(module, planned, x).same_as(expected)
    (message,) = [one.getMessage() for one in caplog.records if one.name == "remat"]
    assert "runs in pieces" in message
    assert "a number that depends on values is a condition" in message

    caplog.clear()
    again = remat.torch.limit_memory(loss_fn, "80%", mode="graph", **QUICK)  # Dynamo knows the code by now.
    with caplog.at_level(logging.WARNING, "remat"):
        assert outcome(module, again, x).same_as(expected)
    (message,) = [one.getMessage() for one in caplog.records if one.name == "remat"]
    assert "runs in pieces" in message


@pytest.mark.parametrize("use", [by_a_number, by_what_is_made_of_a_number])
def test_a_number_of_the_step_that_it_only_computes_with_stays_in_the_graph(use):
    body = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())]
    module = nn.Sequential(*body)

    def loss_fn(x):
        y = module(x)
        return use(module(y), y.abs().mean().item()).square().mean()

    planned = remat.torch.compile(loss_fn, budget="70%", backend="aten", **QUICK)
    for scale in (1.0, 3.0):
        x = scale * torch.randn(512, 64)
        assert outcome(module, planned, x).same_as(outcome(module, loss_fn, x))
    (plan,) = planned.plans
    assert plan.mode == "graph"
    assert plan.recomputed > 0


def test_a_branch_on_what_the_model_computes_is_planned_as_it_was_taken(caplog):
    """Nobody knows beforehand which branch a step takes. The first step tells which one it took."""
    module = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())])

    def loss_fn(x):
        y = module(x)
        if y.abs().sum() > 0:  # Traced as no.
            y = y.tanh()
        if y.abs().sum() < 0:
            y = y.exp()
        return module(y).square().mean()

    planned = remat.torch.compile(loss_fn, budget="60%", backend="aten", **QUICK)
    x = torch.randn(512, 64)
    expected = outcome(module, loss_fn, x)
    for _ in range(4):
        assert outcome(module, planned, x).same_as(expected)
    guessed, as_taken = planned.plans
    assert guessed.mode == as_taken.mode == "eager"
    assert as_taken.measured_peak_bytes <= as_taken.budget_bytes
    assert sum("departs from the plan" in one.getMessage() for one in caplog.records) == 1


def test_a_step_that_counts_its_calls_runs_eagerly_in_the_end(caplog):
    layer, calls = nn.Linear(8, 8), {"number": 0}

    def counting(x):
        calls["number"] += 1
        return layer(x).tanh().sum() + (0.0 if calls["number"] >= 0 else 1.0)

    limited = remat.torch.compile(counting, budget="1GiB", backend="aten", **QUICK)
    x = torch.randn(4, 8)
    with caplog.at_level(logging.WARNING, "remat"):
        for _ in range(6):
            loss = limited(x)
            loss.backward()
    assert torch.equal(loss, layer(x).tanh().sum())
    assert "captured 4 times" in limited.reason
    assert limited.plan.mode == "eager"
    assert sum("runs eagerly" in record.getMessage() for record in caplog.records) == 1


def test_a_number_that_changes_is_captured_once_more(caplog):
    """The weight of a loss, say, that is another at each step."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def loss_fn(x, weight):
        return (module(x) * weight).square().mean() + weight * module[0].weight.abs().sum()

    planned = remat.torch.compile(loss_fn, budget="100%", backend="aten", **QUICK)
    x = torch.randn(512, 64)
    for step in range(6):
        weight = 0.1 * step
        expected = outcome(module, loss_fn, x, weight)
        assert outcome(module, planned, x, weight).same_as(expected)
    assert [plan.mode for plan in planned.plans] == ["graph", "graph"]
    assert not [one for one in caplog.records if one.name == "remat"]


def test_code_that_asks_whether_it_is_compiled_takes_its_eager_branch(under):
    layer = nn.Linear(16, 16)

    def loss_fn(x):
        y = layer(x).tanh()
        scale = 2.0 if torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling() else 3.0
        return (layer(y) * scale).square().mean()

    x = torch.randn(8, 16)
    planned = under(loss_fn, made_again_once)
    assert outcome(layer, planned, x).same_as(outcome(layer, loss_fn, x))
    assert planned.plan.mode == "graph"
    # Whoever else compiles gets the answer that Dynamo gives.
    assert torch.compile(lambda: torch.compiler.is_compiling(), backend="eager")()


SETTING = contextvars.ContextVar("SETTING", default=None)


def set_quietly(value):
    """As transformers sets one: Dynamo cannot trace it where no compiler is told of."""
    return None if torch.compiler.is_compiling() else SETTING.set(value)


def test_only_what_is_in_the_way_is_told_that_it_is_compiled(under, caplog):
    layer = nn.Linear(16, 16)

    def loss_fn(x):
        set_quietly(3)
        scale = 2.0 if torch.compiler.is_compiling() else 3.0
        return (layer(layer(x).tanh()) * scale).square().mean()

    x = torch.randn(8, 16)
    planned = under(loss_fn, made_again_once)
    with caplog.at_level(logging.WARNING, "remat"):
        assert outcome(layer, planned, x).same_as(outcome(layer, loss_fn, x))
    assert planned.plan.mode == "graph"
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("remat")]
    assert "set_quietly (test_torch_graph_mode_capture.py)" in message
    assert "loss_fn" not in message


def test_where_telling_one_does_not_help_all_are_told(under, caplog):
    layer = nn.Linear(16, 16)

    def loss_fn(x):
        if torch.compiler.is_compiling():
            SETTING.get()
        SETTING.set(3)
        return layer(x).square().mean()

    planned = remat.torch.compile(loss_fn, budget="100%", backend="aten", **QUICK)
    with caplog.at_level(logging.WARNING, "remat"):
        planned(torch.randn(8, 16))
    assert planned.plan.mode == "eager"


@pytest.mark.parametrize("gap", [1, 2])
def test_a_branch_that_follows_from_shapes_is_taken_as_in_eager_pytorch(under, gap, caplog):
    """As transformers asks whether positions that it made follow one another."""
    layer = nn.Linear(16, 16)

    def loss_fn(x):
        positions = torch.arange(0, gap * x.shape[0], gap).unsqueeze(0)
        follow = (torch.diff(positions, dim=-1) != 1).cumsum(-1)
        scale = 3.0 if (follow[:, -1] == 0).all() else 2.0
        return (layer(layer(x).tanh()) * scale).square().mean()

    x = torch.randn(8, 16)
    planned = under(loss_fn, made_again_once)
    assert outcome(layer, planned, x).same_as(outcome(layer, loss_fn, x))
    assert planned.plan.mode == "graph"
    assert not [record for record in caplog.records if record.name.startswith("remat") and record.levelname != "DEBUG"]


def written_over(known):
    known.add_(1)
    return known


@pytest.mark.parametrize(
    "asked",
    [
        lambda x, mask: (x > 0).all(),
        lambda x, mask: mask.all(),
        lambda x, mask: mask.sum() == mask.numel(),
        lambda x, mask: not (mask[:, 0] == 0).any(),
    ],
    ids=["the batch", "a mask", "its sum", "a part of it"],
)
def test_a_branch_on_a_tensor_of_the_batch_is_captured_each_way(asked, caplog):
    """As transformers leaves a mask out of attention where it is full."""
    layer = nn.Linear(16, 16)
    loss_fn = lambda x, mask: (layer(x) * (3.0 if asked(x, mask) else 2.0)).square().mean()  # noqa: E731
    planned = remat.torch.compile(loss_fn, budget="100%", backend="aten", **QUICK)
    full, padded = torch.ones(8, 16, dtype=torch.int64), torch.zeros(8, 16, dtype=torch.int64)
    with caplog.at_level(logging.WARNING, "remat"):
        for x, mask in ((torch.ones(8, 16), full), (-torch.ones(8, 16), padded), (torch.ones(8, 16), full)):
            assert outcome(layer, planned, x, mask).same_as(outcome(layer, loss_fn, x, mask))
    assert {plan.mode for plan in planned.plans} == {"graph"}
    assert not [record for record in caplog.records if record.name.startswith("remat") and record.levelname != "DEBUG"]


@pytest.mark.parametrize(
    "asked",
    [
        lambda x: (torch.arange(len(x)) + x[:, 0] > x[0, 0].clone()).all(),
        lambda x: (torch.rand(4) > 2).all(),
        lambda x: torch.zeros(4).add_(x[0, :4]).sum() > 0,
        lambda x: written_over(torch.zeros(4)).sum() > 0,
        lambda x: written_over(x.clone())[0].sum() > 0,
    ],
    ids=["copied", "drawn", "written", "written over", "a copy written over"],
)
def test_a_branch_that_takes_more_is_not_decided_beforehand(asked):
    layer = nn.Linear(16, 16)
    loss_fn = lambda x: (layer(x) * (3.0 if asked(x) else 2.0)).square().mean()  # noqa: E731
    planned = remat.torch.compile(loss_fn, budget="100%", backend="aten", **QUICK)
    for x in (torch.ones(8, 16), -torch.ones(8, 16)):
        assert outcome(layer, planned, x).same_as(outcome(layer, loss_fn, x))
    assert planned.plan.mode == "eager"


def test_a_branch_on_what_was_written_to_before_the_call_asks_what_is_there():
    layer, mask = nn.Linear(16, 16), torch.zeros(8)
    mask += 1
    loss_fn = lambda x, mask: (layer(x) * (3.0 if mask.all() else 2.0)).square().mean()  # noqa: E731
    planned = remat.torch.compile(loss_fn, budget="100%", backend="aten", **QUICK)
    x = torch.ones(8, 16)
    for _ in range(2):
        assert outcome(layer, planned, x, mask).same_as(outcome(layer, loss_fn, x, mask))
        mask[0] = 0
    assert {plan.mode for plan in planned.plans} == {"graph"}


def test_arguments_are_read_at_once():
    with pytest.raises(remat.InvalidBudget):
        remat.torch.compile(lambda x: x, budget="many", backend="aten")
    with pytest.raises(ValueError, match="inductor"):
        remat.torch.compile(lambda x: x, budget="60%", backend="triton")
    plan = remat.torch.plan(lambda x: x.sum(), torch.ones(3, requires_grad=True), budget="100%")
    with pytest.raises(ValueError, match="not both"):
        remat.torch.compile(lambda x: x, budget="60%", plan=plan, backend="aten")
    with pytest.raises(ValueError, match="aten"):
        remat.torch.compile(lambda x: x, plan=plan)


wrapper = None


def loss_by_a_global_name(x):
    return wrapper(x).square().mean()


def test_data_parallel_by_a_global_name(tmp_path, monkeypatch):
    """One process; tests with two are slow ones."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        monkeypatch.setitem(globals(), "wrapper", DistributedDataParallel(module))
        reduced, seen = [], []
        wrapper.register_comm_hook(
            None, lambda state, bucket: (reduced.append(bucket.buffer().numel()), allreduce_hook(None, bucket))[1]
        )
        module[0].weight.register_hook(lambda gradient: seen.append(gradient))
        planned = remat.torch.compile(loss_by_a_global_name, budget="100%", backend="aten")
        x = torch.randn(8, 16)
        expected = outcome(module, loss_by_a_global_name, x)
        assert outcome(module, planned, x).same_as(expected)
        assert outcome(module, planned, x).same_as(expected)
        assert planned.plan.mode == "graph"
        assert sum(reduced) == 3 * sum(p.numel() for p in module.parameters())
        assert len(seen) == 3
    finally:
        dist.destroy_process_group()
