"""The cheapest plan among those for a step as it is, and for the step with a region in more and more slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from remat.core.budget import parse_budget
from remat.core.errors import InfeasibleBudget
from remat.core.plan import Plan, Split
from remat.fit.candidate import Candidate
from remat.fit.fit import fit, fits_plainly, infeasible
from remat.fit.request import Request

LEAST_SAVED: Final = 0.05
"""A region is split if what lives inside it only is this share of the plain peak. A judgement: splitting less moves the
peak to another place of the step at best. With 0, steps are looked at in vain, at some tenths of a second each."""

MOST_EXTRA_TIME: Final = 0.5
"""Slices are not made smaller once the step is predicted to take this share of its time longer: by then the slices no
longer fill the device, since each reads all weights of its products. A judgement. With a larger share, smaller budgets
can be kept, at a price that nobody asked for."""

_LEAST_GAIN: Final = 0.01
"""Twice as many slices are of use if they lower the plain peak by this share. A judgement: each halves what the region
takes, so that less means that the peak is elsewhere. With 0, regions are cut until slices are too small."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A step with a region in slices.

    Attributes:
        candidate: the step as it would run.
        split: what was done to it.
    """

    candidate: Candidate
    split: Split


def fit_with_splits(candidate: Candidate, request: Request, variant: Callable[[int], Variant | None]) -> Plan:
    """The cheapest plan found within the budget of a request, of the step as it is or with a region in slices.

    The fewest slices, of 2, 4, 8 and so on, with which the step keeps the budget and recomputes nothing are one
    candidate; half as many, with recomputations, and the step as it is are the others. A share of a budget is one of
    the plain step without a split, and so are the plan's baselines.

    Args:
        candidate: the step as it is.
        request: with a budget; its levers say whether ops may run again.
        variant: the step with its region in so many slices; None where the region is not to be cut so often.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: if no plan fits; ``minimum_bytes`` is the smallest budget that one of these variants keeps.
    """
    shared_bytes = candidate.plain_peak.expected_bytes + candidate.resident_bytes
    failures: list[InfeasibleBudget] = []
    found: list[tuple[Plan, Candidate, Split | None]] = []

    budget_bytes = parse_budget(_budget_of(request), max(1, shared_bytes))
    for one, split in _worth_planning(candidate, variant, budget_bytes):
        try:
            found.append((_fitted(one, request, shared_bytes, budget_bytes), one, split))
        except InfeasibleBudget as error:
            failures.append(error)
    if not found:
        raise min(failures, key=lambda error: error.minimum_bytes)
    plan, chosen, split = min(found, key=lambda one: one[0].time_s)
    plan = chosen.prove(plan, request)
    if split is None:
        return plan
    return _beside_unsplit(plan, split, candidate.graph.time_s)


def _budget_of(request: Request) -> int | str:
    assert request.budget is not None, "a request without a budget is not fitted"
    return request.budget


def _worth_planning(
    candidate: Candidate, variant: Callable[[int], Variant | None], budget_bytes: int
) -> list[tuple[Candidate, Split | None]]:
    """The variants among which the cheapest plan is sought; planning each takes seconds where the budget is tight."""
    if fits_plainly(candidate, budget_bytes):
        return [(candidate, None)]
    cuts: list[Variant] = []
    peak_bytes = candidate.plain_peak.highest_bytes
    slices = 2
    while (cut := variant(slices)) is not None:
        before_bytes, peak_bytes = peak_bytes, cut.candidate.plain_peak.highest_bytes
        if peak_bytes > (1 - _LEAST_GAIN) * before_bytes:
            break  # Something else binds by now.
        cuts.append(cut)
        if fits_plainly(cut.candidate, budget_bytes):
            break
        slices *= 2
    return [(candidate, None), *((one.candidate, one.split) for one in cuts[-2:])]


def _fitted(candidate: Candidate, request: Request, shared_bytes: int, budget_bytes: int) -> Plan:
    if "recompute" not in request.levers and not fits_plainly(candidate, budget_bytes):
        plain_bytes = candidate.smallest_budget(candidate.plain_peak.highest_bytes)
        raise infeasible(budget_bytes, plain_bytes, "the step with nothing recomputed, as levers= asks for")
    return fit(candidate, request, share_of_bytes=shared_bytes, proves=False)


def _beside_unsplit(plan: Plan, split: Split, plain_time_s: float) -> Plan:
    """The plan's overheads, as shares of the step without the split."""

    def share(overhead: float) -> float:
        time_s = plan.baseline_time_s * (1 + overhead)
        return (time_s - plain_time_s) / plain_time_s if plain_time_s > 0 else 0.0

    return dataclasses.replace(
        plan,
        split=split,
        baseline_time_s=plain_time_s,
        overhead=share(plan.overhead),
        overhead_lower_bound=share(plan.overhead_lower_bound),
        lower_bound_meaning=f"{plan.lower_bound_meaning}, with the region in {split.slices} slices",
    )
