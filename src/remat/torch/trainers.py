"""Trainers as people write them, within a byte budget: one line each, and off again without a trace.

::

    remat.torch.trainers.limit_memory(trainer, "4GiB")                               # Hugging Face, TRL
    Trainer(callbacks=[remat.torch.trainers.lightning_callback("4GiB")])             # Lightning
    loss_fn = remat.torch.limit_memory(loss_fn, "4GiB", optimizer=optimizer)         # Accelerate, torchrun, timm

What a trainer knows need not be said: its optimizer counts, and so do gradients that it accumulates.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from remat.core.budget import check_budget
from remat.running.plan_log import PlanLog
from remat.torch import _private
from remat.torch.api.limit import limit_memory as limit_function
from remat.torch.api.plan import StepPlan
from remat.torch.trace.watcher import is_tracing

__all__ = ["Limited", "PlanLog", "lightning_callback", "limit_memory"]


class Limited:
    """The method of a trainer that computes the loss, within a budget. Evaluation is left alone.

    Args:
        owner: the object with the method.
        name: of the method.
        budget: as ``remat.torch.plan`` takes it.
        options: makes the arguments of ``remat.torch.limit_memory`` when the first step comes.
        end: what else is to be undone when the limit is taken away.

    Attributes:
        plans: those made so far, one for each combination of shapes.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        budget: int | str,
        options: Callable[[], dict[str, Any]],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        check_budget(budget)
        self.plans: list[StepPlan] = []
        self._owner = owner
        self._name = name
        self._end = end
        self._before = vars(owner).get(name)
        own = getattr(owner, name)
        limited: Any = None

        @functools.wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal limited
            if not torch.is_grad_enabled():
                return own(*args, **kwargs)
            if limited is None:
                limited = limit_function(_counting_nothing(owner, own), budget, **options())
            found = limited(*args, **kwargs)
            self.plans = list(limited.plans)
            return found

        self._run = run
        setattr(owner, name, run)

    def remove(self) -> None:
        """Take the limit away: the method is again what it was before."""
        if vars(self._owner).get(self._name) is self._run:
            delattr(self._owner, self._name)
            if self._before is not None:
                setattr(self._owner, self._name, self._before)
        self._end()


def limit_memory(trainer: Any, budget: int | str = "60%", *, log_to: Any = None, **options: Any) -> Limited:
    """Train with a Hugging Face ``Trainer`` (or a subclass, such as TRL's) within a byte budget.

    The loss, its gradients and the optimizer's update count; so do gradients that exist already, where
    ``gradient_accumulation_steps`` is more than one. ``Trainer`` may run under ``accelerate`` or ``torchrun``, with
    DistributedDataParallel or ``fully_shard``.

    Args:
        trainer: whose ``compute_loss`` is limited.
        budget: peak device bytes of a step: an int, "4GiB", or "60%" of the plain step's own peak.
        log_to: a run of Weights & Biases, or the module ``wandb``: plans are logged there, as by ``PlanLog``.
        **options: passed on to ``remat.torch.limit_memory``. ``mode`` is "eager" unless given: the first step then
            starts sooner, and the numbers are plain training's to the bit.

    Returns:
        What was done: ``plans`` shows the plans, ``remove()`` takes the limit away.

    Raises:
        TypeError: for an object that computes no loss, or is no log.
        InvalidBudget: if the budget cannot be read.
    """
    if not callable(getattr(trainer, "compute_loss", None)):
        raise TypeError(
            f"limit_memory takes a Trainer of transformers, not {type(trainer).__name__}; for Lightning there is "
            "lightning_callback(budget), for a function that returns a loss remat.torch.limit_memory(loss_fn, budget)"
        )

    def found() -> dict[str, Any]:
        accumulates = getattr(trainer.args, "gradient_accumulation_steps", 1) > 1
        return {"mode": "eager", "optimizer": trainer.optimizer, "accumulates": accumulates, **options}

    show_metrics = _metrics_unseen(getattr(trainer, "accelerator", None))
    if log_to is None:
        return Limited(trainer, "compute_loss", budget, found, show_metrics)
    callback = _logging_class()(PlanLog(log_to))

    def end() -> None:
        trainer.remove_callback(callback)
        show_metrics()

    limited = Limited(trainer, "compute_loss", budget, found, end)
    callback.limited = limited
    trainer.add_callback(callback)
    return limited


@functools.cache
def _logging_class() -> Any:
    base: Any = importlib.import_module("transformers").TrainerCallback

    class LogPlans(base):  # type: ignore[misc]
        """Logs plans after each update."""

        def __init__(self, log: PlanLog) -> None:
            self._log = log
            self.limited: Limited | None = None

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if self.limited is not None:
                self._log(self.limited.plans)

    return LogPlans


def lightning_callback(budget: int | str = "60%", *, log_to: Any = None, **options: Any) -> Any:
    """A callback for Lightning's ``Trainer`` that keeps training steps within a byte budget.

    The loss, its gradients and the optimizer's update count; so do gradients that exist already, where
    ``accumulate_grad_batches`` is more than one. Spent gradients are let go of after the update, where Lightning would
    hold them through the next forward pass.

    Args:
        budget: peak device bytes of a step: an int, "4GiB", or "60%" of the plain step's own peak.
        log_to: a run of Weights & Biases, or the module ``wandb``: plans are logged there, as by ``PlanLog``.
        **options: passed on to ``remat.torch.limit_memory``. ``mode`` is "eager" unless given.

    Returns:
        A ``Callback``, whose ``plans`` are those made so far. The module is its own again when fitting ends.

    Raises:
        InvalidBudget: if the budget cannot be read.
        TypeError: for a log that is none.
        ValueError: when fitting begins, for a module with manual optimization, which has no step to limit.
    """
    check_budget(budget)
    return _callback_class()(budget, None if log_to is None else PlanLog(log_to), options)


@functools.cache
def _callback_class() -> Any:
    older = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    base: Any = importlib.import_module("pytorch_lightning" if older else "lightning.pytorch").Callback

    class LimitMemory(base):  # type: ignore[misc]
        """Limits ``training_step`` while the trainer fits."""

        def __init__(self, budget: int | str, log: PlanLog | None, options: dict[str, Any]) -> None:
            super().__init__()
            self._budget = budget
            self._log = log
            self._options = options
            self._limited: Limited | None = None
            self._logging: dict[str, Any] = {}
            self._updates = 0
            self.plans: list[StepPlan] = []

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            if not pl_module.automatic_optimization:
                raise ValueError(
                    f"{type(pl_module).__name__} optimizes by itself (automatic_optimization=False); limit the "
                    "function that computes its loss with remat.torch.limit_memory(loss_fn, budget)"
                )

            def found() -> dict[str, Any]:
                optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
                accumulates = trainer.accumulate_grad_batches > 1
                return {"mode": "eager", "optimizer": optimizer, "accumulates": accumulates, **self._options}

            self._logging = {"log": _unseen(pl_module.log)}
            vars(pl_module).update(self._logging)
            self._limited = Limited(pl_module, "training_step", self._budget, found)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            if self._limited is not None:
                self.plans = self._limited.plans
            if self._log is not None:
                self._log(self.plans)
            if trainer.global_step != self._updates:
                # Lightning lets go of spent gradients after the next forward pass, which could do with their memory.
                self._updates = trainer.global_step
                for optimizer in trainer.optimizers:
                    optimizer.zero_grad()

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self._end(pl_module)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._end(pl_module)

        def _end(self, pl_module: Any) -> None:
            if self._limited is not None:
                self._limited.remove()
                self._limited = None
            for name, value in self._logging.items():
                if vars(pl_module).get(name) is value:
                    delattr(pl_module, name)

    return LimitMemory


def _counting_nothing(owner: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """A method that leaves its owner's numbers as they are while it is traced: metrics, counts of tokens."""

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_tracing():
            return own(*args, **kwargs)
        before = {name: copy.deepcopy(value) for name, value in vars(owner).items() if _is_numbers(value)}
        try:
            return own(*args, **kwargs)
        finally:
            vars(owner).update(before)

    return run


def _is_numbers(value: Any) -> bool:
    """Is something a number, or does it hold nothing else?"""
    if isinstance(value, dict):
        return all(map(_is_numbers, value.values()))
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return isinstance(value, int | float)


def _metrics_unseen(accelerator: Any) -> Callable[[], None]:
    """Let a trainer gather metrics outside of plans, as TRL's do in their ``compute_loss``; returns what ends that.

    While a step is traced there are no numbers to gather, and nothing is sent: ones are in their place.
    """
    if not callable(getattr(accelerator, "gather_for_metrics", None)):
        return lambda: None
    own = accelerator.gather_for_metrics

    @functools.wraps(own)
    def gather(given: Any, *args: Any, **kwargs: Any) -> Any:
        with _private.no_modes(), torch.no_grad():
            if not is_tracing():
                return own(given, *args, **kwargs)
            processes = accelerator.num_processes

            def ones(tensor: torch.Tensor) -> torch.Tensor:
                shape = (tensor.shape[0] * processes, *tensor.shape[1:]) if tensor.dim() else (processes,)
                return torch.ones(shape if processes > 1 else tensor.shape, dtype=tensor.dtype, device=tensor.device)

            return _private.tree_map_only(torch.Tensor, ones, given)

    accelerator.gather_for_metrics = gather

    def end() -> None:
        if vars(accelerator).get("gather_for_metrics") is gather:
            del accelerator.gather_for_metrics

    return end


def _unseen(log: Callable[..., Any]) -> Callable[..., Any]:
    """What logs numbers, outside of the plan; while a step is traced there are no numbers to log."""

    @functools.wraps(log)
    def run(*args: Any, **kwargs: Any) -> None:
        if not is_tracing():
            with _private.no_modes(), torch.no_grad():
                log(*args, **kwargs)

    return run
