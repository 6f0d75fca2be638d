"""A second run of a random operator draws what the first did, and changes nobody else's draws."""

from __future__ import annotations

import pytest
import torch
from steps import planned, run
from torch import nn
from torch_models import Case, mlp

import remat.torch
from remat.core.schedule import recomputed_ops
from remat.torch.trace import draws, op_facts

aten = torch.ops.aten
X = torch.randn(64, 64)


def seeded():
    generator = torch.Generator()
    generator.manual_seed(3)
    return generator


CALLS = {
    "its own generator": (aten.bernoulli_.float, (X, 0.5), {}),
    "by place": (aten.rrelu_with_noise.default, (X, X.clone(), 0.1, 0.3, True, None), {}),
    "a given generator": (aten.randperm.generator, (64,), {"generator": seeded()}),
    "the default one": (aten.native_dropout.default, (X, 0.5, True), {}),
    "no tensor": (aten.randn.default, ([64],), {}),
    "shape of a tensor": (aten.rand_like.default, (X,), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_again(name):
    func, args, kwargs = CALLS[name]
    args = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in args)
    assert op_facts.is_random(func, args, kwargs)
    assert op_facts.may_repeat(func, args, kwargs, on_gpu=False)
    noted = draws.note(func, args, kwargs)
    first = func(*args, **kwargs)
    first = [one.clone() for one in (first if isinstance(first, tuple) else (first,))]
    func(*args, **kwargs)
    state = torch.get_rng_state()
    again = noted.again(func, list(args), kwargs)
    assert all(torch.equal(a, b) for a, b in zip(first, again if isinstance(again, tuple) else (again,), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_keeps_its_randomness_elsewhere_is_not_repeated():
    """cuDNN's recurrent layers draw from a state that an operator made, and that each call moves on."""
    for func in (aten._cudnn_rnn.default, aten._cudnn_init_dropout_state.default, aten.alpha_dropout.default):
        assert not draws.may_draw_again(func, (X,), {})
        assert not op_facts.may_repeat_draw(func)
    assert op_facts.may_repeat_draw(aten.native_dropout.default)
    assert not op_facts.may_repeat_draw(aten.bernoulli_.float)
    assert not draws.may_draw_again(aten.randn.default, ([2],), {"device": "mps"})


def test_each_gpu_has_its_default_generator(monkeypatch):
    generators = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert draws.default_generator(torch.device("cuda:0")) is generators[0]
    assert draws.default_generator(torch.device("cuda")) is generators[1]
    assert draws.default_generator(torch.device("cpu")) is torch.default_generator


class NativeDropout(nn.Module):
    """Dropout as on a GPU: one operator, without an argument for a generator."""

    def forward(self, x):
        return torch.native_dropout(x, 0.3, True)[0]


def dropped():
    module = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh(), NativeDropout())))
    return Case(module, lambda x: module(x).square().mean(), (torch.randn(128, 64),))


def test_a_plan_repeats_draws_from_the_default_generator():
    case = dropped()
    applied = planned(case)
    assert any("native_dropout" in applied.plan.graph.ops[op].kind for op in recomputed_ops(applied.plan.schedule))
    assert run(case, applied).same_as(run(case))
    assert applied.departures == 0


def test_recompute_repeats_draws_from_the_default_generator():
    case = dropped()
    again = Case(case.module, lambda x: remat.torch.recompute(case.module)(x).square().mean(), case.args)
    assert run(again).same_as(run(case))


@pytest.mark.parametrize("case", [dropped, lambda: mlp(6, dropout=0.3)], ids=["default", "in place"])
def test_a_draw_that_cannot_be_noted_is_kept(case, monkeypatch):
    """As while a CUDA graph is captured."""
    case = case()
    applied, plain = planned(case), run(case)
    monkeypatch.setattr(draws, "note", lambda func, args, kwargs: None)
    assert run(case, applied).same_as(plain)
