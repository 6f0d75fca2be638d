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


class TorchModel(Subject):
    """A module of a library.

    Args:
        make: builds the module; random weights come from a fixed seed.
        batch: its keyword arguments, the labels among them.
    """

    def __init__(self, make: Callable[[], Any], batch: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self._module = make().train()
        self._batch = dict(batch)
        self._start = {name: value.clone() for name, value in self._module.state_dict().items()}
        has_one = getattr(self._module, "supports_gradient_checkpointing", False)
        self.peers = (CHECKPOINTING,) if has_one else ()

    def peer(self, method: str) -> Prepared:
        """The plain step, or the one under the library's own checkpointing."""
        return self._prepared(nullcontext, self._checkpointing if method == CHECKPOINTING else nullcontext)

    def planned(self, budget: int | str) -> Prepared:
        """The step under ``remat.torch.apply``: its first run is what ``peak_bytes`` says."""
        started = time.process_time()
        plan = remat.torch.plan(_loss, self._module, self._batch, budget=budget)
        planning_s = time.process_time() - started
        return self._prepared(lambda: remat.torch.apply(plan), nullcontext, plan, planning_s)

    @contextlib.contextmanager
    def _checkpointing(self) -> Iterator[None]:
        self._module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            yield
        finally:
            self._module.gradient_checkpointing_disable()

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
                    loss = _loss(self._module, self._batch)
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


def _loss(module: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = module(**batch).loss
    return loss
