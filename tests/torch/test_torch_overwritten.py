"""Tensors that are written to in place, before they are saved or after: the right numbers, or autograd's own error."""

from __future__ import annotations

import contextlib

import pytest
import torch
from steps import QUICK, check, module_case, planned, run
from torch import nn
from torch_models import Case, mlp

import remat
import remat.torch
from remat.planning.checkpoints import plan_with_checkpoints


def test_what_was_overwritten_is_refused_as_ever():
    x = torch.randn(64, 64, requires_grad=True)
    kept = []

    def loss(x):
        y = x.exp()
        kept[:] = [y]
        for _ in range(6):
            y = y.sin()
        return y.sum()

    applied = planned(Case(nn.Module(), loss, (x,)))
    kept.clear()
    for context in (None, applied):
        if context is None:
            value = loss(x)
        else:
            with context:
                value = loss(x)
        with torch.no_grad():
            kept[0].add_(1)
        with pytest.raises(RuntimeError, match=r"in-?place"):
            value.backward()


class Filled(nn.Module):
    """Fills tensors that PyTorch's factories made, before they are saved for the backward pass."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.factories_made = []

    def forward(self, x):
        mask = torch.zeros(64, 64)
        mask[::2] = x[::2]
        order = torch.empty(64, dtype=torch.long)
        order[torch.arange(64).flip(0)] = torch.arange(64)
        scale = torch.full((64, 64), 2.0)
        self.factories_made = [mask, scale]
        return ((self.weight * mask).exp() * scale).sin()[order]


def made_again_but_for_what_factories_make(graph):
    """A plan that keeps the results of factories, and makes everything else of the forward pass again."""
    kept = {t for op in graph.ops if op.kind in ("zeros", "empty.memory_format", "full") for t in op.outputs}
    assert len(kept) == 3
    last = max(index for index, op in enumerate(graph.ops) if op.phase == "forward")
    return plan_with_checkpoints(graph, kept, last)


def test_what_a_factory_made_may_be_filled_before_it_is_saved():
    """PyTorch's factories hand out a tensor with a version counter of its own."""
    module = Filled()
    check(module_case(module, torch.randn(64, 64)), made_again_but_for_what_factories_make)


@pytest.mark.parametrize("which", [0, 1])
def test_what_a_factory_made_is_refused_if_it_is_filled_after_the_forward_pass(which):
    module = Filled()
    case = module_case(module, torch.randn(64, 64))
    applied = planned(case, made_again_but_for_what_factories_make)
    for context in (contextlib.nullcontext(), applied):
        with context:
            value = case.loss(*case.args)
        module.factories_made[which].add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            value.backward()


def assert_changed_parameters_are_refused(case, context):
    with context:
        loss = case.loss(*case.args)
    with torch.no_grad():
        for parameter in case.module.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        loss.backward()


def test_a_parameter_that_changes_before_the_backward_pass_is_refused():
    case = mlp()
    assert_changed_parameters_are_refused(case, planned(case))


def test_what_is_kept_is_refused_too_when_it_changes():
    """With hooks PyTorch does not look at versions itself; here nothing is recomputed that could notice."""
    case = mlp(layers=4)
    applied = remat.torch.apply(remat.torch.plan(case.loss, *case.args, budget="100%", **QUICK))
    assert applied.plan.recomputed == 0
    for context in (contextlib.nullcontext(), applied):
        assert_changed_parameters_are_refused(case, context)


def test_a_write_that_the_plan_does_not_know_changes_no_number():
    switch = []
    layer = nn.Linear(64, 64)

    def loss(x):
        y = layer(x)
        z = y * 2
        for _ in range(6):
            z = z.sin()
        if switch:
            y.add_(1)
        return z.sum()

    case = Case(layer, loss, (torch.randn(64, 64),))
    applied = planned(case)
    switch.append(1)
    assert run(case, applied).same_as(run(case))
