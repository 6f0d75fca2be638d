"""How long tensors of a step live under a plan: no longer than plain PyTorch keeps them, garbage collected or not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from steps import QUICK, peak_bytes, planned, run
from torch import nn
from torch_models import Case

import remat.torch


def normalised():
    """BatchNorm, dropout, activations in place."""
    blocks = [
        nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(True), nn.Dropout(0.2), nn.Linear(256, 64))
        for _ in range(6)
    ]
    module = nn.Sequential(*blocks)
    return Case(module, lambda x: module(x).square().mean(), (torch.randn(256, 64),))


def test_no_batch_outlives_its_step():
    """Nothing waits for Python to look for circles, which it does once in many steps."""
    blocks = normalised()
    plan = planned(blocks)

    def planned_loss(x):
        with plan:
            return blocks.loss(x)

    marked = normalised()
    for block in marked.module:
        remat.torch.recompute(block)
    captured = remat.torch.compile(normalised().loss, budget="80%", backend="aten", **QUICK)

    def held_bytes(loss_fn):
        loss_fn(torch.randn(256, 64)).backward()
        storages = {t.untyped_storage()._cdata: t for t in gc.get_objects() if isinstance(t, torch.Tensor)}
        return sum(t.untyped_storage().nbytes() for t in storages.values())

    for loss_fn in (blocks.loss, planned_loss, marked.loss, captured):
        held_bytes(loss_fn)
        gc.collect()
        gc.disable()
        try:
            assert held_bytes(loss_fn) == held_bytes(loss_fn)
        finally:
            gc.enable()


def test_what_a_library_hangs_on_a_kept_tensor_goes():
    """Keras gives a softmax its argument as an attribute, which autograd would hold as long as the result."""
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])

    def loss(x):
        for layer in layers:
            scaled = layer(x) * 2
            x = scaled.softmax(-1)
            x.scaled = scaled
            del scaled
        return x.square().sum()

    args = (torch.randn(1024, 64),)
    applied = remat.torch.apply(remat.torch.plan(loss, *args, budget="100%"))
    case = Case(layers, loss, args)
    assert peak_bytes(case, applied) == pytest.approx(applied.plan.peak_bytes, rel=0.03)
    assert run(case, applied).same_as(run(case))


def test_a_forward_pass_alone_leaves_nothing():
    """A result that autograd saves must not hold the node that saves it."""
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    made = []

    def loss(x):
        for layer in layers:
            x = layer(x).softmax(-1)
        made.append(weakref.ref(x))
        return x.square().sum()

    applied = remat.torch.apply(remat.torch.plan(loss, torch.randn(64, 64), budget="100%"))
    with applied:
        first = loss(torch.randn(64, 64))
    first.backward()  # The first step is measured.
    gc.collect()
    gc.disable()
    try:
        with applied:
            loss(torch.randn(64, 64))
        assert made[-1]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_a_captured_step_goes_with_its_last_user(backend):
    """Dynamo keeps what it was given for good: who trains one model after another must not run out of memory."""
    case = normalised()
    step = remat.torch.compile(case.loss, budget="80%", backend=backend, **QUICK)
    step(*case.args).backward()
    assert step.plan.recomputed > 0
    held = weakref.ref(case.module)
    del case, step
    gc.collect()
    assert held() is None
