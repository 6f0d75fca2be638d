"""A model of PyTorch for the zoo: a module and a batch, its heap counted from outside of PyTorch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

import remat.torch
from benchmarks.zoo.frame.subject import Array, Prepared, Subject

CHECKPOINTING: Final = "the library's checkpointing"


def environment() -> dict[str, str]:
    """What a process that measures needs: one thread, since processor time is compared, and the counter of its heap."""
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LD_PRELOAD": str(_library())}


@functools.cache
def _library() -> Path:
    """The counter, compiled.

    Raises:
        FileNotFoundError: where there is no C compiler called cc.
    """
    target = Path(tempfile.mkdtemp()) / "heap.so"
    source = Path(__file__).with_name("heap.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(target), "-ldl"], check=True)
    return target


@functools.cache
def _heap() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.heap_in_use.restype = library.heap_most.restype = ctypes.c_long
    return library


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
        heap = _heap()
        before = heap.heap_in_use()
        heap.heap_start_again()
        with _listening() as said:
            step()
        return Prepared(
            peak_bytes=heap.heap_most() - before + self._resident_bytes(),
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


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """What remat warns of meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("remat")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
