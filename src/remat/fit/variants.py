"""One step written in several ways, such as with loops that keep less: the cheapest plan over all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.core.simulator import simulate
from remat.fit.request import Request
from remat.planning.find import find_again

_AROUND: Final = 8
"""So many variants before the first that fits are looked at, too. A menu is ordered by the bytes of a model, and real
peaks rise and fall along it: of two layers of an LSTM at 40 and 30 %, variants three and six places before the first
that was found fit, too, and take 5 and 11 % less time. A judgement; each takes a trace of some 20 ms."""

_FAR_OVER: Final = 1.25
"""No further than to one that needs so many times the budget. A judgement: along that menu the peaks that lie between
such variants are 24 % above the budget at most, and a menu without them is left after one to four traces."""

_BEHIND: Final = 4
"""So many variants behind the first that fits are looked at as well: seconds fall along a menu, too, where chunks have
another length. Of eight layers of an LSTM in a loop over layers at 40 %, the first that fits takes 31 % more than the
plain step, and the fourth 20. A judgement, as above."""

_SMALLEST_TIME_S: Final = 1e-300  # In place of a plain step that takes no time, by which nothing can be divided.


class Way(Protocol):
    """One way to write a step."""

    @property
    def graph(self) -> Graph:
        """The step, written in this way."""

    @property
    def graph_to_plan(self) -> Graph:
        """The graph in which what is held may not run twice."""


_W = TypeVar("_W", bound=Way)


class Variants(Sequence[_W], Generic[_W]):
    """Variants that are made when they are asked for: the function as it is, then those whose loops leave less.

    Args:
        makers: make the variants, in this order; each is called once at most.
        suggested: numbers of variants that are tried as they are, whatever the trace says of their bytes.
        aside: make further variants, which have no place in the order and are not planned with the others.
        is_sorted: does each of them but the first take longer than those before it, whatever it needs?

    Attributes:
        suggested: as above.
        is_sorted: likewise.
        makers_aside: ``aside``, each of which makes its variant once at most.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], _W]],
        suggested: Sequence[int] = (),
        aside: Sequence[Callable[[], _W]] = (),
        *,
        is_sorted: bool = False,
    ) -> None:
        self._makers = tuple(makers)
        self.is_sorted = is_sorted
        self.makers_aside = tuple(map(functools.cache, aside))
        self.suggested = tuple(suggested)
        self._made: dict[int, _W] = {}
        self._peaks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        place = range(len(self))[number]
        if place not in self._made:
            self._made[place] = self._makers[place]()
        return self._made[place]

    def changed(self, change: Callable[[_W], _W]) -> Variants[_W]:
        """The same variants, each changed when it is asked for."""
        makers = [partial(lambda place: change(self[place]), place) for place in range(len(self))]
        aside = [partial(lambda make: change(make()), make) for make in self.makers_aside]
        return Variants(makers, self.suggested, aside, is_sorted=self.is_sorted)

    def as_it_is(self, number: int) -> Plan:
        """The plan that runs a variant with nothing recomputed."""
        plan = _plain(self[number].graph, "none")
        return plan if number == 0 else beside(plan, self[0].graph.time_s)

    def aside(self, planner: str) -> Iterator[Plan]:
        """The plans that run the variants aside as they are, by the name of who wrote them so."""
        for make in self.makers_aside:
            yield beside(_plain(make().graph, planner), self[0].graph.time_s)

    def first_within(self, budget_bytes: int) -> int:
        """Number of the variant that keeps the most and fits as it is; the number of variants where none fits.

        Each variant needs less than those before it, apart from the first and from neighbours that differ by little,
        so few of them have to be made.
        """
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.fits(middle, budget_bytes):
                high = middle
            else:
                low = middle + 1
        return low

    def of_plan(self, plan: Plan) -> _W | None:
        """The variant that a plan is for; None where it is for none of them."""
        return next((one for one in self._likeliest_first(plan) if one.graph.fingerprint == plan.fingerprint), None)

    def fits(self, number: int, budget_bytes: int) -> bool:
        """Does a variant need no more than so many bytes as it is?"""
        if number not in self._peaks:
            graph = self[number].graph
            self._peaks[number] = simulate(graph, graph.plain_schedule).peak_bytes
        return self._peaks[number] <= budget_bytes

    def _likeliest_first(self, plan: Plan) -> Iterator[_W]:
        made = dict(sorted(self._made.items()))
        yield from made.values()
        yield from (make() for make in self.makers_aside)
        budget_bytes = plan.budget_bytes if plan.traced_budget_bytes is None else plan.traced_budget_bytes
        near = self.first_within(budget_bytes)
        for number in sorted(range(len(self)), key=lambda one: abs(one - near)):
            if number not in made:
                yield self[number]


def _plain(graph: Graph, planner: str) -> Plan:
    return plan_for_schedule(graph, graph.plain_schedule, planner=planner)


def cheapest_plan(
    variants: Variants[_W], budget_bytes: int, request: Request, time_limit_s: float | None, **defaults: Any
) -> Plan:
    """The cheapest plan over the variants: one whose loops keep little, or one that recomputes outside of them.

    Args:
        variants: the step in all its ways.
        budget_bytes: of the trace.
        request: its planner and options.
        time_limit_s: for each plan.
        **defaults: options of the planner that the request may overrule.

    Raises:
        InfeasibleBudget: where none is found; ``minimum_bytes`` is a budget for which one is.
    """
    first: _W = variants[0]
    plain_s = first.graph.time_s
    options = defaults | dict(request.options)

    def plan_with(variant: _W) -> Plan:
        plan = find_again(variant.graph_to_plan, budget_bytes, request.planner, time_limit_s, **options)
        plan = dataclasses.replace(plan, fingerprint=variant.graph.fingerprint)
        return plan if variant is first else beside(plan, plain_s)

    plans, errors = [], []
    for variant in _worth_planning(variants, budget_bytes):
        try:
            plans.append(plan_with(variant))
        except InfeasibleBudget as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda error: error.minimum_bytes)
    return min(plans, key=lambda plan: plan.time_s)


def beside(plan: Plan, plain_s: float) -> Plan:
    """A plan for a variant, its overhead a share of the seconds of the step as it is."""
    return dataclasses.replace(
        plan,
        baseline_time_s=plain_s,
        overhead=(plan.time_s - plain_s) / max(plain_s, _SMALLEST_TIME_S),
        lower_bound_meaning="none was sought over what loops may keep",
    )


def _worth_planning(variants: Variants[_W], budget_bytes: int) -> list[_W]:
    """The variants that may be cheapest within a budget.

    Where loops are planned, what is outside of them is worth recomputing only near the border: in the cheapest of those
    around it that fit as they are, and in the last that does not fit. What takes longer than a variant that fits cannot
    be cheaper.
    """
    found = variants.first_within(budget_bytes)
    if len(variants) == 1 or found == 0:
        return [variants[0]]
    around, behind = (0, 0) if variants.is_sorted else (_AROUND, _BEHIND)
    following = range(found, min(found + 1 + behind, len(variants)))
    fitting = [number for number in following if variants.fits(number, budget_bytes)]
    for number in range(found - 1, max(1, found - around) - 1, -1):
        if not variants.fits(number, int(_FAR_OVER * budget_bytes)):
            break
        if variants.fits(number, budget_bytes):
            fitting.append(number)
    if not fitting:
        return [variants[len(variants) - 1]]
    cheapest = min(fitting, key=lambda number: variants[number].graph.time_s)
    others = {n - 1 for n in (cheapest, found) if n > 1} - {cheapest}
    limit_s = variants[cheapest].graph.time_s
    return [variants[cheapest], *(variants[n] for n in sorted(others) if variants[n].graph.time_s < limit_s)]
