"""``checkpoints=``: modules whose results are kept, in graph mode, in eager plans, and where a capture breaks."""

from __future__ import annotations

import pytest
import torch
from rank_steps import batch
from sharded_ranks import cross_entropy
from torch import nn

import remat
import remat.torch

ARGS = batch(0)


@pytest.fixture
def module():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(64, 4))


def gradients(module, loss):
    torch.manual_seed(3)
    loss(*ARGS).backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return found


def runs(plan):
    """How often the end of each block runs."""
    ends = [number for number, op in enumerate(plan.graph.ops) if op.kind in ("aten.tanh.default", "tanh")]
    return [plan.schedule.count(number) for number in ends]


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_what_the_named_modules_return_is_kept(module, mode):
    loss = lambda x, y: cross_entropy(module, x, y)  # noqa: E731
    plain = gradients(module, loss)
    found = []
    for kept in ([module[1]], [module[0], module[2], module[0]]):
        limited = remat.torch.limit_memory(loss, mode=mode, checkpoints=kept)
        for _ in range(2):
            planned = gradients(module, limited)
            assert all(torch.equal(plain[name], planned[name]) for name in plain)
        (plan,) = limited.plans
        assert plan.mode == mode
        assert plan.planner == "checkpoints"
        # Kept states of the generator, 5 kB each, are in no measurement.
        assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)
        found.append(runs(plan))
    assert found == [[2, 1, 2, 2], [1, 2, 1, 2]]
    assert not any(one._forward_hooks for one in module.modules())


def test_a_step_that_breaks_keeps_them_too(module, caplog):
    def loss(x, y):
        value = cross_entropy(module, x, y)
        torch._dynamo.graph_break()
        return value

    plain = gradients(module, loss)
    limited = remat.torch.compile(loss, backend="aten", checkpoints=[module[1]])
    planned = gradients(module, limited)
    assert all(torch.equal(plain[name], planned[name]) for name in plain)
    assert limited.plan.mode == "eager"
    assert runs(limited.plan) == [2, 1, 2, 2]


def test_bad_checkpoints_are_refused(module):
    loss = lambda x, y: cross_entropy(module, x, y)  # noqa: E731
    blocks = list(module)[:4]
    with pytest.raises(TypeError, match="takes a list of modules"):
        remat.torch.compile(loss, backend="aten", checkpoints=["blocks.0"])
    with pytest.raises(TypeError, match="takes a list of modules"):
        remat.torch.plan(loss, *ARGS, checkpoints=module[0])
    with pytest.raises(ValueError, match="budget= or checkpoints="):
        remat.torch.limit_memory(loss, "60%", checkpoints=blocks)
    with pytest.raises(ValueError, match="no other lever"):
        remat.torch.compile(loss, backend="aten", checkpoints=blocks, levers=("recompute", "split"))
    with pytest.raises(ValueError, match=r'checkpoints= .* needs backend="aten"'):
        remat.torch.compile(loss, checkpoints=blocks)
    for mode in ("graph", "eager"):
        with pytest.raises(remat.UnsupportedStep, match="a module that this step does not call"):
            remat.torch.limit_memory(loss, mode=mode, checkpoints=[nn.Linear(2, 2)])(*ARGS)
