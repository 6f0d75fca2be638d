"""Graph mode where autograd adds up what comes of several calls, pieces or code outside: eager PyTorch to the bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Tokens, tokens
from steps import QUICK
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat
import remat.torch
from remat.torch import _backward_pass
from remat.torch.graph_mode import contributions

ONE, OTHER = tokens(0, rows=512), tokens(1, rows=448)


def once(loss, module):
    loss(*ONE).backward()


def twice(loss, module):
    (loss(*ONE) + loss(*OTHER)).backward()


def three_times(loss, module):
    (loss(*ONE) + loss(*OTHER) * 3 + loss(*ONE).square()).backward()


def with_a_regulariser_behind(loss, module):
    (loss(*ONE) + 0.1 * module.embed.weight.square().sum()).backward()


def with_a_regulariser_in_front(loss, module):
    value = 0.1 * module.embed.weight.square().sum()
    (value + loss(*ONE)).backward()


def twice_with_a_graph_that_stays(loss, module):
    value = loss(*ONE) + loss(*OTHER)
    value.backward(retain_graph=True)
    value.backward()


def one_behind_the_other(loss, module):
    first, second = loss(*ONE), loss(*OTHER)
    first.backward()
    second.backward()


def handed_out(loss, module):
    found = torch.autograd.grad(loss(*ONE) + loss(*OTHER), list(module.parameters()))
    for parameter, gradient in zip(module.parameters(), found, strict=True):
        parameter.grad = gradient


def beside_a_call_that_is_dropped(loss, module):
    dropped = loss(*OTHER)
    loss(*ONE).backward()
    del dropped


WAYS = (
    once,
    twice,
    three_times,
    with_a_regulariser_behind,
    with_a_regulariser_in_front,
    twice_with_a_graph_that_stays,
    one_behind_the_other,
    handed_out,
    beside_a_call_that_is_dropped,
)


class Recurrent(nn.Module):
    """A weight that is read at six places, one of them twice by a single operator."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        x = self.embed(x)
        for _ in range(4):
            x = torch.tanh(x @ self.weight)
        return torch.cat([x, x @ (self.weight * self.weight), x, x[:, :2]], 1)


class Scaled(nn.Module):
    """What comes straight through a sum has one part, though it is a sum itself; and two parameters share gradients."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 50)
        self.scale, self.shift = nn.Parameter(torch.randn(50)), nn.Parameter(torch.randn(50))

    def forward(self, x):
        x = self.embed(x)
        scale = 1.0 + self.scale
        both = self.scale + self.shift
        x = torch.sin(x * scale) * scale
        return (x + both) * both + self.shift.exp() * x


@pytest.mark.parametrize("make", [Tokens, Recurrent, Scaled])
def test_gradients_are_added_up_in_eager_order(make):
    torch.manual_seed(0)
    module = make()
    plainly = lambda x, y: nn.functional.cross_entropy(module(x), y)  # noqa: E731
    captured = remat.torch.compile(plainly, budget="75%", backend="aten", **QUICK)
    found = []
    for loss in (plainly, captured):
        for train in WAYS:
            torch.manual_seed(0)
            train(loss, module)
            found.append({name: parameter.grad for name, parameter in module.named_parameters()})
            module.zero_grad()
    assert {plan.mode for plan in captured.plans} == {"graph"}
    for train, plain, planned in zip(WAYS, found[: len(WAYS)], found[len(WAYS) :], strict=True):
        assert {name for name in plain if not torch.equal(plain[name], planned[name])} == set(), train.__name__


def test_a_step_alone_hands_over_sums(monkeypatch):
    """The parts of a gradient go to autograd only where it adds others to them."""
    asked = []
    is_due = contributions.Apart.is_due
    monkeypatch.setattr(contributions.Apart, "is_due", lambda self: asked.append(is_due(self)) or asked[-1])
    module = Tokens()
    loss = lambda x, y: nn.functional.cross_entropy(module(x), y)  # noqa: E731
    captured = remat.torch.compile(loss, budget="100%", backend="aten", **QUICK)
    once(captured, module)
    beside_a_call_that_is_dropped(captured, module)
    assert asked == [False, False]
    twice(captured, module)
    assert asked == [False, False, True, True]


def test_pieces_add_up_in_eager_order():
    """A step in pieces, which read one weight, and what the first piece returns at several places each."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(32, 32) / 8)
    x = torch.randn(64, 32)

    def loss_fn(x):
        y = torch.tanh(torch.tanh(x @ weight) @ weight)
        if int(torch.unique(y.detach() > 0.1).numel()) > 1:
            y = y * y.exp() + y @ weight
        z = torch.tanh(y @ weight)
        if float(z.detach().sum()) > 1e9:
            z = z * 2
        return (z * y + y.square()).mean() + (weight * y[:32]).sum()

    loss_fn(x).backward()
    plain, weight.grad = weight.grad, None
    captured = remat.torch.compile(loss_fn, budget="75%", backend="aten", **QUICK)
    captured(x).backward()
    assert len(captured.plans) > 1
    assert torch.equal(plain, weight.grad)


def test_both_calls_of_a_step_count_for_an_early_update():
    found = []
    for levers in (("recompute",), ("recompute", "update")):
        torch.manual_seed(0)
        module = Tokens()
        optimizer = torch.optim.Adam(module.parameters(), 0.01)
        loss = remat.torch.compile(
            lambda x, y: nn.functional.cross_entropy(module(x), y),  # noqa: B023
            budget="100%",
            backend="aten",
            optimizer=optimizer,
            levers=levers,
            **QUICK,
        )
        for _ in range(2):
            twice(loss, module)
            optimizer.step()
            optimizer.zero_grad()
        found.append([parameter.detach().clone() for parameter in module.parameters()])
    assert loss.plan.update.moved > 0
    assert all(map(torch.equal, *found))


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_what_comes_from_outside_to_a_reducer_is_refused():
    module = DistributedDataParallel(Tokens())
    loss = lambda x, y: nn.functional.cross_entropy(module(x), y)  # noqa: E731
    captured = remat.torch.compile(loss, budget="100%", backend="aten", **QUICK)
    twice(captured, module)
    with pytest.raises(remat.UnsupportedStep, match="from the captured function and from code outside of it"):
        with_a_regulariser_in_front(captured, module.module)


def test_the_gradients_that_meet_are_counted():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    z = x * x + y
    seen = []
    z.register_hook(lambda _: seen.append(Counter(_backward_pass.backward_pass().edges)))
    with _backward_pass.counted_gradients() as counts:
        torch.autograd.grad((z * z).sum(), [x, y, z])
    assert counts == [2, 1, 2]
    assert [seen[0][id(one)] for one in (x, y)] == [2, 1]
    assert _backward_pass.backward_pass() is None
