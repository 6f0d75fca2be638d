"""A model of PyTorch for the zoo: a module and a batch, its heap counted from outside of PyTorch."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

import remat.torch
from benchmarks.zoo.frame.heap import most_in
from benchmarks.zoo.frame.listening import listening
from benchmarks.zoo.frame.subject import Array, Prepared, Subject

CHECKPOINTING: Final = "the library's checkpointing"

MODE: Final = "REMAT_ZOO_MODE"
"""The variable that says how plans are carried out: "auto" or "eager"."""

FIRST_STEPS: Final = 2
"""Steps before the one that is measured: one that captures and plans, one that plans again where the first took more
than its budget."""

Loss = Callable[[Any, Mapping[str, Any]], torch.Tensor]
"""The scalar loss of a module and a batch."""

Switch = Callable[[Any, bool], None]
"""Turns a library's own checkpointing of a module on or off; raises where the module has none."""


def own_loss(module: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss that models of transformers make themselves."""
    loss: torch.Tensor = module(**batch).loss
    return loss


def transformers_checkpointing(module: Any, on: bool) -> None:
    """Checkpointing of transformers: each layer of a stack.

    Raises:
        ValueError: the model has none.
    """
    if not getattr(module, "supports_gradient_checkpointing", False):
        raise ValueError("no checkpointing")
    if on:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        module.gradient_checkpointing_disable()


class TorchModel(Subject):
    """A module of a library.

    Its plans' predictions know nothing of the pages that glibc gives back and fetches anew, up to 13 % of a plain step.

    Attributes:
        module: with its random weights, in training mode.
        batch: what the loss reads.
        loss: of the module and the batch.

    Args:
        make: builds the module; random weights come from a fixed seed.
        batch: what the loss reads, the labels among it.
        loss: of the module and the batch.
        checkpointing: the library's own.
    """

    predicts_pages = False

    def __init__(
        self,
        make: Callable[[], Any],
        batch: Mapping[str, Any],
        loss: Loss = own_loss,
        checkpointing: Switch = transformers_checkpointing,
    ) -> None:
        torch.manual_seed(0)
        self.captures = os.environ[MODE] != "eager"
        self.module = make().train()
        self.batch = dict(batch)
        self.loss = loss
        self._switch = checkpointing
        self._start = {name: value.clone() for name, value in self.module.state_dict().items()}
        try:
            checkpointing(self.module, True)
            checkpointing(self.module, False)
        except (ValueError, AssertionError):  # A model without checkpointing says so, each library in its own way.
            self.peers = ()
        else:
            self.peers = (CHECKPOINTING,)

    def peer(self, method: str) -> Prepared:
        """The plain step, or that of a copy of the module under the library's own checkpointing.

        Modules hold what checkpoints them, so that one module turned to and fro is another to graph mode each time.
        """
        if method != CHECKPOINTING:
            return self._prepared(self.module)
        module = copy.deepcopy(self.module)
        self._switch(module, True)
        return self._prepared(module)

    def planned(self, budget: int | str) -> Prepared:
        """The step under ``limit_memory`` once it is captured, or the first one under ``apply``."""
        started = time.process_time()
        if not self.captures:
            plan = remat.torch.plan(self.loss, self.module, self.batch, budget=budget)
            planning_s = time.process_time() - started
            applied = remat.torch.apply(plan)

            def loss_under_plan() -> torch.Tensor:
                with applied:
                    return self.loss(self.module, self.batch)

            return self._prepared(self.module, loss_under_plan, plan, planning_s)
        step = remat.torch.limit_memory(functools.partial(self.loss, self.module, self.batch), budget)
        with listening() as said:
            for number in range(FIRST_STEPS):
                self._from_the_start(self.module)
                step().backward()
                if number == 0:
                    planning_s = time.process_time() - started
        prepared = self._prepared(self.module, step, step.plans[-1], planning_s)
        return dataclasses.replace(prepared, said=" ".join([*said, prepared.said]).strip())

    def _prepared(
        self,
        module: Any,
        loss_of: Callable[[], torch.Tensor] | None = None,
        plan: remat.Plan | None = None,
        planning_s: float = 0.0,
    ) -> Prepared:
        loss_of = loss_of or functools.partial(self.loss, module, self.batch)

        def step() -> None:
            loss_of().backward()

        def run() -> None:
            # No more than a training loop does: looking for garbage and copying weights took longer than many a step.
            module.zero_grad(set_to_none=True)
            step()

        def results() -> list[Array]:
            self._from_the_start(module)
            step()
            gradients = (p.grad for p in module.parameters() if p.grad is not None)
            return [value.detach().double().numpy().copy() for value in (*gradients, *module.buffers())]

        if plan is None:
            run()  # Libraries keep what they make at a first call; a plan's first run comes after a plain one.
        self._from_the_start(module)
        with listening() as said:
            peak_bytes = most_in(step) + self._resident_bytes(module)
        return Prepared(
            peak_bytes=peak_bytes,
            run=run,
            results=results,
            planning_s=planning_s,
            predicted=None if plan is None else plan.expected_overhead,
            predicted_bytes=None if plan is None else plan.peak_bytes,
            budget_bytes=None if plan is None else plan.budget_bytes,
            said=" ".join(said),
            mode="" if plan is None else plan.mode or "",
        )

    def _from_the_start(self, module: Any) -> None:
        """Weights, statistics and random numbers as at first; no gradients."""
        with torch.no_grad():
            for name, value in module.state_dict().items():
                value.copy_(self._start[name])
        module.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        gc.collect()

    def _resident_bytes(self, module: Any) -> int:
        """Parameters, buffers and the batch, which were there before the step."""
        held = [*module.parameters(), *module.buffers(), *self.batch.values()]
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in held
            if isinstance(tensor, torch.Tensor)
        }
        return sum(storages.values())
