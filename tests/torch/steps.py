"""Schedules that need no planner, a plain step and a planned one, and their comparison to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch_models import Case

import remat.torch
from remat.core.plan import plan_for_schedule
from remat.planning.checkpoints import plan_with_checkpoints

# A method that ends by itself. Budgets that it cannot keep cost seconds, in which the smallest peak is sought.
QUICK = {"planner": "peak_greedy", "time_limit_s": 0.2}


def made_again_once(graph):
    """A plan that keeps nothing of the forward pass and makes each storage again once, before its first reader."""
    last = max(index for index, op in enumerate(graph.ops) if op.phase == "forward")
    return plan_with_checkpoints(graph, (), last)


def made_again_at_every_read(graph):
    """A plan that makes each storage again, from the start of the model, before every op of the backward pass."""
    forward = [(index, op) for index, op in enumerate(graph.ops) if op.phase == "forward" and op.recomputable]
    makers = {tensor: index for index, op in forward for tensor in op.outputs}
    schedule = []
    for index, op in enumerate(graph.ops):
        if op.phase == "backward":
            needed, waiting = set(), list(op.inputs)
            while waiting:
                maker = makers.get(waiting.pop())
                if maker is not None and maker not in needed:
                    needed.add(maker)
                    waiting += graph.ops[maker].inputs
            schedule += sorted(needed)
        schedule.append(index)
    return plan_for_schedule(graph, tuple(schedule), planner="by hand")


def planned(case, schedule=made_again_once):
    """A case under one of the schedules above."""
    graph = remat.torch.trace(case.loss, *case.args)
    plan = remat.torch.plan(case.loss, *case.args, plan=schedule(graph))
    assert plan.recomputed > 0
    return remat.torch.apply(plan)


def check(case, schedule=made_again_once):
    """Compare a case under one of the schedules above with its plain step."""
    applied = planned(case, schedule)
    assert run(case, applied).same_as(run(case))
    assert applied.departures == 0
    return applied


def module_case(module, *args, loss=None):
    """A module as a case; its loss is the mean square of its result, unless another is given."""
    return Case(module, loss or (lambda *a: module(*a).float().square().mean()), args)


@dataclass
class Outcome:
    """What a step leaves behind."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor

    def same_as(self, other: Outcome) -> bool:
        """Equal to the last bit in everything."""
        pairs = [(self.gradients, other.gradients), (self.buffers, other.buffers)]
        return (
            torch.equal(self.loss, other.loss)
            and torch.equal(self.random_state, other.random_state)
            and all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in pairs)
        )


def outcome(module: nn.Module, loss_fn: Callable[..., torch.Tensor], *args: Any, seed: int = 7) -> Outcome:
    """One step of a loss from the module's present state, which is put back."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.zero_grad()
    torch.manual_seed(seed)
    loss = loss_fn(*args)
    loss.backward()
    found = Outcome(
        loss.detach(),
        {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None},
        {name: b.clone() for name, b in module.named_buffers()},
        torch.get_rng_state(),
    )
    module.zero_grad()
    module.load_state_dict(before)
    return found


def run(case: Case, applied: remat.torch.Applied | None = None, seed: int = 7) -> Outcome:
    """One step of a case as ``outcome`` takes it; plain, or under a plan."""

    def loss_fn(*args):
        with contextlib.nullcontext() if applied is None else applied:
            return case.loss(*args)

    return outcome(case.module, loss_fn, *case.args, seed=seed)


def peak_bytes(case: Case, applied: remat.torch.Applied | None = None) -> int:
    """Measured peak of a step, plain or under a plan."""

    def planned(*args):
        if applied is None:
            return case.loss(*args)
        with applied:
            return case.loss(*args)

    case.module.zero_grad()
    return remat.torch.measure(planned, *case.args, repeats=1).peak_bytes
