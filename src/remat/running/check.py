"""``remat check``: does a planned step train as the plain one does?

Both train for a few steps from the same weights on the same batches. Gradients, weights, optimizer state, running
statistics and losses must be equal but for rounding; seeds and counters must be equal; the measured peak must be within
the budget. How large rounding may be is measured on the model itself, by plain training from weights that were moved by
half a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.core.budget import format_bytes
from remat.running.workload import Array, Training, Workload

_ROUNDINGS: Final = 64
"""A difference of this many units in the last place always counts as rounding. Two programs may add the same terms in
another order, and a sum of n terms is then off by some sqrt(n) roundings: 64 stands for sums of 4,000 terms. Too small,
a step without defect is called different; too large, a small defect passes."""

_SENSITIVITY: Final = 4.0
"""A difference is rounding, too, up to this many times what half a rounding in the weights does to plain training. A
judgement: the two are of one size, but neither is the largest that could be."""

_NOT_REPEATABLE: Final = 1e-2
"""Where half a rounding in the weights moves the first gradients, or the first loss, by more than this share, plain
training draws other random numbers in each run, and nothing can be compared. A judgement: far more than what rounding
moves in float32, far less than what another dropout mask moves."""

_KINDS: Final = {
    "gradient": "gradients",
    "weight": "weights",
    "slot": "optimizer state",
    "statistic": "running statistics",
}
"""The kinds of numbers that rounding may change, as the names of values begin, with what a user calls them."""

_EXACT: Final = "state"
"""The kind that must be equal to the bit."""


@dataclass(frozen=True)
class Comparison:
    """One kind of numbers, plain against planned.

    Attributes:
        what: "gradients", "weights", "optimizer state", "running statistics", "losses" or "random states and counters".
        count: how many arrays were compared.
        difference: the largest difference as a share of the largest plain value of the kind; for random states and
            counters, how many of them are unequal.
        allowed: the largest difference that counts as rounding.
        worst: the name of the array that differs most.
    """

    what: str
    count: int
    difference: float
    allowed: float
    worst: str

    @property
    def is_equal(self) -> bool:
        """Are the numbers equal but for rounding? They are not where a difference is not a number (NaN)."""
        return self.difference <= self.allowed


@dataclass(frozen=True)
class CheckResult:
    """Plain against planned training of one step.

    Attributes:
        comparisons: one for each kind of numbers.
        steps: how many steps of training were run each way.
        budget_bytes: the budget of the plan.
        recomputed: how many operations the plan runs again.
        plain_peak_bytes: the measured peak of plain training; 0 where the framework counts nothing on this device.
        planned_peak_bytes: the measured peak of planned training, likewise.
        predicted_peak_bytes: the peak that the plan promises.
        is_repeatable: does plain training give the same numbers twice? Otherwise nothing can be compared.
    """

    comparisons: tuple[Comparison, ...]
    steps: int
    budget_bytes: int
    recomputed: int
    plain_peak_bytes: int
    planned_peak_bytes: int
    predicted_peak_bytes: int
    is_repeatable: bool

    @property
    def passed(self) -> bool:
        """Are all numbers equal but for rounding, and is the peak, where it is measured, within the budget?"""
        return self.is_repeatable and self.keeps_budget and all(one.is_equal for one in self.comparisons)

    @property
    def keeps_budget(self) -> bool:
        """Is the measured peak within the budget? Nothing says otherwise where none is measured."""
        return self.planned_peak_bytes <= self.budget_bytes

    @property
    def verdict(self) -> str:
        """One line: what differs and why, or that nothing does."""
        if not self.is_repeatable:
            return (
                "undecided: plain training gives other numbers each time, or what is not a number (NaN), so the "
                "planned one cannot be compared; give random layers and functions a seed, and see that the loss stays "
                "finite"
            )
        if different := difference_in(self.comparisons):
            first, reason = different
            return f"different: {first.what} by {first.difference:.2g} ({first.worst}); {reason}"
        if not self.keeps_budget:
            return (
                f"equal, but over the budget: measured {format_bytes(self.planned_peak_bytes)} of "
                f"{format_bytes(self.budget_bytes)} (predicted {format_bytes(self.predicted_peak_bytes)}); ask for "
                "less, and please report the model"
            )
        largest = max((one.difference for one in self.comparisons), default=0.0)
        equal = f"equal: largest difference {largest:.1e}, which is rounding"
        budget = f"budget {format_bytes(self.budget_bytes)}"
        if not self.planned_peak_bytes:
            predicted = format_bytes(self.predicted_peak_bytes)
            return f"{equal}; no peak was measured, since nothing counts it here: {predicted} predicted, {budget}"
        peaks = f"peak {format_bytes(self.plain_peak_bytes)} plain, {format_bytes(self.planned_peak_bytes)} planned"
        return f"{equal}; {peaks}, {budget}"

    def __str__(self) -> str:
        return self.verdict


def check_workload(workload: Workload, budget: int | str = "60%", steps: int = 3) -> CheckResult:
    """Train some steps plainly and planned, from the same weights on the same batches, and compare everything.

    Weights and states are set back at the end, whatever happens.

    Args:
        workload: the step.
        budget: as everywhere: bytes, "4GiB", or "60%" of the plain step's predicted peak.
        steps: how many steps of training, 1 or more.

    Raises:
        ValueError: for fewer than one step.
        InfeasibleBudget: where no schedule fits the budget; it names the smallest that does.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} compares nothing; give 1 or more")
    try:
        return _check(workload, budget, steps)
    finally:
        workload.restore()


def _check(workload: Workload, budget: int | str, steps: int) -> CheckResult:
    # The gradients first, and by themselves: each set takes as much memory as the weights.
    gradients, are_repeatable = _compare_gradients(workload, budget)
    plain = workload.train(None, steps)
    nudged = workload.train(None, steps, nudged=True)
    planned = workload.train(budget, steps)
    assert planned.plan is not None
    return CheckResult(
        (*gradients, *compare_trainings(plain, nudged, planned)),
        steps,
        planned.plan.budget_bytes,
        planned.plan.recomputed,
        plain.peak_bytes,
        planned.peak_bytes,
        planned.plan.peak_bytes,
        is_repeatable=are_repeatable and is_repeatable(plain, nudged),
    )


def _compare_gradients(workload: Workload, budget: int | str) -> tuple[tuple[Comparison, ...], bool]:
    """The gradients of the first step, plain against planned, and whether plain training gives the same ones twice.

    No comparison where the framework does not give gradients out.
    """
    plain = workload.gradients(None)
    if not plain:
        return (), True
    nudged = workload.gradients(None, nudged=True)
    are_repeatable = not nudged or _difference(plain, nudged)[0] <= _NOT_REPEATABLE
    return (_compare("gradient", plain, nudged, workload.gradients(budget)),), are_repeatable


def compare_trainings(plain: Training, nudged: Training, planned: Training) -> tuple[Comparison, ...]:
    """What training left behind and its losses, kind by kind, plain against planned.

    Args:
        plain: without a plan.
        nudged: the same from weights that were half a rounding off: what differs by not much more is rounding.
        planned: under a plan.
    """
    comparisons = []
    for kind in list(_KINDS)[1:]:
        runs = [_of_kind(run, kind) for run in (plain, nudged, planned)]
        if runs[0]:
            comparisons.append(_compare(kind, *runs))
    if plain.losses:
        losses = [{"loss": np.asarray(run.losses, dtype=np.float32)} for run in (plain, nudged, planned)]
        comparisons.append(_compare("losses", *losses))
    states = _of_kind(plain, _EXACT), _of_kind(planned, _EXACT)
    if states[0]:
        comparisons.append(_compare_exactly(*states))
    return tuple(comparisons)


def difference_in(comparisons: Iterable[Comparison]) -> tuple[Comparison, str] | None:
    """The difference that the others follow from, and what may have caused it; None where all is rounding."""
    unequal = {one.what: one for one in comparisons if not one.is_equal}
    return _reason(unequal) if unequal else None


def _of_kind(run: Training, kind: str) -> dict[str, Array]:
    return {name: value for name, value in run.values.items() if name.partition("/")[0] == kind}


def _compare(
    kind: str, plain: Mapping[str, Array], nudged: Mapping[str, Array], planned: Mapping[str, Array]
) -> Comparison:
    sensitivity, _ = _difference(plain, nudged)
    difference, worst = _difference(plain, planned)
    eps = max(
        (float(np.finfo(v.dtype).eps) for v in plain.values() if np.issubdtype(v.dtype, np.floating)), default=0.0
    )
    allowed = max(_ROUNDINGS * eps, _SENSITIVITY * sensitivity)
    return Comparison(_KINDS.get(kind, kind), len(plain), difference, allowed, worst.partition("/")[2] or worst)


def _difference(plain: Mapping[str, Array], other: Mapping[str, Array]) -> tuple[float, str]:
    """The largest difference as a share of the largest plain value of all arrays, and the name of the array.

    Infinite where the arrays have other names or shapes.
    """
    if {name: value.shape for name, value in plain.items()} != {name: value.shape for name, value in other.items()}:
        return math.inf, next(iter(set(plain) ^ set(other)), "another shape")
    # Some gradients are zero but for rounding (the bias of attention's keys), so that no array can be its own scale.
    scale = max((float(np.max(np.abs(value), initial=0)) for value in plain.values()), default=0.0)
    found, worst = 0.0, ""
    for name, value in plain.items():
        apart = np.abs(np.asarray(value, np.float64) - np.asarray(other[name], np.float64))
        largest = float(np.max(apart, initial=0.0))
        if math.isnan(largest):
            return math.inf, name
        if not worst or largest > found:
            found, worst = largest, name
    return (found / scale if scale else found), worst


def _compare_exactly(plain: Mapping[str, Array], planned: Mapping[str, Array]) -> Comparison:
    unequal = [n for n, value in plain.items() if n not in planned or not np.array_equal(value, planned[n])]
    worst = unequal[0].partition("/")[2] if unequal else ""
    return Comparison("random states and counters", len(plain), float(len(unequal)), 0.0, worst)


def is_repeatable(plain: Training, nudged: Training) -> bool:
    """Does plain training begin with the same loss twice? It does not where random layers have no seed.

    Args:
        plain: a training.
        nudged: the same from weights that were half a rounding off.
    """
    if not plain.losses:
        return True
    first, other = plain.losses[0], nudged.losses[0]
    return abs(first - other) <= _NOT_REPEATABLE * max(abs(first), 1e-30)


def _reason(unequal: Mapping[str, Comparison]) -> tuple[Comparison, str]:
    if states := unequal.get("random states and counters"):
        return (
            states,
            "a seed or a counter moved another number of times, so masks were drawn again or states written twice",
        )
    if gradients := unequal.get("gradients"):
        if "losses" in unequal:
            return gradients, "the losses differ, too: the planned forward pass computes something else"
        return (
            gradients,
            "the losses agree, so what was recomputed is not what the forward pass computed, such as another mask",
        )
    if statistics := unequal.get("running statistics"):
        return statistics, "the gradients agree, so a statistic was updated twice, or from other values"
    name = next(iter(unequal))
    return unequal[name], "the gradients agree, so the update itself differs"
