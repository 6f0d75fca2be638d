"""``micro_batches="auto"`` for Keras on JAX: the choice between recomputation and micro-batches for one batch."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import keras

from remat.budget import parse_budget
from remat.errors import UnsupportedStep
from remat.jax.inner_plan import InnerJitted
from remat.jax.jit import Jitted
from remat.joint_plan import JointPlan, PieceTimes, choose, counts_to_try, size_of_largest
from remat.keras.batch_statistics import BatchStatistics
from remat.keras.jax_micro_batch_step import JaxMicroBatchedStep
from remat.piece_timing import least_times_s
from remat.plan import Plan

_TIMED_SIZES = 3
_REPEATS = 5

Compiled = Callable[[int, int | str], Jitted | InnerJitted]
"""A training step that cuts a batch into so many pieces, within a budget."""


def choose_micro_batches(
    model: keras.Model, state: Any, data: Any, budget: int | str, compiled: Compiled
) -> tuple[JointPlan, Jitted | InnerJitted]:
    """The joint plan of a model's training step, and the step that follows it. Nothing of it trains.

    Args:
        model: compiled and built.
        state: the model's variables, as Keras on JAX passes them.
        data: the batch.
        budget: a percentage is one of the plain peak of the whole step.
        compiled: makes training steps.

    Raises:
        InfeasibleBudget: where no number of micro-batches fits.
    """
    batch_size = int(jax.tree.leaves(data)[0].shape[0])

    @cache
    def plain(count: int) -> Plan:
        return compiled(count, "100%").plan_for(state, data)

    budget_bytes = parse_budget(budget, max(1, plain(1).baseline_peak_bytes))
    counts, only_whole = list(counts_to_try(batch_size)), ""
    times: PieceTimes | None = None
    if plain(1).baseline_peak_bytes <= budget_bytes:
        counts = [1]
    else:
        try:
            first = bisect.bisect_left(counts, True, key=lambda n: plain(n).baseline_peak_bytes <= budget_bytes)
            if first < len(counts):
                times = PieceTimes(_times_s(model, state, data, size_of_largest(batch_size, counts[first])))
        except UnsupportedStep as error:
            only_whole, counts = str(error), [1, 2]
    steps: dict[int, Jitted | InnerJitted] = {}

    def plan_for(count: int) -> Plan:
        steps[count] = compiled(count, budget_bytes)
        return steps[count].plan_for(state, data)

    def predicted_s(size: int) -> float:
        return plain(1).time_s * size / batch_size

    # A model whose layers cannot be asked has no micro-batches either, so that nothing has to be preferred.
    coupled = [layer.name for layer in BatchStatistics(model, refuse=False).layers]
    joint = choose(
        batch_size,
        budget_bytes,
        plan_for,
        times or predicted_s,
        counts=counts,
        coupled=coupled,
        only_whole=only_whole,
        times_are_measured=times is not None,
    )
    return joint, steps[joint.micro_batches]


def _times_s(model: keras.Model, state: Any, data: Any, largest: int) -> dict[int, float]:
    """Measured seconds of one micro-batch with nothing recomputed, for a few sizes up to one that fits."""
    runs = {}
    for size in {max(1, largest >> halved) for halved in range(_TIMED_SIZES)}:
        piece, leaves = _piece(model, state, jax.tree.map(lambda leaf, size=size: leaf[:size], data))
        runs[size] = partial(_run, jax.jit(piece), (*state, leaves))
    return least_times_s(runs, repeats=_REPEATS, on_processor=jax.default_backend() == "cpu")


def _run(function: Callable[..., Any], arguments: Any) -> None:
    wait: Any = jax.block_until_ready
    wait(function(*arguments))


def _piece(model: keras.Model, state: Any, data: Any) -> tuple[Callable[..., Any], list[Any]]:
    """The computation of one micro-batch that consists of this data, and its arguments after the state."""
    seen: list[Callable[..., Any]] = []

    def look(function: Callable[..., Any]) -> Callable[..., Any]:
        seen.append(function)
        return function

    step = JaxMicroBatchedStep(model, 1)
    jax.eval_shape(lambda some_state, some_data: step(model, some_state, some_data, look), state, data)
    return seen[0], jax.tree.leaves(keras.utils.unpack_x_y_sample_weight(data))
