"""Operators that lay a tensor's own axes out anew (``transpose_``), which recurrent layers and quantiles call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
import remat.torch

ROWS, LENGTH, WIDTH = 64, 2, 64


class Stack(nn.Module):
    """Two layers, each around which ``turn`` is put."""

    def __init__(self, make, turn):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.turn = turn

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(self.turn(layer, x))
        return x.square().mean()


def linear():
    return nn.Linear(WIDTH, WIDTH)


def turned_twice(layer, x):
    """There and back, in place, by five operators."""
    y = layer(x).transpose_(0, 1).unsqueeze_(0)
    return y.squeeze_(0).swapaxes_(0, 1).cos().swapdims_(1, 2).cos().transpose(1, 2)


STEPS = {
    "GRU": (lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), lambda layer, x: layer(x)[0]),
    "RNN": (lambda: nn.RNN(WIDTH, WIDTH, batch_first=True), lambda layer, x: layer(x)[0]),
    "LSTM": (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda layer, x: layer(x)[0]),
    "quantile": (linear, lambda layer, x: x - layer(x).quantile(0.3, -1, keepdim=True)),
    "vmap": (linear, lambda layer, x: torch.vmap(layer)(x)),
    "turned": (linear, turned_twice),
}


def gradients_of(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", ["eager", "graph", "recompute", "micro-batches"])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_the_same(name, mode):
    torch.manual_seed(0)
    model, x = Stack(*STEPS[name]), torch.randn(ROWS, LENGTH, WIDTH)
    wanted = gradients_of(model, model(x))
    if mode == "eager":
        with pytest.raises(remat.InfeasibleBudget) as refused:
            remat.torch.plan(model, x, budget=1)
        plan = remat.torch.plan(model, x, budget=refused.value.minimum_bytes)
        assert len(set(plan.schedule)) < len(plan.schedule)
        with remat.torch.apply(plan, strict=True):
            loss = model(x)
        found = gradients_of(model, loss)
        assert plan.measured_peak_bytes <= plan.budget_bytes
    elif mode == "graph":
        step = remat.torch.limit_memory(lambda: model(x), "80%")
        found = gradients_of(model, step())
    elif mode == "recompute":
        model.layers = nn.ModuleList(remat.torch.recompute(layer) for layer in model.layers)
        found = gradients_of(model, model(x))
    else:
        model.zero_grad(set_to_none=True)
        remat.torch.micro_batches(model, 1)(x)
        found = [p.grad.clone() for p in model.parameters()]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("turn", ["transpose_", "t_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_"])
def test_a_trace_has_the_shapes_of_the_step(turn):
    arguments = {"t_": (), "squeeze_": (0,), "unsqueeze_": (0,)}.get(turn, (0, 1))
    layer, x = nn.Linear(8, 6), torch.randn(1 if turn == "squeeze_" else 4, 8)

    def loss():
        y = getattr(layer(x), turn)(*arguments)
        shapes.append((tuple(y.shape), y.stride()))
        return y.square().sum()

    shapes = []
    graph = remat.torch.trace(loss)
    loss()
    assert shapes[0] == shapes[-1]
    assert not [op.name for op in graph.ops if turn in op.name]
