"""Micro-batches: the gradients of a batch as the sum over its pieces, one piece in memory at a time.

What must hold for the result to be that of the whole batch: sums are accumulated and divided once, by the denominator
that the whole batch has; a piece with fewer samples counts by its real size; the accumulator is float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from remat.core.plan import Plan
from remat.fit.fit import fit
from remat.fit.request import Request
from remat.micro_batches.cut import batch_places, check_count, count_samples, cut
from remat.micro_batches.reduce import MEAN, RATIO, SUM, check_reduction, sum_and_denominator, trained_denominator
from remat.torch import _private
from remat.torch.api.apply import Applied, apply
from remat.torch.api.plan import EagerCandidate
from remat.torch.trace.fake_step import record_step


def micro_batches(
    loss_fn: Callable[..., Any],
    count: int,
    *,
    reduction: str = "mean",
    batch_argnums: int | Sequence[int] | None = None,
    budget: int | str | None = None,
    scaler: Any = None,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
    planner: str = "auto",
    time_limit_s: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    resident: Sequence[torch.Tensor] = (),
    resident_bytes: int = 0,
    device: str | None = None,
    **options: Any,
) -> MicroBatches:
    """Compute a batch's loss and gradients in pieces, with the numbers of the whole batch.

    Args:
        loss_fn: takes a piece of the batch, returns its loss; with ``reduction="ratio"`` a pair (sum, denominator).
        count: how many pieces a batch is cut into, as ``numpy.array_split`` cuts; one runs after the other.
        reduction: how ``loss_fn`` combines samples: "mean" over them, "sum", or "ratio" of what it returns; the ratio
            of a batch whose denominators are all 0 is 0.
        batch_argnums: positional arguments whose first axis is the batch; None means all that are tensors.
        budget: peak device bytes of a piece with the gradients of all; a share such as "60%" is one of the plain step
            of the whole batch.
        scaler: a ``torch.amp.GradScaler``, which scales the loss before its backward pass; its ``step`` and ``update``
            stay with the caller, once per batch.
        no_sync: ``no_sync`` of a ``DistributedDataParallel`` module: gradients are reduced once, with the last piece.
        planner: as ``remat.torch.plan`` takes it, like all that follows.
        time_limit_s: wall seconds for each round of planning.
        optimizer: its state counts as resident, and its update is part of the step.
        resident: tensors that count although neither the loss nor the optimizer touches them.
        resident_bytes: memory that counts likewise.
        device: profile for the predicted times.
        **options: passed on to the planner.

    Returns:
        A callable that takes the batch, runs forward and backward passes, and returns the detached loss. Gradients of
        less than float32 are added up in float32, unless ``no_sync`` is given, since their gradients are then the
        reducer's. BatchNorm sees one piece at a time, which changes it; recomputation does not.

    Raises:
        ValueError: for a count below 1 or an unknown reduction.
        InvalidBudget: for a budget that cannot be read.
    """
    request = Request(budget, planner=planner, time_limit_s=time_limit_s, options=options)
    request.check("remat.torch.micro_batches", takes_auto=False)
    beside = {"optimizer": optimizer, "resident": resident, "resident_bytes": resident_bytes}
    return MicroBatches(
        loss_fn, check_count(count), check_reduction(reduction), batch_argnums, request, scaler, no_sync, beside, device
    )


class MicroBatches:
    """A step that runs the forward and the backward pass of a batch piece by piece.

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
        batch_argnums: int | Sequence[int] | None,
        request: Request,
        scaler: Any,
        no_sync: Callable[[], AbstractContextManager[Any]] | None,
        beside: dict[str, Any],
        device: str | None,
    ) -> None:
        self._loss_fn = loss_fn
        self._count = count
        self._reduction = reduction
        self._batch_argnums = batch_argnums
        self._request = request
        self._scaler = scaler
        self._no_sync = no_sync
        self._beside = beside
        self._device = device
        self._applied: dict[Any, Applied] = {}
        self._whole_bytes: dict[Any, int] = {}

    @property
    def plans(self) -> list[Plan]:
        """The plans made so far, one for each size of piece."""
        return [applied.plan for applied in self._applied.values()]

    def __call__(self, *args: Any) -> torch.Tensor:
        """Add the gradients of the whole batch to ``grad``, as ``backward`` would; returns the batch's loss, detached.

        Raises:
            UnsupportedStep: where the arguments do not agree on the size of the batch, or ``loss_fn`` returns something
                else than the reduction says.
            InfeasibleBudget: at the first call, if no schedule fits; it names the smallest budget.
        """
        places, samples = self._batch_of(args)
        total = _Total(self._reduction, samples, self._no_sync is not None)
        pieces = [(group.size, start) for group in cut(samples, self._count) for start in group.starts]
        for size, start in pieces:
            piece = [arg[start : start + size] if n in places else arg for n, arg in enumerate(args)]
            is_last = start + size == samples
            waits = nullcontext() if is_last or self._no_sync is None else self._no_sync()
            with waits:
                with self._planned(args, piece):
                    value, denominator = self._sum_and_denominator(*piece)
                loss = total.add(value, denominator, size)
                total.before_backward(loss)
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
                total.after_backward()
            del value, loss
        return total.finish()

    def _batch_of(self, args: Sequence[Any]) -> tuple[tuple[int, ...], int]:
        """Positions of the arguments that hold the batch, and its samples."""
        tensors = [n for n, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        places = batch_places(self._batch_argnums, len(args), tensors)
        # Only tensors have a first axis to slice; anything else counts as a scalar.
        shapes = [tuple(getattr(args[place], "shape", ())) for place in places]
        samples = count_samples(shapes, [f"argument {place}" for place in places])
        assert samples is not None, "every shape is known"
        return places, samples

    def _sum_and_denominator(self, *piece: Any) -> tuple[torch.Tensor, Any]:
        value, denominator = sum_and_denominator(self._loss_fn(*piece), self._reduction)
        if isinstance(denominator, torch.Tensor) and denominator.requires_grad:
            raise trained_denominator("a parameter")
        return value, denominator

    def _planned(self, args: Sequence[Any], piece: Sequence[Any]) -> AbstractContextManager[Any]:
        """What the forward pass of a piece runs in."""
        if not self._request.plans:
            return nullcontext()
        key = _shapes(piece)
        if key not in self._applied:
            candidate = self._candidate(piece, accumulates=True)
            share_of_bytes = self._plain_bytes(args) if "%" in str(self._request.budget) else None
            found = fit(candidate, self._request, share_of_bytes=share_of_bytes)
            self._applied[key] = apply(candidate.following(found))
        return self._applied[key]

    def _plain_bytes(self, args: Sequence[Any]) -> int:
        """The plain peak of the whole batch."""
        key = _shapes(args)
        if key not in self._whole_bytes:
            self._whole_bytes[key] = self._candidate(args, accumulates=False).plain_peak.expected_bytes
        return self._whole_bytes[key]

    def _candidate(self, args: Sequence[Any], *, accumulates: bool) -> EagerCandidate:
        recording = record_step(
            lambda *some: self._sum_and_denominator(*some)[0], args, accumulates=accumulates, **self._beside
        )
        return EagerCandidate(recording, self._device)


def _shapes(args: Sequence[Any]) -> tuple[Any, ...]:
    """What tells calls apart that need plans of their own."""
    return tuple(tuple(arg.shape) if isinstance(arg, torch.Tensor) else repr(arg) for arg in args)


class _Total:
    """Sums over the pieces of one batch: the loss, its denominator, the gradients."""

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
        """The loss whose gradients are added up for a piece."""
        if self._reduction == MEAN:
            loss = value * (length / self._samples)
        elif self._reduction == SUM:
            loss = value
        else:
            kind = torch.promote_types(value.dtype, torch.float32)
            wide = torch.as_tensor(denominator, dtype=kind, device=value.device).detach()
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
        if self._reduction == RATIO:
            # A batch that is all masked has nothing to learn from: 0 / 0 is 0.
            factor = torch.where(self._denominator == 0, 0.0, self._scale / self._denominator)
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
