"""Micro-batches: the gradients of a batch as the sum over its parts, one part in memory at a time.

What must hold for the result to be that of the whole batch: sums are accumulated and divided once, by the denominator
that the whole batch has; a last part that is smaller counts by its real size; the accumulator is float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from remat.core.budget import parse_budget
from remat.core.errors import UnsupportedStep
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.micro_batches.cut import count_samples
from remat.torch import _private
from remat.torch.api.apply import Applied, apply
from remat.torch.api.plan import plan
from remat.torch.trace.step import trace

REDUCTIONS: Final = ("mean", "sum", "ratio")


class MicroBatches:
    """A step that runs the forward and the backward pass of a batch part by part.

    ::

    step = remat.torch.micro_batches(loss_fn, 4, budget="4GiB")
    optimizer.zero_grad()
    loss = step(*args)          # in place of loss_fn(*args) and loss.backward()
    optimizer.step()
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        count: int,
        reduction: str,
        batch_argnums: tuple[int, ...] | None,
        budget: int | str | None,
        scaler: Any,
        no_sync: Callable[[], AbstractContextManager[Any]] | None,
        options: dict[str, Any],
    ) -> None:
        self._loss_fn = loss_fn
        self._count = count
        self._reduction = reduction
        self._batch_argnums = batch_argnums
        self._budget = budget
        self._scaler = scaler
        self._no_sync = no_sync
        self._options = options
        self._applied: dict[Any, Applied] = {}

    @property
    def plans(self) -> list[Plan]:
        """The plans made so far, one for each size of part."""
        return [applied.plan for applied in self._applied.values()]

    def __call__(self, *args: Any) -> torch.Tensor:
        """Add the gradients of the whole batch to ``grad``, as ``backward`` would; returns the batch's loss, detached.

        Raises:
            UnsupportedStep: where the arguments do not agree on the size of the batch.
            InfeasibleBudget: at the first call, if no schedule fits; it names the smallest budget.
        """
        places, samples = _batch_of(args, self._batch_argnums)
        size = -(-samples // self._count)
        starts = range(0, samples, size)
        total = _Total(self._reduction, samples, self._no_sync is not None)
        for start in starts:
            length = min(size, samples - start)
            part = [a[start : start + length] if n in places else a for n, a in enumerate(args)]
            is_last = start + length >= samples
            waits = nullcontext() if is_last or self._no_sync is None else self._no_sync()
            with waits:
                with self._context(args, part) as _:
                    value, denominator = self._parts_of(self._loss_fn(*part))
                loss = total.add(value, denominator, length)
                total.before_backward(loss)
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
                total.after_backward()
            del value, loss
        return total.finish()

    def _parts_of(self, result: Any) -> tuple[torch.Tensor, Any]:
        if self._reduction != "ratio":
            return result, None
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError('with reduction="ratio" the loss function returns a pair (sum, denominator)')
        value, denominator = result
        if isinstance(denominator, torch.Tensor) and denominator.requires_grad:
            raise UnsupportedStep(
                'with reduction="ratio" the denominator depends on a parameter; it must count samples or tokens only. '
                "Compute it from the batch alone, or leave micro_batches at 1"
            )
        return value, denominator

    def _context(self, args: Sequence[Any], part: Sequence[Any]) -> AbstractContextManager[Any]:
        if self._budget is None:
            return nullcontext()
        key = tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else repr(a) for a in part)
        if key not in self._applied:

            def loss_of(*some: Any) -> torch.Tensor:
                return self._parts_of(self._loss_fn(*some))[0]

            budget = self._budget
            if isinstance(budget, str) and "%" in budget:
                # A share means one of the whole batch's plain step.
                whole = trace(loss_of, *args)
                budget = parse_budget(budget, simulate(whole, whole.plain_schedule).peak_bytes)
            self._applied[key] = apply(plan(loss_of, *part, budget=budget, accumulates=True, **self._options))
        return self._applied[key]


def micro_batches(
    loss_fn: Callable[..., Any],
    count: int,
    *,
    reduction: str = "mean",
    batch_argnums: Sequence[int] | None = None,
    budget: int | str | None = None,
    scaler: Any = None,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
    **options: Any,
) -> MicroBatches:
    """Compute a batch's loss and gradients in parts, with the numbers of the whole batch.

    Args:
        loss_fn: takes a part of the batch, returns its loss; with ``reduction="ratio"`` a pair (sum, denominator).
        count: into how many parts a batch is split, one after the other. The last may be smaller.
        reduction: how ``loss_fn`` combines samples: "mean" over them, "sum", or "ratio" of what it returns.
        batch_argnums: positional arguments whose first axis is the batch; None means all that are tensors.
        budget: peak device bytes of a part with the gradients of all; a share is one of the whole batch's plain step.
        scaler: a ``torch.amp.GradScaler``, which scales the loss before its backward pass; its ``step`` and ``update``
            stay with the caller, once per batch.
        no_sync: ``no_sync`` of a ``DistributedDataParallel`` module: gradients are reduced once, with the last part.
        **options: passed on to ``remat.torch.plan``.

    Returns:
        A callable that takes the batch, runs forward and backward passes, and returns the detached loss. Gradients of
        less than float32 are added up in float32, unless ``no_sync`` is given, since their gradients are then the
        reducer's. BatchNorm sees one part at a time, which changes it; recomputation does not.

    Raises:
        ValueError: for a count below 1 or an unknown reduction.
    """
    given: Any = count
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"micro_batches takes a number of parts of at least 1, not {count!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; choose one of {', '.join(REDUCTIONS)}")
    if budget is not None:
        parse_budget(budget, baseline_peak_bytes=1 << 60)
    places = None if batch_argnums is None else tuple(batch_argnums)
    return MicroBatches(loss_fn, count, reduction, places, budget, scaler, no_sync, options)


class _Total:
    """Sums over the parts of one batch: the loss, its denominator, the gradients."""

    def __init__(self, reduction: str, samples: int, is_reduced_by_others: bool) -> None:
        self._reduction = reduction
        self._samples = samples
        self._in_place = is_reduced_by_others
        self._value: torch.Tensor | None = None
        self._denominator: Any = None
        self._scale: Any = None
        self._leaves: dict[int, torch.Tensor] = {}
        self._new: list[torch.Tensor] = []
        self._earlier: dict[int, torch.Tensor | None] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, value: torch.Tensor, denominator: Any, length: int) -> torch.Tensor:
        """The loss whose gradients are added up for a part."""
        if self._reduction == "mean":
            loss = value * (length / self._samples)
        elif self._reduction == "sum":
            loss = value
        else:
            wide = torch.as_tensor(denominator, dtype=torch.float32, device=value.device).detach()
            self._denominator = wide if self._denominator is None else self._denominator + wide
            if self._scale is None:
                # Of the size of a mean, so that half precision does not overflow; corrected at the end.
                self._scale = wide.clamp(min=1.0)
            loss = value / self._scale.to(value.dtype)
        wide_loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        self._value = wide_loss if self._value is None else self._value + wide_loss
        return loss

    def before_backward(self, loss: torch.Tensor) -> None:
        """Put earlier gradients aside, so that those of this batch are divided alone."""
        self._new = _private.leaves_of(loss)
        for leaf in self._new:
            if id(leaf) not in self._leaves:
                self._leaves[id(leaf)] = leaf
                if not self._in_place:
                    self._earlier[id(leaf)], leaf.grad = leaf.grad, None

    def after_backward(self) -> None:
        """Move gradients of less than float32 to an accumulator of that."""
        if self._in_place:
            return
        for leaf in self._new:
            if leaf.grad is not None and leaf.dtype in (torch.float16, torch.bfloat16):
                wide = leaf.grad.float()
                known = self._sums.get(id(leaf))
                self._sums[id(leaf)] = wide if known is None else known.add_(wide)
                leaf.grad = None

    def finish(self) -> torch.Tensor:
        """Divide once, and give each parameter its gradient."""
        assert self._value is not None
        value = self._value
        factor = None
        if self._reduction == "ratio":
            # All masked: nothing to learn from, and no 0 / 0.
            factor = torch.where(self._denominator > 0, self._scale / self._denominator.clamp(min=1e-30), 0.0)
            value = value * factor
        for address, leaf in self._leaves.items():
            gradient = self._sums.get(address, leaf.grad)
            if gradient is None:
                leaf.grad = self._earlier.get(address)
                continue
            if factor is not None:
                gradient.mul_(factor)
            gradient = gradient.to(leaf.dtype)
            earlier = self._earlier.get(address)
            leaf.grad = gradient if earlier is None else earlier.add_(gradient)
        return value


def _batch_of(args: Sequence[Any], given: tuple[int, ...] | None) -> tuple[tuple[int, ...], int]:
    """Positions of the arguments that hold the batch, and its samples."""
    places = given
    if places is None:
        places = tuple(n for n, a in enumerate(args) if isinstance(a, torch.Tensor))
    # Only tensors have a first axis to slice; anything else counts as a scalar.
    return places, count_samples([[tuple(getattr(a, "shape", ()))] for a in args], places)
