"""``recompute``: equal to plain PyTorch to the bit, at less memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from steps import peak_bytes, planned, run
from torch import nn
from torch_models import Case

import remat.torch
from remat.torch.emit import recipes


class Block(nn.Module):
    """BatchNorm, dropout, activations in place, and a residual."""

    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.ReLU(True),
            nn.Dropout(0.2),
            nn.Linear(4 * width, width),
        )

    def forward(self, x, *, scale=1.0):
        y = self.body(x)
        y += x
        return F.gelu(y) * scale


def case(blocks=4, batch=256):
    module = nn.Sequential(*[Block() for _ in range(blocks)])
    return Case(module, lambda x: module(x).square().mean(), (torch.randn(batch, 64),))


def test_modules_equal_to_the_bit_at_less_memory():
    plain_peak = peak_bytes(case())
    plain = case()
    expected = run(plain)
    for block in plain.module:
        assert remat.torch.recompute(block) is block

    assert run(plain).same_as(expected)
    assert int(run(plain).buffers["0.body.1.num_batches_tracked"]) == 1
    assert peak_bytes(plain) < 0.6 * plain_peak


def test_a_function_with_closures_keywords_and_several_results():
    weight = torch.randn(32, 32, requires_grad=True)

    def f(x, *, flag, other=None):
        y = torch.relu_(x @ weight).exp()
        return (y.sin(), [y.sum(), other]) if flag else y

    x = torch.randn(16, 32, requires_grad=True)
    for function in (f, remat.torch.recompute(f)):
        a, (b, none) = function(x, flag=True)
        assert none is None
        (a.sum() + b).backward()
        if function is f:
            expected, x.grad = (x.grad, weight.grad.clone()), None
            weight.grad = None
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_a_class_and_what_runs_once():
    calls = []

    @remat.torch.recompute
    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x).tanh()

    layer = Counted(4, 4)
    layer(torch.randn(2, 4)).sum().backward()
    assert calls == [1]
    assert layer.weight.grad is not None


def test_written_after_it_was_saved_or_read():
    def f(x):
        y = x.exp()
        z = y.sum(0)
        y.mul_(0.5)
        return y.sin() + z

    x = torch.randn(8, 8, requires_grad=True)
    # Plain PyTorch refuses: exp saved what was overwritten.
    for function in (f, remat.torch.recompute(f)):
        with pytest.raises(RuntimeError, match=r"in-?place"):
            function(x).sum().backward()

    def g(x):
        y = x * 3
        z = y.sum(0)
        y.mul_(0.5)
        return y.sin() + z.exp()

    plain, ours = (torch.autograd.grad(h(x).sum(), x)[0] for h in (g, remat.torch.recompute(g)))
    assert torch.equal(plain, ours)


def test_a_parameter_that_changes_before_the_backward_pass_is_refused():
    layer = nn.Linear(8, 8)
    loss = remat.torch.recompute(layer)(torch.randn(4, 8, requires_grad=True)).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        loss.backward()


def test_graph_kept_and_second_derivatives():
    def f(x):
        return (x.sin() * x).exp().tanh()

    x = torch.randn(8, 8, requires_grad=True)
    results = []
    for function in (f, remat.torch.recompute(f)):
        y = function(x).sum()
        first = torch.autograd.grad(y, x, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), x, retain_graph=True)[0]
        results.append((first, second, torch.autograd.grad(y, x)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_under_a_plan():
    blocks = case(6)
    expected = run(blocks)
    for block in blocks.module[:2]:
        remat.torch.recompute(block)
    applied = planned(blocks)
    assert run(blocks, applied).same_as(expected)
    assert applied.departures == 0


def test_it_can_be_switched_off(monkeypatch):
    runs = []
    monkeypatch.setattr(
        recipes.Recipe, "run", lambda self, others, run=recipes.Recipe.run: (runs.append(self), run(self, others))[1]
    )
    x = torch.randn(8, 8, requires_grad=True)
    f = remat.torch.recompute(lambda x: x.sin().exp())
    for setting, is_on in (("0", False), ("1", True)):
        monkeypatch.setenv("REMAT_RECOMPUTE", setting)
        runs.clear()
        f(x).sum().backward()
        assert bool(runs) == is_on


def test_what_it_does_not_take():
    with pytest.raises(TypeError, match="function or a"):
        remat.torch.recompute(3)
    with pytest.raises(TypeError, match="function or a"):
        remat.torch.recompute(dict)


@pytest.mark.parametrize("reader", [lambda h, weight: h @ weight, lambda h, weight: h.sin()], ids=["product", "sine"])
def test_what_is_read_between_two_writes_is_kept(reader):
    """No recipe leads to a tensor that was written to, read, and written to again; what was read has to be there."""
    weight = torch.randn(64, 64)
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)

    def f(x):
        h = layer(x)
        first = (h + 1).tanh()
        with torch.no_grad():
            h.data.add_(1)
            second = reader(h, weight)
        again = second.requires_grad_().tanh()
        with torch.no_grad():
            h.data.mul_(3)
        return (first * again).sum()

    f(x).backward()
    wanted = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad(set_to_none=True)
    remat.torch.recompute(f)(x).backward()
    assert all(torch.equal(p.grad, one) for p, one in zip(layer.parameters(), wanted, strict=True))
