"""A budget -> a plan that fits what really runs: baseline, search, figures, and the error where nothing fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from remat.core.budget import format_bytes, parse_budget
from remat.core.collecting import collecting_rarely
from remat.core.errors import InfeasibleBudget
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.fit.candidate import Candidate
from remat.fit.loop import NothingFits, plan_within
from remat.fit.plan_cache import Entry
from remat.fit.request import Request

# A smallest budget that holds here alone is named where it is less by this share at least. A judgement.
_LITTLE_LESS: Final = 0.01

# Within a larger budget more is seen around, which may ask for a larger one still. A judgement.
_MOST_LOOKS: Final = 4


@collecting_rarely()
def fit(candidate: Candidate, request: Request, *, share_of_bytes: int | None = None, proves: bool = True) -> Plan:
    """The cheapest plan found whose real peak stays within the budget of a request.

    Args:
        candidate: the step as it would run.
        request: with a budget in bytes or as a share; "auto" has been turned into bytes before.
        share_of_bytes: what "60%" is a share of; None for the plain peak of the candidate, what is resident counted.
            A micro-batch passes the plain peak of the whole batch.
        proves: is the plan's bound wanted, and what more work makes cheaper? A choice between several steps leaves both
            out, and proves the chosen one.

    Returns:
        The plan. Its ``peak_bytes`` and ``baseline_peak_bytes`` are what the device is expected to show, resident bytes
        counted; ``traced_budget_bytes`` is what the planner was given.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: if nothing fits; ``minimum_bytes`` is the smallest budget for which this succeeds. Where the
            request's levers leave out "recompute", only a step that fits as it is does.
    """
    assert request.budget is not None, "a request without a budget is not fitted"
    plain = candidate.plain_peak
    resident_bytes = candidate.resident_bytes
    if share_of_bytes is None:
        share_of_bytes = plain.expected_bytes + resident_bytes
    # The plain peak of a step without a tensor is 0, and it keeps any budget.
    budget_bytes = parse_budget(request.budget, max(1, share_of_bytes))
    is_plain = fits_plainly(candidate, budget_bytes)
    if not is_plain and "recompute" not in request.levers:
        plain_bytes = candidate.smallest_budget(plain.highest_bytes)
        raise infeasible(budget_bytes, plain_bytes, "the step with nothing recomputed, as levers= asks for")
    if not is_plain and not request.is_cautious:
        candidate.looks_around(budget_bytes)
    entry = Entry.of(candidate, request, budget_bytes, share_of_bytes, proves)
    earlier = entry.plan(candidate, budget_bytes)
    if earlier is not None:
        return _with_expected_time(earlier, candidate)
    if is_plain:
        graph = candidate.graph
        found = candidate.find(max(1, simulate(graph, graph.plain_schedule).peak_bytes), request)
        found = dataclasses.replace(found, peak_bytes=plain.expected_bytes)
    else:
        found = _found_here(candidate, request, budget_bytes, proves=proves)
    found = dataclasses.replace(found, traced_budget_bytes=found.budget_bytes)
    if candidate.is_compiled:
        traced = simulate(candidate.graph_of(found), found.schedule)
        found = dataclasses.replace(found, traced_peak_bytes=traced.peak_bytes)
    if proves:
        found = candidate.prove(found, request)
    found = dataclasses.replace(
        found,
        peak_bytes=found.peak_bytes + resident_bytes,
        baseline_peak_bytes=share_of_bytes,
        budget_bytes=budget_bytes,
    )
    entry.keep(found)
    return _with_expected_time(found, candidate)


def _found_here(candidate: Candidate, request: Request, budget_bytes: int, *, proves: bool) -> Plan:
    """What is found for what was seen around, or else without that, where it is expected to keep the budget here, too.

    Raises:
        InfeasibleBudget: if nothing is; what is named holds here, and says so where less or more does elsewhere.
    """
    target_bytes = candidate.target_bytes(budget_bytes)
    refusals: list[InfeasibleBudget] = []
    found: list[Plan] = []
    while not found and (not refusals or candidate.looks_around(None)):
        try:
            found.append(_searched(candidate, request, target_bytes))
        except InfeasibleBudget as error:
            refusals.append(error)
    if found and proves:
        found.insert(0, _polished(found[0], candidate, request, target_bytes))
    if not refusals:
        return found[0]
    smallest = [error.plan for error in refusals if isinstance(error, NothingFits)]
    kept = _kept_here(candidate, [*found, *smallest], budget_bytes) if found else None
    if kept is not None:
        return kept
    plain_bytes = candidate.plain_peak.highest_bytes
    named = [candidate.smallest_budget(min(one.minimum_bytes, plain_bytes)) for one in refusals]
    # Where a plan was found, it keeps the budget elsewhere, and the one that holds here is larger.
    anywhere_bytes, least_bytes = (budget_bytes, named[0]) if found else (named[-1], named[-1])
    if not request.is_cautious:
        least_bytes = _least_here(candidate, smallest, least_bytes)
    # Less than what is named may hold here, too; if that does not, more does.
    here_bytes = least_bytes if least_bytes > anywhere_bytes else min(named[0], anywhere_bytes)
    raise infeasible(budget_bytes, anywhere_bytes, refusals[-1].binding_op, here_bytes=here_bytes)


def _kept_here(candidate: Candidate, plans: Sequence[Plan], budget_bytes: int) -> Plan | None:
    """The first of some plans that is expected to keep a budget with what is seen around; the first if nothing is."""
    if not candidate.looks_around(budget_bytes):
        return plans[0]
    kept = None
    for plan in plans:
        expected_bytes = candidate.real_peak(plan).expected_bytes
        if expected_bytes + candidate.resident_bytes <= budget_bytes:
            kept = plan if plan is plans[0] else dataclasses.replace(plan, peak_bytes=expected_bytes)
            break
    candidate.looks_around(None)
    return kept


def _least_here(candidate: Candidate, plans: Sequence[Plan], budget_bytes: int) -> int:
    """A budget, or the next larger one that one of some plans is expected to keep with what is seen around."""
    for _ in range(_MOST_LOOKS if plans else 0):
        if not candidate.looks_around(budget_bytes):
            break
        peaks = [candidate.real_peak(plan) for plan in plans]
        if min(peak.expected_bytes for peak in peaks) + candidate.resident_bytes <= budget_bytes:
            break
        budget_bytes = candidate.smallest_budget(min(peak.highest_bytes for peak in peaks))
    candidate.looks_around(None)
    return budget_bytes


def _searched(candidate: Candidate, request: Request, target_bytes: int) -> Plan:
    if candidate.is_exact:
        # To plan for the smallest budget, too, would find no smaller one, and take twice as long as this search.
        return candidate.find(max(1, target_bytes), request)
    return plan_within(
        target_bytes,
        candidate.first_guess(target_bytes),
        lambda planner_budget: candidate.find(planner_budget, request),
        candidate.real_peak,
        candidate.rounds,
        candidate.suggestions,
        candidate.likely,
        # Elsewhere it was not compared with runs in this place.
        candidate.expected_time_s if candidate.is_compiled else None,
        lambda plan: candidate.squeezed(plan, target_bytes, request),
        candidate.order_time_s,
    )


def _polished(found: Plan, candidate: Candidate, request: Request, target_bytes: int) -> Plan:
    """The plan, or a cheaper one that fits, too, and that more work finds than each round of the loop is worth."""
    budget_bytes = found.budget_bytes
    if found.one_by_one:
        # Its real peak grows with that of its tensors, byte by byte.
        budget_bytes += max(0, target_bytes - candidate.real_peak(found).highest_bytes)
    for _ in range(candidate.polishes):
        better = candidate.polished(found, budget_bytes, request)
        if better is None or better.time_s >= found.time_s:
            break
        peak = candidate.real_peak(better)
        over_bytes = peak.highest_bytes - target_bytes
        changed = better if over_bytes <= 0 else candidate.squeezed(better, target_bytes, request)
        if changed is not None and changed.time_s < found.time_s:
            peak = peak if changed is better else candidate.real_peak(changed)
            if peak.highest_bytes <= target_bytes:
                return dataclasses.replace(changed, peak_bytes=peak.expected_bytes)
        budget_bytes -= over_bytes
    return found


def _with_expected_time(plan: Plan, candidate: Candidate) -> Plan:
    """The plan with what runs are expected to take, which depends on the machine and is kept in no file."""
    ours, plain = candidate.expected_time_s(plan), candidate.expected_time_s(None)
    return dataclasses.replace(plan, expected_time_s=ours, baseline_expected_time_s=plain)


def fits_plainly(candidate: Candidate, budget_bytes: int) -> bool:
    """Does the step keep a budget with nothing recomputed, as a plan would have to?"""
    highest_bytes = candidate.plain_peak.highest_bytes
    return highest_bytes <= candidate.target_bytes(budget_bytes) or not highest_bytes


def infeasible(
    budget_bytes: int, minimum_bytes: int, binding_op: str, *, here_bytes: int | None = None
) -> InfeasibleBudget:
    """The error for a budget that cannot be kept, restating the figures.

    Args:
        budget_bytes: the budget.
        minimum_bytes: the smallest that can be kept.
        binding_op: what needs that.
        here_bytes: the smallest as long as what is around stays as it is; more than the other one, it is the one that
            holds.
    """
    other = ""
    if here_bytes is not None and here_bytes < (1 - _LITTLE_LESS) * minimum_bytes:
        other = f", or {here_bytes} ({format_bytes(here_bytes)}) while memory lies as it does in this process now"
    elif here_bytes is not None and here_bytes > minimum_bytes:
        other = (
            f" while memory lies in pieces as it does in this process now, where {minimum_bytes} "
            f"({format_bytes(minimum_bytes)}) may do in a new one"
        )
        minimum_bytes = here_bytes
    return InfeasibleBudget(
        f"no schedule within {budget_bytes} bytes ({format_bytes(budget_bytes)}) was found: the smallest budget that "
        f"can be kept is {minimum_bytes} bytes ({format_bytes(minimum_bytes)}){other}. What binds there is "
        f"{binding_op}. Ask for at least that, make the batch smaller, or try another planner",
        minimum_bytes=minimum_bytes,
        budget_bytes=budget_bytes,
        binding_op=binding_op,
    )
