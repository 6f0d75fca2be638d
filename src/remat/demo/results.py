"""What one training run leaves behind, and what the demo makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from remat.core.budget import format_bytes
from remat.core.graph import Graph
from remat.core.plan import Plan

# A plan runs the same kernels on the same numbers, so the weights come out equal to the bit where the kernels and
# the graph optimizer are deterministic. Some 80 units in the last place of a float32 (1.2e-7) are left for
# platforms where they are not quite, after the few steps of the demo. One dropout mask drawn again, or one
# BatchNormalization updated twice, moves weights by more than 1e-3.
TOLERANCE: Final = 1e-5
# A weight whose true value is zero (the bias of attention keys, which softmax cancels) holds rounding errors only:
# it is compared with a part of the model's largest weight instead of with itself.
_SMALLEST_SCALE: Final = 1e-2

Weights = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class RunResult:
    """What the process of one training run reports.

    Attributes:
        model: "residual" or "transformer".
        budget: as the user wrote it; None for plain training.
        measured_peak_bytes: the largest peak of any training step, the first one included, by the device's counter.
        first_step_s: seconds of the first step, which traces, plans and compiles.
        step_time_s: median seconds of a step once training is over; for plain training, of all steps but the first.
        plain_time_s: median seconds of plain steps that ran in turn with these, in the same process.
        losses: one for each step.
        final_loss: mean over the last epoch.
        final_accuracy: of the last epoch, from 0 to 1.
        versions: of the packages in use.
    """

    model: str
    budget: str | None
    measured_peak_bytes: int
    first_step_s: float
    step_time_s: float
    plain_time_s: float
    losses: tuple[float, ...]
    final_loss: float
    final_accuracy: float
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """One training run with everything that it left behind; plan and graph are None for plain training."""

    result: RunResult
    weights: Weights
    plan: Plan | None
    graph: Graph | None


@dataclass(frozen=True)
class WeightDifference:
    """The largest difference between the weights of two runs.

    Attributes:
        absolute: the largest difference of any weight.
        relative: the largest difference, each measured against the largest weight of its tensor.
        weight: where that is.
    """

    absolute: float
    relative: float
    weight: str


@dataclass(frozen=True)
class Line:
    """One line of the table: a run beside plain training of the same model.

    Attributes:
        run: the run.
        predicted_peak_bytes: what the plan promised; for plain training, the peak that a plan started from.
        relative_time: step time as a multiple of that of plain steps beside it.
        difference: of the weights from plain training's; None for plain training itself.
    """

    run: Run
    predicted_peak_bytes: int
    relative_time: float
    difference: WeightDifference | None

    @property
    def budget_bytes(self) -> int | None:
        """The budget, None for plain training."""
        return self.run.plan.budget_bytes if self.run.plan else None

    @property
    def prediction_error(self) -> float:
        """By how much the prediction lies above the measured peak, as a fraction of the measured one."""
        return self.predicted_peak_bytes / self.run.result.measured_peak_bytes - 1

    @property
    def failures(self) -> tuple[str, ...]:
        """What this line promises and does not keep, as sentences; empty where all is well."""
        found = []
        result, budget = self.run.result, self.budget_bytes
        where = f"{result.model} under {result.budget}"
        if result.measured_peak_bytes <= 0:
            found.append(f"{result.model}: the device's memory counter shows nothing, so no peak could be measured")
        if budget is not None and result.measured_peak_bytes > budget:
            found.append(
                f"{where}: the measured peak of {result.measured_peak_bytes} bytes "
                f"({format_bytes(result.measured_peak_bytes)}) is over the budget of {budget} ({format_bytes(budget)})"
            )
        # Written so that a difference that is not a number fails.
        if self.difference is not None and not self.difference.relative <= TOLERANCE:
            found.append(
                f"{where}: the weight {self.difference.weight} differs from plain training's by "
                f"{self.difference.relative:.2g} of its size, more than float rounding ({TOLERANCE:g})"
            )
        return tuple(found)


def compare(runs: Sequence[Run]) -> tuple[Line, ...]:
    """The lines for one model.

    Args:
        runs: plain training first, then the budgets; at least one of these.
    """
    plain, *planned = runs
    baselines = [run.plan.baseline_peak_bytes for run in planned if run.plan is not None]
    lines = [Line(plain, baselines[0], 1.0, None)]
    for run in planned:
        assert run.plan is not None
        relative_time = run.result.step_time_s / run.result.plain_time_s
        lines.append(Line(run, run.plan.peak_bytes, relative_time, weight_difference(plain.weights, run.weights)))
    return tuple(lines)


def weight_difference(plain: Weights, other: Weights) -> WeightDifference:
    """Compare all weights of two runs, the statistics of BatchNormalization among them.

    Raises:
        ValueError: if the runs do not have the same weights.
    """
    if {name: values.shape for name, values in plain.items()} != {name: v.shape for name, v in other.items()}:
        raise ValueError("the two runs have different weights, so they trained different models")
    largest = max(float(np.max(np.abs(values))) for values in plain.values())
    absolute, worst = 0.0, WeightDifference(0.0, -1.0, "")
    for name, values in plain.items():
        differences = np.abs(values.astype(np.float64) - other[name])
        if not np.all(np.isfinite(differences)):
            return WeightDifference(float("inf"), float("inf"), name)
        difference = float(np.max(differences))
        scale = max(float(np.max(np.abs(values))), _SMALLEST_SCALE * largest)
        absolute = max(absolute, difference)
        if difference / scale > worst.relative:
            worst = WeightDifference(0.0, difference / scale, name)
    return WeightDifference(absolute, worst.relative, worst.weight)
