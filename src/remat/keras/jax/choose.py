"""Keras on JAX: ``micro_batches="auto"`` chooses between recomputation and micro-batches for one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import jax
import keras

from remat.core.budget import parse_budget
from remat.core.plan import Plan
from remat.jax.api.jit import Jitted
from remat.jax.planned_part import PartlyPlanned
from remat.keras.jax.step import MicroBatchedStep
from remat.keras.shared.batch_statistics import coupling_layers
from remat.micro_batches.choose import choose_for_batch
from remat.micro_batches.options import MicroBatchChoice, Option
from remat.micro_batches.timing import least_times_s

_ANY_STEP_BYTES: Final = 1 << 60
"""A budget that any step keeps as it is, so that its plan tells the plain peak. No machine has as much memory."""

Compiled = Callable[[int, int | str], Jitted | PartlyPlanned]
"""A training step that cuts a batch into so many pieces, within a budget."""


def choose_micro_batches(
    model: keras.Model, state: Any, data: Any, budget: int | str, compiled: Compiled
) -> tuple[MicroBatchChoice, Jitted | PartlyPlanned]:
    """The number of micro-batches for a model's training step, and the step that follows it. Nothing of it trains.

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
        return compiled(count, _ANY_STEP_BYTES).plan_for(state, data)

    budget_bytes = parse_budget(budget, max(1, plain(1).peak_bytes))
    steps: dict[int, Jitted | PartlyPlanned] = {}

    def plan_for(count: int) -> Plan:
        steps[count] = compiled(count, budget_bytes)
        return steps[count].plan_for(state, data)

    def measure(options: Sequence[Option]) -> dict[int, float]:
        throwaway = _Throwaway(state, data)
        runs = {one.micro_batches: partial(throwaway.advance, steps[one.micro_batches]) for one in options}
        return _least_times_s(runs)

    choice = choose_for_batch(
        batch_size,
        budget_bytes,
        plan_for,
        fits_plainly=lambda count: plain(count).peak_bytes <= budget_bytes,
        predicted_s=lambda size: plain(1).time_s * size / batch_size,
        times_s=lambda sizes: _times_s(model, state, data, sizes),
        measure=measure,
        coupled=coupling_layers(model),
    )
    return choice, steps[choice.micro_batches]


class _Throwaway:
    """A copy of the training state, on which steps are timed. A step consumes its state, and the next takes its result.

    Args:
        state: stays as it is.
        data: of every step.
    """

    def __init__(self, state: Any, data: Any) -> None:
        self._state = jax.tree.map(lambda leaf: jax.numpy.array(leaf, copy=True), state)
        self._data = data

    def advance(self, step: Callable[..., Any]) -> None:
        """One whole step, its update included."""
        wait: Any = jax.block_until_ready
        _, self._state = wait(step(self._state, self._data))


def _times_s(model: keras.Model, state: Any, data: Any, sizes: Iterable[int]) -> dict[int, float]:
    """Measured seconds of one micro-batch with nothing recomputed, by its number of samples."""
    runs = {}
    for size in sizes:
        piece, leaves = _piece(model, state, jax.tree.map(lambda leaf, size=size: leaf[:size], data))
        runs[size] = partial(_run, jax.jit(piece), (*state, leaves))
    return _least_times_s(runs)


def _least_times_s(runs: Mapping[int, Callable[[], None]]) -> dict[int, float]:
    return least_times_s(runs, on_processor=jax.default_backend() == "cpu")


def _run(function: Callable[..., Any], arguments: Any) -> None:
    wait: Any = jax.block_until_ready
    wait(function(*arguments))


def _piece(model: keras.Model, state: Any, data: Any) -> tuple[Callable[..., Any], list[Any]]:
    """The computation of one micro-batch that consists of this data, and its arguments after the state."""
    seen: list[Callable[..., Any]] = []

    def look(function: Callable[..., Any]) -> Callable[..., Any]:
        seen.append(function)
        return function

    step = MicroBatchedStep(model, 1, warns=False)
    jax.eval_shape(lambda some_state, some_data: step(model, some_state, some_data, look), state, data)
    return seen[0], jax.tree.leaves(keras.utils.unpack_x_y_sample_weight(data))
