"""The cheapest plan among those for a step as it is, and for the step with a region in more and more slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Final

from remat.core.budget import parse_budget
from remat.core.errors import InfeasibleBudget
from remat.core.plan import NOT_PROVED, Plan, Split
from remat.fit.candidate import Candidate
from remat.fit.fit import fit, fits_plainly
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


def fit_with_splits(
    candidate: Candidate,
    request: Request,
    variant: Callable[[int], Variant | None],
    with_inner_layers: Callable[[int], Variant | None] | None = None,
    *,
    share_of_bytes: int | None = None,
    proves: bool = True,
) -> Plan:
    """The cheapest plan found within the budget of a request, of the step as it is or with a region in slices.

    The fewest slices, of 2, 4, 8 and so on, with which the step keeps the budget and recomputes nothing are one
    candidate; half as many, with recomputations, and the step as it is are the others. A share of a budget is one of
    the plain step without a split, and so are the plan's baselines.

    Args:
        candidate: the step as it is.
        request: with a budget; its levers say whether ops may run again.
        variant: the step with its region in so many slices; None where the region is not to be cut so often.
        with_inner_layers: the same with inner layers in slices as well, where a front end can do that. They compute
            their forward part twice, so they are cut where no other plan fits.
        share_of_bytes: as ``remat.fit.fit.fit`` takes it.
        proves: is the plan's bound wanted? A choice between several steps leaves it out; ``proved`` adds it.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: if no plan fits; ``minimum_bytes`` is the smallest budget that one of these variants keeps.
    """
    if share_of_bytes is None:
        share_of_bytes = candidate.plain_peak.expected_bytes + candidate.resident_bytes
    failures: list[InfeasibleBudget] = []
    found: list[tuple[Plan, Candidate, Split | None]] = []

    budget_bytes = parse_budget(_budget_of(request), max(1, share_of_bytes))

    def look_at(variants: Iterable[tuple[Candidate, Split | None]]) -> None:
        for one, split in variants:
            try:
                plan = fit(one, request, share_of_bytes=share_of_bytes, proves=False)
                found.append((plan, one, split))
            except InfeasibleBudget as error:
                failures.append(error)

    look_at(_worth_planning(candidate, variant, budget_bytes))
    if not found and with_inner_layers is not None:
        look_at(_worth_planning(candidate, with_inner_layers, budget_bytes)[1:])
    if not found:
        raise min(failures, key=lambda error: error.minimum_bytes)
    plan, chosen, split = min(found, key=lambda one: one[0].time_s)
    if split is not None:
        plan = _beside_unsplit(plan, split, candidate.graph.time_s)
        plan = dataclasses.replace(plan, baseline_expected_time_s=candidate.expected_time_s(None))
    return proved(plan, chosen, request) if proves else plan


def proved(plan: Plan, candidate: Candidate, request: Request) -> Plan:
    """A plan of ``fit_with_splits`` with its proven bound.

    Args:
        plan: with a region in slices or without.
        candidate: the step as the plan has it.
        request: what it was made for.
    """
    if plan.split is None or plan.lower_bound_meaning != NOT_PROVED:
        return candidate.prove(plan, request)
    plain_time_s, sliced_time_s = plan.baseline_time_s, candidate.graph.time_s
    overhead = plan.time_s / sliced_time_s - 1 if sliced_time_s > 0 else 0.0
    alone = dataclasses.replace(plan, split=None, baseline_time_s=sliced_time_s, overhead=overhead)
    return _beside_unsplit(candidate.prove(alone, request), plan.split, plain_time_s)


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


def _beside_unsplit(plan: Plan, split: Split, plain_time_s: float) -> Plan:
    """The plan's overheads, as shares of the step without the split."""

    def share(overhead: float) -> float:
        time_s = plan.baseline_time_s * (1 + overhead)
        return (time_s - plain_time_s) / plain_time_s if plain_time_s > 0 else 0.0

    changed = dataclasses.replace(plan, split=split, baseline_time_s=plain_time_s, overhead=share(plan.overhead))
    if plan.lower_bound_meaning == NOT_PROVED:
        return changed
    return dataclasses.replace(
        changed,
        overhead_lower_bound=share(plan.overhead_lower_bound),
        lower_bound_meaning=f"{plan.lower_bound_meaning}, with the region in {split.slices} slices",
    )
