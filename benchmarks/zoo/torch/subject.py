"""A model of PyTorch for the zoo: a module and a batch, its heap counted from outside of PyTorch."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

import remat.torch
from benchmarks.zoo.frame.heap import most_in
from benchmarks.zoo.frame.listening import listening
from benchmarks.zoo.frame.subject import Array, Prepared, Subject

CHECKPOINTING: Final = "the library's checkpointing"

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

    Args:
        make: builds the module; random weights come from a fixed seed.
        batch: what the loss reads, the labels among it.
        loss: of the module and the batch.
        checkpointing: the library's own.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        batch: Mapping[str, Any],
        loss: Loss = own_loss,
        checkpointing: Switch = transformers_checkpointing,
    ) -> None:
        torch.manual_seed(0)
        self._module = make().train()
        self._batch = dict(batch)
        self._loss = loss
        self._switch = checkpointing
        self._start = {name: value.clone() for name, value in self._module.state_dict().items()}
        try:
            checkpointing(self._module, True)
            checkpointing(self._module, False)
        except (ValueError, AssertionError):  # A model without checkpointing says so, each library in its own way.
            self.peers = ()
        else:
            self.peers = (CHECKPOINTING,)

    def peer(self, method: str) -> Prepared:
        """The plain step, or the one under the library's own checkpointing."""
        return self._prepared(nullcontext, self._checkpointing if method == CHECKPOINTING else nullcontext)

    def planned(self, budget: int | str) -> Prepared:
        """The step under ``remat.torch.apply``: its first run is what ``peak_bytes`` says."""
        started = time.process_time()
        plan = remat.torch.plan(self._loss, self._module, self._batch, budget=budget)
        planning_s = time.process_time() - started
        return self._prepared(lambda: remat.torch.apply(plan), nullcontext, plan, planning_s)

    @contextlib.contextmanager
    def _checkpointing(self) -> Iterator[None]:
        self._switch(self._module, True)
        try:
            yield
        finally:
            self._switch(self._module, False)

    def _prepared(
        self,
        forward: Callable[[], AbstractContextManager[Any]],
        around: Callable[[], AbstractContextManager[Any]],
        plan: remat.Plan | None = None,
        planning_s: float = 0.0,
    ) -> Prepared:
        under = forward()

        def step() -> None:
            with around():
                with under:
                    loss = self._loss(self._module, self._batch)
                loss.backward()

        def run() -> None:
            self._from_the_start()
            step()

        def results() -> list[Array]:
            run()
            gradients = (p.grad for p in self._module.parameters() if p.grad is not None)
            return [value.detach().double().numpy().copy() for value in (*gradients, *self._module.buffers())]

        if plan is None:
            run()  # Libraries keep what they make at a first call; a plan's first run comes after a plain one.
        self._from_the_start()
        with listening() as said:
            peak_bytes = most_in(step) + self._resident_bytes()
        return Prepared(
            peak_bytes=peak_bytes,
            run=run,
            results=results,
            planning_s=planning_s,
            predicted=None if plan is None else plan.overhead,
            predicted_bytes=None if plan is None else plan.peak_bytes,
            budget_bytes=None if plan is None else plan.budget_bytes,
            said=" ".join(said),
        )

    def _from_the_start(self) -> None:
        """Weights, statistics and random numbers as at first; no gradients."""
        with torch.no_grad():
            for name, value in self._module.state_dict().items():
                value.copy_(self._start[name])
        self._module.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        gc.collect()

    def _resident_bytes(self) -> int:
        """Parameters, buffers and the batch, which were there before the step."""
        held = [*self._module.parameters(), *self._module.buffers(), *self._batch.values()]
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in held
            if isinstance(tensor, torch.Tensor)
        }
        return sum(storages.values())
