"""Which modules a loss function uses: found in what its code names, so that they are set back and compared."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn

import remat
import remat.torch
from remat.running.workload import NotAStep
from remat.torch.used_modules import used_modules

model, other = nn.Linear(4, 4), nn.Linear(4, 4)
namespace = types.SimpleNamespace(model=nn.Linear(4, 4), other=nn.Linear(4, 4))
several = [nn.Linear(4, 4), nn.Linear(4, 4)]


def of_a_global(x):
    return model(x).square().mean()


def of_another_function(x):
    return of_a_global(x) * 2


def of_a_namespace(x):
    return namespace.model(x).square().mean()


def of_a_list(x):
    return sum(one(x).square().mean() for one in several)


class Trainer:
    def __init__(self):
        self.model, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)

    def loss(self, x):
        return self.result(x).square().mean()

    def result(self, x):
        return self.model(x)

    def __call__(self, x):
        return self.loss(x)


def closing_over(module):
    def loss(x):
        return module(x).square().mean()

    return loss


trainer = Trainer()
CASES = {
    "a module": (model, [model]),
    "a closure": (closing_over(other), [other]),
    "an object in a closure": (closing_over(trainer.result), [trainer.model]),
    "a global name": (of_a_global, [model]),
    "a function that is called": (of_another_function, [model]),
    "a namespace": (of_a_namespace, [namespace.model]),
    "a list": (of_a_list, several),
    "a method of a module": (other.forward, [other]),
    "a method of an object": (trainer.loss, [trainer.model]),
    "an object that is called": (trainer, [trainer.model]),
    "a partial function": (functools.partial(lambda module, x: module(x), other), [other]),
    "a lambda": (lambda x: trainer.model(x).mean(), [trainer.model]),
    "nothing": (torch.sin, []),
}


@pytest.mark.parametrize("name", CASES)
def test_found_in(name):
    function, expected = CASES[name]
    assert used_modules(function) == expected


def test_arguments_count():
    assert used_modules(torch.sin, [[model], 3.0], {"heads": {"one": other}}) == [model, other]


def test_a_name_that_is_not_filled_yet():
    def loss(x):
        return late(x)

    assert used_modules(loss) == []
    late = model
    assert used_modules(loss) == [late]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_a_global_name_holds_is_compared(mode):
    """Gradients that were not seen stayed from step to step, counted twice in the measured peak, and passed unseen."""
    result = remat.torch.check(of_a_global, torch.randn(256, 4), budget="1MiB", steps=2, mode=mode)
    assert result.passed
    assert {"gradients", "weights"} <= {one.what for one in result.comparisons}


def test_a_check_that_would_compare_nothing_is_refused():
    weight = torch.randn(4, 4, requires_grad=True)

    def loss(x, source=lambda: weight):
        return (x @ source()).mean()

    with pytest.raises(NotAStep, match="no gradient would be compared"):
        remat.torch.check(loss, torch.randn(8, 4), budget="100%", mode="eager")
