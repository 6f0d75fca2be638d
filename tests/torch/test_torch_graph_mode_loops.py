"""Graph mode in loops as users write them: weights, buffers and random state are plain training's to the bit."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import QUICK, made_again_once
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import remat.torch

pytestmark = pytest.mark.usefixtures("no_compiled_code")


class Training:
    """A small model in training.

    Args:
        compiled: makes what runs of a loss function.
    """

    def __init__(self, compiled: Callable[..., Any] = lambda loss_fn: loss_fn) -> None:
        torch.manual_seed(3)
        layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1)]
        self.model = nn.Sequential(*layers, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))
        self.loss_fn = compiled(self.loss_of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.seen: list[Any] = []

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)

    def loss(self, rows: int = 128) -> torch.Tensor:
        loss = self.loss_fn(torch.randn(rows, 16), torch.randint(5, (rows,)))
        self.seen.append(loss.detach().clone())
        return loss

    def step(self, rows: int = 128) -> None:
        self.loss(rows).backward()
        self.update()

    def update(self) -> None:
        self.seen += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def outcome(self) -> list[Any]:
        return [*self.seen, *self.model.state_dict().values(), torch.get_rng_state()]


def twice(loop: Callable[[Training], None], compiled: Callable[..., Any]) -> Training:
    """Run a loop plainly and planned, compare all that comes of it, and return the planned training."""
    plain, planned = Training(), Training(compiled)
    for one in (plain, planned):
        torch.manual_seed(5)
        loop(one)
        one.seen = one.outcome
    assert len(plain.seen) == len(planned.seen)
    for ours, expected in zip(planned.seen, plain.seen, strict=True):
        assert ours is expected or torch.equal(ours, expected)
    assert all(plan.mode == "graph" for plan in planned.loss_fn.plans)
    return planned


def accumulation(training: Training) -> None:
    for _ in range(2):
        for rows in (128, 128, 64):
            (training.loss(rows) / 3).backward()
        training.update()


def evaluation_between_steps(training: Training) -> None:
    for _ in range(2):
        training.step()
        training.model.eval()
        with torch.no_grad():
            training.loss(32)
        with torch.inference_mode():
            training.loss(32)
        training.step()  # In evaluation mode, for the statistics to stay.
        training.model.train()


def state_saved_and_loaded(training: Training) -> None:
    training.step()
    saved = io.BytesIO()
    torch.save((training.model.state_dict(), training.optimizer.state_dict()), saved)
    training.step()
    saved.seek(0)
    for one, state in zip((training.model, training.optimizer), torch.load(saved), strict=True):
        one.load_state_dict(state)
    training.step()


def schedules_and_clipping(training: Training) -> None:
    schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 0.1, total_steps=5)
    for _ in range(4):
        training.loss().backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
        training.update()
        schedule.step()


def a_scaled_loss_under_autocast(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.loss()
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_value_(training.model.parameters(), 0.01)
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad(set_to_none=False)


def parameters_replaced(training: Training) -> None:
    training.optimizer = torch.optim.SGD(training.model.parameters(), 0.1)
    training.step()
    for parameter in training.model.parameters():
        parameter.data = 1.1 * parameter.data
    training.step()
    training.model[-1].weight = nn.Parameter(0.1 * torch.randn(5, 16))
    training.step()
    training.model[-1] = nn.Linear(16, 5)
    training.step()
    training.model[0].requires_grad_(False)
    training.step()


def a_copied_model(training: Training) -> None:
    training.step()
    other = copy.deepcopy(training.model)
    training.step()
    training.seen += [*other.state_dict().values()]
    training.model.load_state_dict(other.state_dict(), assign=True)
    training.step()


def graphs_kept_and_parts_of_gradients(training: Training) -> None:
    loss = training.loss()
    loss.backward(retain_graph=True)
    loss.backward(torch.tensor(2.5))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    training.update()
    training.seen += torch.autograd.grad(training.loss(), [training.model[0].weight])
    training.loss().backward(inputs=[training.model[-1].weight])
    training.update()


def hooks_that_come_and_go(training: Training) -> None:
    """Each is noticed also where steps were captured before."""
    training.step()
    handle = training.model[-1].register_forward_hook(lambda module, args, result: 0.5 * result)
    training.step()
    handle.remove()
    training.step()
    training.model[4].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    training.step()
    training.model[0].weight.register_hook(lambda gradient: 2 * gradient)
    training.model[4].weight.register_post_accumulate_grad_hook(lambda p: training.seen.append(p.grad.clone()))
    training.step()


def hooks_that_are_not_registered_with_the_module(training: Training) -> None:
    """Global ones, one written into a module's own dictionary, and a whole dictionary put in the place of another."""
    tanh = training.model[5]
    training.step()
    handle = register_module_forward_hook(lambda module, args, result: 2 * result if module is tanh else None)
    training.step()
    handle.remove()
    training.step()
    tanh._forward_hooks[-1] = lambda module, args, result: 3 * result
    training.step()
    without, tanh._forward_hooks = tanh._forward_hooks, OrderedDict()
    training.step()
    tanh._forward_hooks = without
    training.step()


def a_module_with_hooks_in_the_place_of_another(training: Training) -> None:
    training.step()
    hooked = nn.Tanh()
    hooked.register_forward_hook(lambda module, args, result: 3 * result)
    own, training.model[5] = training.model[5], hooked
    training.step()
    training.model[5] = own
    training.step()


@pytest.mark.parametrize(
    "loop",
    [
        accumulation,
        evaluation_between_steps,
        state_saved_and_loaded,
        schedules_and_clipping,
        a_scaled_loss_under_autocast,
        parameters_replaced,
        a_copied_model,
        graphs_kept_and_parts_of_gradients,
        hooks_that_come_and_go,
        hooks_that_are_not_registered_with_the_module,
        a_module_with_hooks_in_the_place_of_another,
    ],
)
def test_a_loop_is_plain_training_to_the_bit(loop, under):
    def compiled(loss_fn: Callable[..., Any]) -> Any:
        return under(loss_fn, made_again_once)

    assert twice(loop, compiled).loss_fn.plan.recomputed > 0


def test_gradients_of_gradients_are_refused_with_a_way_out():
    """That a graph of the gradients is asked for is no error yet; an eager plan differentiates it."""

    def loop(training: Training) -> None:
        training.seen += torch.autograd.grad(training.loss(), [training.model[0].weight], create_graph=True)
        training.loss().backward(retain_graph=True)
        training.update()

    planned = twice(loop, lambda loss_fn: remat.torch.compile(loss_fn, budget="90%", backend="aten", **QUICK))
    (gradient,) = torch.autograd.grad(planned.loss(), [planned.model[0].weight], create_graph=True)
    with pytest.raises(remat.UnsupportedStep, match="differentiated again") as caught:
        gradient.square().sum().backward()
    assert "remat.torch.apply" in str(caught.value)
    assert 'mode="eager"' in str(caught.value)
    planned.step()

    def penalty(training: Training) -> None:
        (gradient,) = torch.autograd.grad(training.loss(), [training.model[0].weight], create_graph=True)
        (training.loss() + gradient.square().sum()).backward()
        training.update()

    eager = partial(remat.torch.limit_memory, budget="90%", mode="eager", **QUICK)
    plain, limited = Training(), Training(eager)
    for one in (plain, limited):
        torch.manual_seed(5)
        penalty(one)
    assert all(map(torch.equal, plain.outcome, limited.outcome))


def test_hooks_are_looked_for_where_captured_code_has_looked():
    """A module in a list, one inside of another, one that is itself a step; a module that is not called has a hook."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(8, 1)
            self.layers[2].register_forward_hook(lambda module, args, result: 7 * result)
            object.__setattr__(self, "scale", nn.Softplus())

        def forward(self, x):
            for layer in self.layers[:2]:
                x = layer(x)
            return self.scale(self.head(x)).mean()

    model, x = Model(), torch.randn(4, 8)
    loss_fn = remat.torch.compile(model, budget="100%", backend="aten", **QUICK)
    before = loss_fn(x).item()
    assert before == loss_fn(x).item() == model(x).item()
    assert len(loss_fn.plans) == 1
    for module in (model.layers[1][1], model.layers[0], model.head, model.scale, model):
        handle = module.register_forward_hook(lambda module, args, result: 3 * result)
        assert loss_fn(x).item() == model(x).item() != before
        handle.remove()
        assert loss_fn(x).item() == before
    assert len(loss_fn.plans) == 6


def test_a_batch_that_fails_says_nothing_about_others(caplog):
    """The function's own error is raised, and later steps are captured as ever."""

    def loop(training: Training) -> None:
        with pytest.raises(RuntimeError, match=r"shapes|reduction dim"):
            training.loss_fn(torch.randn(4, 7), torch.zeros(4, dtype=torch.long))
        training.step()
        with pytest.raises(RuntimeError, match=r"shapes|reduction dim"):
            training.loss_fn(torch.randn(4, 7), torch.zeros(4, dtype=torch.long))
        training.step(64)

    with caplog.at_level(logging.WARNING, "remat"):
        planned = twice(loop, lambda loss_fn: remat.torch.compile(loss_fn, budget="90%", backend="aten", **QUICK))
    assert len(planned.loss_fn.plans) == 2
    assert planned.loss_fn.reason is None
    assert not [record for record in caplog.records if record.name == "remat"]


def test_a_small_batch_whose_share_is_too_little_gets_the_bytes_of_an_earlier_one():
    def loop(training: Training) -> None:
        for rows in (512, 3, 512):
            training.step(rows)

    planned = twice(loop, lambda loss_fn: remat.torch.compile(loss_fn, budget="75%", backend="aten", **QUICK))
    whole, small = planned.loss_fn.plans
    assert small.budget_bytes == whole.budget_bytes
    assert not small.recomputed
    # A budget in bytes, and the first plan of all, are refused as ever.
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(remat.InfeasibleBudget))
        Training(lambda loss_fn: remat.torch.compile(loss_fn, budget="30%", backend="aten", **QUICK)).step(3)
