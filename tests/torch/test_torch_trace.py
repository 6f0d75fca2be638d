"""The traced step: sizes, views, in-place writes, what may repeat, the optimizer, and that nothing is touched."""

from __future__ import annotations

import gc
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from steps import peak_bytes
from torch import nn
from torch_models import mlp, resnet

import remat
import remat.torch
from remat.planners import planner_names


def test_sizes_inputs_and_names():
    layer = nn.Linear(4, 2)
    graph = remat.torch.trace(lambda x: layer(x).sin().sum(), torch.randn(8, 4))

    assert sorted(graph.tensors[t].size_bytes for t in graph.inputs) == [8, 32, 128]
    forward = [op for op in graph.ops if "Backward" not in op.name]
    assert [op.kind.partition(".")[0] for op in forward[:3]] == ["addmm", "sin", "sum"]
    assert [graph.tensors[op.outputs[0]].size_bytes for op in forward[:3]] == [64, 64, 4]
    assert forward[0].name.startswith("Linear")
    assert any("AddmmBackward0" in op.name for op in graph.ops)
    assert forward[0].time_s > forward[2].time_s > 0
    assert not graph.free_order


def test_the_plain_peak_is_the_measured_one():
    for case in (mlp(), resnet(blocks=1)):
        graph = remat.torch.trace(case.loss, *case.args)
        predicted = remat.simulate(graph, graph.plain_schedule).peak_bytes
        assert predicted == pytest.approx(peak_bytes(case), rel=0.03)


def test_numbers_that_a_step_makes_tensors_of_are_measured_once():
    def peak_of(made, values) -> int:
        def step():
            x = made(values)
            return x, x.exp().add(1)

        return remat.torch.measure(step, repeats=1).peak_bytes

    numbers = [float(number) for number in range(50_000)]
    # What a list holds is copied, the memory of an array is read where it lies: either is there but once.
    for made, values in ((torch.tensor, numbers), (torch.as_tensor, np.asarray(numbers, "float32"))):
        assert peak_of(made, values) == pytest.approx(3 * 4 * len(numbers), abs=64)


def test_a_complex_number_beside_the_tensors():
    """The gradient of a product with it is one with its conjugate, which is a view where there is a tensor."""
    x = torch.randn(64, 32, requires_grad=True)

    def loss():
        return torch.fft.fft(torch.exp(1j * torch.tanh(torch.sin(x)))).abs().square().mean()

    plan = remat.torch.plan(loss, budget="100%")
    with remat.torch.apply(plan):
        planned = torch.autograd.grad(loss(), x)[0]
    torch.testing.assert_close(planned, torch.autograd.grad(loss(), x)[0], rtol=0, atol=0)


def test_a_write_in_place_shares_the_storage():
    def loss(x):
        return torch.relu_(x * 2).exp().sum()

    graph = remat.torch.trace(loss, torch.randn(32, 32, requires_grad=True))
    written = next(op for op in graph.ops if op.kind == "relu_")
    assert graph.roots[written.outputs[0]] == graph.ops[0].outputs[0]


def test_what_may_repeat():
    norm, own = nn.BatchNorm1d(4), torch.Generator().manual_seed(1)

    def loss(x):
        noise = torch.randn(x.shape, generator=own)
        torch.ops.aten.sin_(norm.running_mean)
        return (F.dropout(norm(x * noise).exp()) * x.sum()).sum()

    graph = remat.torch.trace(loss, torch.randn(8, 4, requires_grad=True))
    may = {op.kind: op.recomputable for op in graph.ops if "Backward" not in op.name}
    assert may["mul.Tensor"] is True
    assert may["bernoulli_.float"] is True  # On a CPU, from the state that its generator had.
    assert may["exp"] is True
    assert may["sin_"] is False
    # A value that the step overwrites later.
    assert may["add_.Tensor"] is False


def test_backward_ops_run_once():
    case = mlp(layers=2)
    graph = remat.torch.trace(case.loss, *case.args)
    assert not any(op.recomputable for op in graph.ops if "Backward" in op.name)


def test_nothing_is_touched():
    case = mlp(dropout=0.1)
    state = {name: value.clone() for name, value in case.module.state_dict().items()}
    optimizer = torch.optim.Adam(case.module.parameters())
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def loss(x):
        random.random()
        np.random.rand()
        return case.loss(x)

    remat.torch.trace(loss, *case.args, optimizer=optimizer)
    assert all(torch.equal(value, state[name]) for name, value in case.module.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in case.module.parameters())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert np.random.get_state()[1].tolist() == numpy_state


def test_the_optimizer_counts():
    case = mlp()
    parameters = sum(p.numel() * 4 for p in case.module.parameters())
    plain = remat.torch.trace(case.loss, *case.args)
    optimizer = torch.optim.Adam(case.module.parameters())
    before = remat.torch.trace(case.loss, *case.args, optimizer=optimizer)
    case.loss(*case.args).backward()
    optimizer.step()
    after = remat.torch.trace(case.loss, *case.args, optimizer=optimizer)

    # Two moments, and a few numbers.
    assert before.pinned_bytes == pytest.approx(plain.pinned_bytes + 2 * parameters, rel=0.01)
    assert after.pinned_bytes == pytest.approx(before.pinned_bytes, rel=0.01)
    assert any(op.name.startswith("optimizer/") for op in before.ops)
    for graph in (before, after):
        state = [graph.tensors[n] for n in graph.inputs if graph.tensors[n].role == "optimizer_state"]
        assert sum(tensor.size_bytes for tensor in state) == pytest.approx(2 * parameters, rel=0.01)


def test_larger_than_memory_on_the_meta_device():
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(1 << 17, 1 << 17) for _ in range(4)])
        x = torch.empty(64, 1 << 17)
    graph = remat.torch.trace(lambda x: module(x).square().mean(), x)
    assert graph.pinned_bytes > 250e9
    assert remat.simulate(graph, graph.plain_schedule).peak_bytes > 500e9


def test_frozen_parameters_have_no_gradient():
    case = mlp(layers=4)
    full = remat.torch.trace(case.loss, *case.args)
    for parameter in list(case.module.parameters())[:4]:
        parameter.requires_grad_(False)
    part = remat.torch.trace(case.loss, *case.args)
    assert len(part.outputs) == len(full.outputs) - 4


def test_accumulated_gradients_are_resident():
    case = mlp(layers=3)
    first = remat.torch.plan(case.loss, *case.args, budget="100%")
    later = remat.torch.plan(case.loss, *case.args, budget="100%", accumulates=True)
    parameters = sum(p.numel() * 4 for p in case.module.parameters())
    assert later.graph.pinned_bytes == first.graph.pinned_bytes + parameters


@pytest.mark.parametrize("planner", planner_names())
def test_every_planner(planner):
    """In a step whose order is PyTorch's own, each planner finds what it can reach, and eager order keeps it."""
    case = mlp(layers=4)
    options = {"planner": planner, "time_limit_s": 0.3}
    if planner == "store_all":
        with pytest.raises(remat.InfeasibleBudget) as caught:
            remat.torch.plan(case.loss, *case.args, budget="80%", **options)
        plan = remat.torch.plan(case.loss, *case.args, budget=caught.value.minimum_bytes, **options)
        assert plan.recomputed == 0
        assert caught.value.minimum_bytes == plan.baseline_peak_bytes
        return
    plan = remat.torch.plan(case.loss, *case.args, budget="85%", **options)
    assert plan.planner == planner
    assert plan.recomputed > 0
    remat.validate(plan.graph, plan.schedule)
    assert remat.simulate(plan.graph, plan.schedule).peak_bytes == plan.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda x: x * 2, "shape"),
        (lambda x: 3.0, "float"),
        (lambda x: x.detach().sum(), "depends on no parameter"),
        (lambda x: x.sum() * x.sum().item(), "without values"),
        (lambda x: x[x > 0].sum(), "without values"),
    ],
)
def test_what_cannot_be_traced(loss, message):
    with pytest.raises(remat.UnsupportedStep, match=message):
        remat.torch.trace(loss, torch.randn(3, requires_grad=True))


def test_what_is_left_behind_is_said(caplog):
    kept = []
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, args, out: kept.append(out))
    remat.torch.trace(lambda x: layer(x).sum(), torch.randn(2, 3))
    assert "left 1 tensors behind" in caplog.text


def test_small_whole_numbers_keep_their_values():
    mask, steps = torch.ones(4, 8, dtype=torch.bool), torch.tensor([3])

    def loss(x, mask):
        steps.add_(1)
        power = int(steps.sum() + mask.all())
        return (x**power).sum()

    graph = remat.torch.trace(loss, torch.randn(4, 8, requires_grad=True), mask)
    assert steps.item() == 3
    assert any(op.kind.startswith("pow") for op in graph.ops)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return x * self.inner(x)  # this line


def test_layers_phases_and_source_lines():
    model = nn.Sequential(OrderedDict(first=Block(), second=Block()))
    graph = remat.torch.trace(lambda x: model(x).sum(), torch.randn(4, 8))

    tanhs = [op for op in graph.ops if op.kind.startswith("tanh") and op.phase == "forward"]
    assert [op.layer for op in tanhs] == ["first.inner.1", "second.inner.1"]
    # Those of the backward pass are their forward operators'.
    backward = [op for op in graph.ops if op.kind.startswith("tanh_backward")]
    assert [(op.layer, op.phase) for op in backward] == [("second.inner.1", "backward"), ("first.inner.1", "backward")]
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith("# this line")]
    products = [op for op in graph.ops if op.kind.startswith("mul") and op.phase == "forward"]
    assert [op.source.rpartition("/")[2] for op in products] == [f"{Path(__file__).name}:{number} in forward"] * 2
    assert [op.layer for op in products] == ["first", "second"]
    assert {t.name for t in graph.tensors if t.role == "parameter"} >= {"first.inner.0.weight", "second.inner.0.bias"}


def test_a_tensor_in_a_circle_is_released_at_no_other_place_the_next_time():
    layer = nn.Linear(64, 64)

    def loss(x):
        for _ in range(8):
            x = layer(x).sin()
            circle = [x.exp()]
            circle.append(circle)
        return x.sum()

    x = torch.randn(32, 64)
    prints = set()
    before = gc.get_threshold()
    try:
        for threshold in ((1, 1, 1), (1_000_000,)):
            gc.set_threshold(*threshold)
            prints.add(remat.torch.trace(loss, x).fingerprint)
    finally:
        gc.set_threshold(*before)
    assert len(prints) == 1
