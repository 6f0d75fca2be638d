"""``remat.keras.check``: does a model train under a budget as it trains without?"""

from __future__ import annotations

from typing import Any

import keras

from remat.keras.limit import is_limited
from remat.keras.workload import make_workload
from remat.running.check import CheckResult, check_workload
from remat.running.workload import StepOptions


def check(
    model: keras.Model, x: Any, y: Any, *, budget: int | str = "60%", steps: int = 3, batch_size: int | None = None
) -> CheckResult:
    """Train a few steps plainly and under a budget, and compare gradients, weights, statistics, seeds and peaks.

    The model is trained five times from its present weights and set back to them at the end. ``print`` the result for
    one line that says what differs and why.

    Args:
        model: compiled, without a memory limit.
        x: inputs, as ``fit`` takes them.
        y: targets.
        budget: as ``limit_memory`` takes it.
        steps: of training.
        batch_size: samples of a step; all of ``x`` if None. Steps take one batch after the other, from the start again
            where the data ends.

    Raises:
        ValueError: if the model has a limit already, or if ``batch_size`` is above the number of samples.
        InfeasibleBudget: where no schedule fits; it names the smallest budget.
    """
    if is_limited(model):
        raise ValueError(f"{model.name!r} has a memory limit; take it off first: limit_memory(model, None)")
    samples = len(keras.tree.flatten(x)[0])
    size = samples if batch_size is None else batch_size
    if not 1 <= size <= samples:
        raise ValueError(f"batch_size={batch_size} was asked for, and there are {samples} samples")
    starts = range(0, samples - size + 1, size)
    data = [(_rows(x, start, size), _rows(y, start, size)) for start in starts]
    return check_workload(make_workload(model, StepOptions(batch_size=size), data), budget, steps)


def _rows(values: Any, start: int, count: int) -> Any:
    return keras.tree.map_structure(lambda array: array[start : start + count], values)
