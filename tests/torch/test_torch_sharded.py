"""fully_shard in one process: what is traced of it, that tracing leaves no trace, and how ranks come to one plan."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from rank_steps import batch, model
from steps import QUICK
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel

import remat
import remat.torch
from remat.torch import _private
from remat.torch.api import ranks


@pytest.fixture(autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sharded():
    module = model(blocks=3)
    for block in module:
        fully_shard(block)
    yield fully_shard(module)
    # A step of it that had no backward pass would be seen by what is traced in a later test.
    module.set_requires_gradient_sync(True)


def loss_of(module):
    return lambda x, y: nn.functional.cross_entropy(module(x), y)


def gradients(module):
    found = {name: p.grad.to_local().clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return found


def test_a_sharded_step_follows_its_plan_and_its_peak(sharded):
    loss, args = loss_of(sharded), batch(0, rows=512)
    torch.manual_seed(3)
    loss(*args).backward()
    plain = gradients(sharded)
    plan = remat.torch.plan(loss, *args, budget="75%", **QUICK)
    applied = remat.torch.apply(plan)

    def step():
        torch.manual_seed(3)
        with applied:
            value = loss(*args)
        value.backward()

    step()
    planned = gradients(sharded)
    assert all(torch.equal(plain[name], planned[name]) for name in plain)
    assert plan.recomputed > 0
    assert applied.departures == 0
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.03)
    peak = remat.torch.measure(lambda: (step(), sharded.zero_grad(), None)[2], repeats=1).peak_bytes
    assert peak == pytest.approx(plan.peak_bytes, rel=0.03)
    assert peak <= plan.budget_bytes


def test_tracing_leaves_a_sharded_module_as_it_was(sharded):
    def state():
        found = []
        for module in sharded.modules():
            found += [(name, id(p), type(p), p.grad) for name, p in module._parameters.items()]
            found += [len(module._state_dict_pre_hooks), len(module._load_state_dict_pre_hooks)]
        return found

    before = state()
    graph = remat.torch.trace(loss_of(sharded), *batch(0, rows=32))
    assert state() == before
    assert any(op.kind == "gather" for op in graph.ops)
    assert remat.torch.trace(loss_of(sharded), *batch(0, rows=32)).fingerprint == graph.fingerprint


def test_the_update_of_shards_counts(sharded):
    loss, args = loss_of(sharded), batch(0, rows=32)
    optimizer = torch.optim.AdamW(sharded.parameters())
    graph = remat.torch.trace(loss, *args, optimizer=optimizer)
    own = sum(p.to_local().numel() * 4 for p in sharded.parameters())
    sizes = {role: 0 for role in ("parameter", "optimizer_state")}
    for number in graph.inputs:
        role = graph.tensors[number].role
        if role in sizes:
            sizes[role] += graph.tensors[number].size_bytes
    assert sizes["parameter"] == own
    assert sizes["optimizer_state"] >= 2 * own
    assert any(op.phase == "update" for op in graph.ops)
    assert not optimizer.state


def whole_gradients(module):
    """Those that were not reduced, by address, and what is in them."""
    accumulation = traced_accumulation(module)
    return [(one.data_ptr(), one.clone()) for one in accumulation.whole_gradients()]


def traced_accumulation(module):
    return remat.torch.plan(loss_of(module), *batch(0, rows=32), budget="1GiB", **QUICK).step.recording.accumulation


@pytest.mark.parametrize("resharded", [True, False])
def test_micro_batches_that_leave_gradients_whole(sharded, resharded):
    loss, args = loss_of(sharded), batch(0, rows=1024)

    def update(loss_fn):
        torch.manual_seed(3)
        for step in range(3):
            sharded.set_requires_gradient_sync(step == 2)
            sharded.set_reshard_after_backward(resharded or step == 2)
            loss_fn(*args).backward()
        return gradients(sharded)

    plain = update(loss)
    limited = remat.torch.limit_memory(loss, "80%", mode="eager", **QUICK)
    for _ in range(2):
        planned = update(limited)
        assert all(torch.equal(plain[name], planned[name]) for name in plain)
    first, last = limited.plans
    for plan in (first, last) if resharded else ():
        assert plan.recomputed > 0
        assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.03)
        assert plan.measured_peak_bytes <= plan.budget_bytes
    whole = sum(one.numel() * 4 for one in plain.values())
    assert sum(first.graph.tensors[n].size_bytes for n in first.graph.ops[0].outputs) == whole


@pytest.mark.parametrize("resharded", [True, False])
def test_tracing_leaves_whole_gradients_as_they_were(sharded, resharded):
    sharded.set_reshard_after_backward(resharded)
    sharded.set_requires_gradient_sync(False)
    loss_of(sharded)(*batch(0, rows=32)).backward()
    before = whole_gradients(sharded)
    assert len(before) == len(list(sharded.parameters()))
    sharded.set_requires_gradient_sync(True)
    after = whole_gradients(sharded)
    assert [address for address, _ in after] == [address for address, _ in before]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(before, after, strict=True))


def test_a_step_that_does_something_else_with_its_gradients_is_not_the_planned_one(sharded, caplog):
    loss, args = loss_of(sharded), batch(0, rows=64)
    applied = remat.torch.apply(remat.torch.plan(loss, *args, budget="1GiB", **QUICK))
    sharded.set_requires_gradient_sync(False)
    for _ in range(2):
        with applied:
            value = loss(*args)
        value.backward()
    assert applied.departures == 2
    said = [record.message for record in caplog.records if "set_requires_gradient_sync" in record.message]
    assert len(said) == 1
    assert "it does not reduce gradients, and the planned one reduces gradients" in said[0]


def test_too_little_for_whole_gradients_is_said_at_the_first_step(sharded):
    loss, args = loss_of(sharded), batch(0, rows=256)
    with pytest.raises(remat.InfeasibleBudget) as error:
        remat.torch.plan(loss, *args, budget="1%", **QUICK)
    assert "leave whole" not in str(error.value)
    enough = error.value.minimum_bytes
    assert remat.torch.limit_memory(loss, enough, mode="eager", **QUICK)(*args) > 0
    sharded.set_requires_gradient_sync(False)
    limited = remat.torch.limit_memory(loss, enough, mode="eager", **QUICK)
    with pytest.raises(remat.InfeasibleBudget, match=r"KiB are gradients that earlier micro-batches leave whole"):
        limited(*args)


def test_the_last_of_several_steps_is_planned_at_the_first(sharded):
    loss, args = loss_of(sharded), batch(0, rows=16)
    sharded.set_requires_gradient_sync(False)
    first = remat.torch.plan(loss, *args, budget="1GiB", **QUICK)
    limited = remat.torch.limit_memory(loss, first.baseline_peak_bytes, mode="eager", **QUICK)
    with pytest.raises(remat.InfeasibleBudget, match="of several steps that reduce gradients once, the last"):
        limited(*args)


def test_what_other_modules_do_with_their_gradients_needs_no_plan(sharded):
    model, x = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(64, 8)
    limited = remat.torch.limit_memory(lambda x: model(x).square().mean(), "1GiB", mode="eager", **QUICK)
    for reduces in (False, True, False):
        sharded.set_requires_gradient_sync(reduces)
        limited(x).backward()
    assert len(limited.plans) == 1


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + torch.dropout(self.down(torch.tanh(self.up(x))), 0.1, train=True))


def cut_over_processes():
    """A model whose matrices are cut over a mesh, here of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual() for _ in range(4)])
    mesh = init_device_mesh("cpu", (1,))
    for block in model:
        parallel.parallelize_module(block, mesh, {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()})
    return model


def gradients_of(model, loss, x):
    model.zero_grad()
    torch.manual_seed(7)
    loss(x).backward()
    return [_private.local(p.grad).clone() for p in model.parameters()]


def test_parts_of_distributed_tensors_are_planned():
    model, x = cut_over_processes(), torch.randn(256, 16)
    loss = lambda x: model(x).square().mean()  # noqa: E731
    expected = gradients_of(model, loss, x)
    plan = remat.torch.plan(loss, x, budget="65%", **QUICK)
    applied = remat.torch.apply(plan)

    def planned(x):
        with applied:
            return loss(x)

    for _ in range(2):
        found = gradients_of(model, planned, x)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert applied.departures == 0
    again = {plan.graph.ops[op].kind for op in plan.schedule if plan.schedule.count(op) > 1}
    assert "tanh" in again
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    assert plan.measured_peak_bytes <= plan.budget_bytes


def test_distributed_parameters_are_not_captured(caplog):
    model, x = cut_over_processes(), torch.randn(256, 16)
    loss = lambda x: model(x).square().mean()  # noqa: E731
    expected = gradients_of(model, loss, x)
    limited = remat.torch.limit_memory(loss, "65%", **QUICK)
    found = gradients_of(model, limited, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert [plan.mode for plan in limited.plans] == ["eager"]
    assert "Linear has parameters that are cut over processes (DTensor)" in caplog.text


def test_ranks_that_disagree_name_both(sharded, monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(_private, "is_one_of_several", lambda: True)
    monkeypatch.setattr(_private, "process_group", lambda: (0, 2, store))
    plan = remat.torch.plan(loss_of(sharded), *batch(0, rows=32), budget="1GiB", **QUICK)
    theirs = {"step": "0123456789abcdef", "ops": 7, "versions": "remat 9.9, PyTorch 9.9"}
    store.set(f"remat/plan/{ranks._rounds + 1}/step/1", json.dumps(theirs))
    with pytest.raises(remat.PlanMismatch, match=r"ranks 0 and 1 .* on rank 0, 7 operators .*remat 9\.9") as error:
        remat.torch.apply(plan).__enter__()  # No step: it raises before.
    assert remat.__version__ in str(error.value)


def test_a_rank_that_makes_no_plan_is_named(sharded, monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(_private, "is_one_of_several", lambda: True)
    monkeypatch.setattr(_private, "process_group", lambda: (0, 2, store))
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.1)
    plan = remat.torch.plan(loss_of(sharded), *batch(0, rows=32), budget="1GiB", **QUICK)
    with pytest.raises(remat.PlanMismatch, match=r"ranks \[1\] have planned none"):
        remat.torch.apply(plan).__enter__()  # No step: it raises before.
