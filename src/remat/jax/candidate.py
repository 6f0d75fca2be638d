"""A traced function as ``remat.fit`` sees it: the search for the cheapest plan over all ways to write the function."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Final

import jax

from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.core.simulator import simulate
from remat.fit.candidate import Candidate
from remat.fit.fit import fit
from remat.fit.loop import Rounds
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.fit.variants import Variants
from remat.fit.variants import cheapest_plan as cheapest_of_variants
from remat.jax.blocks import plans_of_blocks, with_regions
from remat.jax.peak import REFUSED
from remat.jax.trace.program import Program, name_of
from remat.jax.variants import Variant, profile_here
from remat.planners.replay.improve import without_idle_runs
from remat.planners.view.problem import Problem
from remat.planning.checkpoints import plan_with_checkpoints
from remat.running import fresh_memory
from remat.running.step_time import step_time_s
from remat.running.usable_cache import usable_cache_bytes

_log = logging.getLogger("remat")

AUTO_PLANNER: Final = "auto"

_LEAST_GAIN: Final = 0.03
"""The share of the step's time that one more round must be able to win. A judgement: a round costs a fourth to a half
of the plain program's compile time, and predicted times are further off than that."""

_AIM: Final = 0.98
"""Of a budget that the last plan did not keep, the next guess aims at this share. On a vision transformer at 60 % and
in the bytes of ``jax.checkpoint``, guesses at the budget itself missed it by .1 and 1 %, and cost a round more."""

_SHOWN: Final = 8  # Names in an error, which is one line.


class FunctionCandidate(Candidate):
    """A function in all its variants.

    Args:
        variants: the function as it is, then others by what their loops keep, most first.
        compiled_peak: the peak of the program that a plan for one of the variants leads to.
        traced: the variants before donation. A plan made from a trace, which knows of no donation, is for one of them.
    """

    rounds = Rounds(5, 6, _LEAST_GAIN, _AIM, by_share=True)
    is_compiled = True
    samples_of_bound = 1
    """With 4 the bound of one of four models of the zoo rose by .5 points, those of the others not at all, and took
    five to nine times as long: a twentieth of the plain program's compile time. With 16, up to a third."""

    def __init__(
        self,
        variants: Variants[Variant],
        compiled_peak: Callable[[Plan], PeakRange],
        traced: Variants[Variant] | None = None,
    ) -> None:
        self._variants = variants
        self._compiled_peak = compiled_peak
        self._traced = variants if traced is None else traced

    @property
    def graph(self) -> Graph:
        """The function as it is."""
        plain: Variant = self._variants[0]
        return plain.graph

    @property
    def program(self) -> Program:
        """The function as it is, as a program."""
        plain: Variant = self._variants[0]
        return plain.program

    @cached_property
    def plain_peak(self) -> PeakRange:
        """The peak of the compiled function with nothing recomputed."""
        return self.real_peak(plan_for_schedule(self.graph, self.graph.plain_schedule, planner="none"))

    def real_peak(self, plan: Plan) -> PeakRange:
        """The peak of the program that a plan leads to."""
        return self._compiled_peak(plan)

    def expected_time_s(self, plan: Plan | None) -> float | None:
        """On a CPU, seconds with what is in caches and the pages of the block between arguments and results.

        Args:
            plan: whose run; None for the plain step's.
        """
        if jax.default_backend() != "cpu":
            return None
        profile = profile_here()
        graph = self.graph if plan is None else self.graph_of(plan)
        schedule = graph.plain_schedule if plan is None else plan.schedule
        peak = self.plain_peak if plan is None else self.real_peak(plan)
        fetched_bytes = fresh_memory.fetched_bytes([peak.block_bytes])
        time_s = step_time_s(graph, schedule, profile, cached_bytes=usable_cache_bytes())
        return time_s + fetched_bytes / profile.fresh_rate

    def find(self, budget_bytes: int, request: Request) -> Plan:
        """The cheapest plan over the variants."""
        return cheapest_plan(self._variants, budget_bytes, request)

    def suggestions(self) -> Iterator[Plan]:
        """The user's own regions under ``jax.checkpoint``, and those of the blocks of the step."""
        variant: Variant = self._variants[0]
        if variant.held:
            return  # These plans know nothing of what the user wants to be kept.
        yield from self._variants.aside("jax.checkpoint")
        graph, problem = variant.graph, Problem.of(variant.graph)
        own = [(at, again) for at, again in variant.program.regions if at > variant.turning_point]
        if own:
            schedule = without_idle_runs(problem, with_regions(graph, own))
            yield plan_for_schedule(graph, schedule, planner="jax.checkpoint")
        yield from plans_of_blocks(graph, problem)

    def likely(self) -> Iterator[Plan]:
        """The bodies of all loops as under ``jax.checkpoint``."""
        if not self._variants[0].held:
            yield from map(self._variants.as_it_is, self._variants.suggested)

    def graph_of(self, plan: Plan) -> Graph:
        """The graph of the variant that a plan is for."""
        return self.variant_of(plan).graph

    def recognises(self, plan: Plan) -> bool:
        """Is a plan for one of the variants?"""
        return self._variant_of(plan) is not None

    def variant_of(self, plan: Plan) -> Variant:
        """The variant that a plan is for."""
        found = self._variant_of(plan)
        assert found is not None, "the plan was made for one of the variants"
        return found

    def _variant_of(self, plan: Plan) -> Variant | None:
        found = self._variants.of_plan(plan)
        return found if found is not None or self._traced is self._variants else self._traced.of_plan(plan)

    def first_guess(self, target_bytes: int) -> int:
        """The planner's budget, if fusion does to the plan what it does to the plain step.

        Arguments and captured arrays are counted alike by the trace and by the compiler, so they are left out. What
        fusion saves of the plain step is not reckoned with: ties end kernels, so little of it is left in a plan.
        """
        traced_bytes = simulate(self.graph, self.graph.plain_schedule).peak_bytes
        compiled_bytes = self.plain_peak.highest_bytes
        pinned = self.graph.pinned_bytes if self.graph.pinned_bytes < min(compiled_bytes, target_bytes) else 0
        guess = pinned + int((target_bytes - pinned) * (traced_bytes - pinned) / max(1, compiled_bytes - pinned))
        return min(guess, target_bytes)

    def planned(self, request: Request, share_of_bytes: int | None = None) -> Plan:
        """The plan that a request asks for: the given one, the one that its checkpoints make, or one within its budget.

        Args:
            request: its ``known`` plan is followed where it is for this function.
            share_of_bytes: as in ``remat.fit.fit.fit``.

        Raises:
            InfeasibleBudget: where no schedule fits; it names the smallest budget.
            PlanMismatch: where ``request.plan`` is for another function.
            UnsupportedStep: where the checkpoints name nothing, or lead to a program that sends too much.
        """
        given = request.plan if request.plan is not None else request.known
        if given is not None and self._variant_of(given) is not None:
            return given
        if request.plan is not None:
            request.plan.check_graph(self.graph)
            raise AssertionError("unreachable: a plan for none of the variants is refused above")
        if request.checkpoints is not None and request.budget is None:
            return self._plan_with_names(request.checkpoints, share_of_bytes)
        if request.hints:
            with contextlib.suppress(InfeasibleBudget):
                return fit(self._holding(request.hints), request, share_of_bytes=share_of_bytes)
            _log.warning(
                "The budget %s cannot be kept together with the checkpoints %s, so the plan may recompute these, too.",
                request.budget,
                ", ".join(request.hints),
            )
        return fit(self, request, share_of_bytes=share_of_bytes)

    def _holding(self, names: Sequence[str]) -> FunctionCandidate:
        """The function with values of these names kept, whatever a plan does."""

        def held(variant: Variant) -> Variant:
            graph = variant.graph
            roots = {graph.roots[value] for value in values_with_names(variant.program, names)}
            makers = (n for n, op in enumerate(graph.ops) if any(graph.roots[value] in roots for value in op.outputs))
            return dataclasses.replace(variant, held=frozenset(makers))

        return FunctionCandidate(self._variants.changed(held), self._compiled_peak, self._traced)

    def _plan_with_names(self, names: Sequence[str], share_of_bytes: int | None) -> Plan:
        plain = self._variants[0]
        plan = plan_with_names(plain.program, plain.graph, names)
        peak = self.real_peak(plan)
        if peak == REFUSED:
            raise UnsupportedStep(
                f"recomputing all but {', '.join(names)} sends more between the devices than the plain step; give a "
                "budget, which recomputes no such thing"
            )
        return dataclasses.replace(
            plan,
            traced_peak_bytes=plan.peak_bytes,
            peak_bytes=peak.expected_bytes,
            budget_bytes=peak.highest_bytes,
            baseline_peak_bytes=self.plain_peak.expected_bytes if share_of_bytes is None else share_of_bytes,
        )


def cheapest_plan(variants: Variants[Variant], budget_bytes: int, request: Request) -> Plan:
    """The cheapest plan over the variants: one whose loops keep little, or one that recomputes outside of them.

    Raises:
        InfeasibleBudget: where none is found; ``minimum_bytes`` is a budget for which one is.
    """
    # Each round also compiles, and the compiler's fusion changes more than a thorough search would win.
    defaults = {"thorough": False} if request.planner == AUTO_PLANNER else {}
    return cheapest_of_variants(variants, budget_bytes, request, request.time_limit_s, **defaults)


def plan_with_names(program: Program, graph: Graph, names: Collection[str]) -> Plan:
    """The plan that keeps the values of these names; its figures are those of the trace.

    Raises:
        UnsupportedStep: where a name is given to no value of the program.
    """
    return plan_with_checkpoints(graph, values_with_names(program, names))


def values_with_names(program: Program, names: Collection[str]) -> list[int]:
    """Ids of the values to which ``jax.ad_checkpoint.checkpoint_name`` gave one of these names.

    Raises:
        UnsupportedStep: where a name is given to no value of the program.
    """
    named: dict[str, list[int]] = {}
    for equation in (equation for instruction in program.instructions for equation in instruction.equations):
        if (given := name_of(equation)) is not None:
            named.setdefault(given, []).append(equation.outputs[0])
    for name in names:
        if name not in named:
            known = ", ".join(sorted(named)[:_SHOWN]) or "none"
            raise UnsupportedStep(
                f"the checkpoint {name!r} names no value that the gradients need (named there: {known}); name values "
                "on the way from the arguments to the loss with jax.ad_checkpoint.checkpoint_name, outside of loops"
            )
    return [value for name in names for value in named[name]]
