"""Keras on PyTorch: ``micro_batches="auto"`` chooses between recomputation and micro-batches for one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import keras
import torch

from remat.core.plan import Plan
from remat.fit.fit import fit, fits_plainly
from remat.fit.request import Request
from remat.keras._private import outputs_released
from remat.keras.shared.batch_statistics import coupling_layers
from remat.keras.shared.limit import in_bytes
from remat.keras.torch.step import CutBatch, MicroBatchedStep, Piece, Sums
from remat.keras.torch.trace import loss_of, traced_step
from remat.micro_batches.choose import PieceTimes, choose_for_batch
from remat.micro_batches.cut import largest_size
from remat.micro_batches.options import MicroBatchChoice, Option
from remat.micro_batches.timing import least_times_s
from remat.torch.api.apply import apply
from remat.torch.api.plan import EagerCandidate
from remat.torch.trace.fake_step import undisturbed

_TIMED_PIECES = 2
"""Of one size, one after the other: the second adds its gradients to those of the first."""


def choose_micro_batches(model: keras.Model, data: Any, request: Request) -> MicroBatchChoice:
    """The number of micro-batches for a model's training step. Nothing of it trains.

    Args:
        model: compiled and built.
        data: the batch.
        request: with a budget, of which a percentage is one of the plain peak of the whole step.

    Raises:
        InfeasibleBudget: where no number of micro-batches fits.
    """
    batch, loss_fn = keras.utils.unpack_x_y_sample_weight(data), loss_of(model)
    sizes = [leaf.shape[0] for leaf in keras.tree.flatten(batch) if leaf is not None and len(leaf.shape)]
    batch_size = int(sizes[0]) if sizes else 1

    @cache
    def cut() -> CutBatch:
        return MicroBatchedStep(model, _TIMED_PIECES).cut(model, data)

    whole = traced_step(model, loss_fn, batch)
    request = in_bytes(request, whole.plain_peak.expected_bytes)
    budget_bytes = request.budget
    assert isinstance(budget_bytes, int)
    candidates = {batch_size: whole}

    def candidate(count: int) -> EagerCandidate:
        size = largest_size(batch_size, count)
        if size not in candidates:
            candidates[size] = traced_step(model, cut().loss_of_piece, cut().piece(size), accumulates=True)
        return candidates[size]

    found: dict[int, Plan] = {}

    def plan_for(count: int) -> Plan:
        found[count] = fit(candidate(count), request, proves=False)
        return candidate(count).following(found[count])

    def predicted_s(size: int) -> float:
        # A trace takes long enough not to make one for each size.
        return PieceTimes({known: one.step.graph.time_s for known, one in candidates.items()})(size)

    def run_pieces(size: int, context: AbstractContextManager[Any]) -> None:
        def forward(cut: CutBatch, leaves: Sequence[Any]) -> Piece:
            with outputs_released(), context:
                return cut.forward(leaves)

        sums = Sums()
        for _ in range(_TIMED_PIECES):
            cut().run_piece(cut().piece(size), sums, forward)

    def run_whole(context: AbstractContextManager[Any]) -> None:
        with outputs_released(), context:
            loss = loss_fn(*batch)
        loss.backward()
        model.zero_grad()

    def least_s(runs: Mapping[int, Callable[[], None]]) -> dict[int, float]:
        with _unchanged(model):
            return _least_times_s(runs, whole.step.recording.device)

    def times_s(sizes: Sequence[int]) -> dict[int, float]:
        found = least_s({size: partial(run_pieces, size, nullcontext()) for size in sizes})
        return {size: seconds / _TIMED_PIECES for size, seconds in found.items()}

    def measure(chosen: Sequence[Option]) -> dict[int, float]:
        runs: dict[int, Callable[[], None]] = {}
        for option in chosen:
            assert option.plan is not None
            planned = apply(option.plan)
            whole_batch = option.micro_batches == 1
            runs[option.micro_batches] = (
                partial(run_whole, planned) if whole_batch else partial(run_pieces, option.size, planned)
            )
        found = least_s(runs)
        return {count: s if count == 1 else count * s / _TIMED_PIECES for count, s in found.items()}

    choice = choose_for_batch(
        batch_size,
        budget_bytes,
        plan_for,
        fits_plainly=lambda count: fits_plainly(candidate(count), budget_bytes),
        predicted_s=predicted_s,
        times_s=times_s,
        measure=measure,
        coupled=coupling_layers(model),
    )
    chosen = candidate(choice.micro_batches)
    return choice.with_plan(chosen.following(chosen.prove(found[choice.micro_batches], request)))


def _least_times_s(runs: Mapping[int, Callable[[], None]], device: str) -> dict[int, float]:
    if device == "cpu":
        return least_times_s(runs, on_processor=True)

    def finished(run: Callable[[], None]) -> None:
        run()
        torch.cuda.synchronize()

    return least_times_s({key: partial(finished, run) for key, run in runs.items()}, on_processor=False)


@contextlib.contextmanager
def _unchanged(model: keras.Model) -> Iterator[None]:
    """What the block draws, and writes to variables that are not trained, is taken back."""
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    before = [(variable, variable.value.detach().clone()) for variable in variables]
    devices = sorted({value.device.index for _, value in before if value.is_cuda})
    with torch.random.fork_rng(devices), undisturbed():
        try:
            yield
        finally:
            for variable, value in before:
                variable.assign(value)
