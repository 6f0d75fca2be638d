"""What a schedule of a traced function really takes: on TensorFlow's executor, and as a program compiled by XLA."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf

from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.fit.candidate import Candidate
from remat.fit.loop import Rounds
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.fit.variants import Variants, beside, cheapest_plan
from remat.planning.find import find
from remat.planning.improve import improved, squeezed
from remat.running.step_time import step_time_s
from remat.running.usable_cache import usable_cache_bytes
from remat.tensorflow import _private
from remat.tensorflow.emit.emit import emit
from remat.tensorflow.loops.variants import Variant
from remat.tensorflow.peak import reserves
from remat.tensorflow.peak.allocator import AllocatorModel
from remat.tensorflow.peak.carried_out import carried_out
from remat.tensorflow.peak.compiled_memory import program_memory
from remat.tensorflow.peak.device import current_device, profile_here
from remat.tensorflow.peak.sounding import free_chunks
from remat.tensorflow.peak.spans import alone_time_s, order_time_s, span_starts
from remat.tensorflow.trace.func_graph import FunctionToPlan, TracedStep
from remat.tensorflow.trace.threads import executor_threads, kernel_threads

_CLOSE: Final = 0.02
"""A plan that leaves less than this share of its target unused ends the search. A judgement: a round takes a second,
and peaks of plans that differ by less are chance."""

_LEAST_GAIN: Final = 0.005
"""The share of a step's time that a further round must be able to win. A judgement: rounds take up to a second, and a
ViT's first step at 40 % took 11 s over four of them that won 1 %."""

_RESIDENT_VARIES: Final = 0.02
"""How much more the smallest budget of an error names.

What is resident is counted in chunks, which differ between two traces of one function. A judgement. Too small, asking
for the budget that the error names may fail again; too large, the error names more than is needed.
"""

_AUTO_PLANNER: Final = "auto"  # The only one that can be told to search less thoroughly.

_JUST_BELOW: Final = 1.05
"""Up to so many times a budget, what the function needs in one order it may not need in another.

Measured: of eight traced models the smallest peaks that are found in the new order are 2.5 % higher at most.
"""

_AROUND_A_LOOP: Final = 0.01
"""What the program around a loop adds to the loop's own block of memory, as a share of it; 0.2 % was measured."""


def _is_quick(request: Request) -> bool:
    """Are rounds quick searches? Not where the user limits their time, or names another planner.

    No clock ends a quick search: .1 to 2.4 s of processor time on eleven steps of 971 to 7,247 operations. With one of
    a second each, a machine with three more things to do planned a Transformer of 4 blocks in a quarter of its peak at
    121 % of extra time in place of 45, and GPT-2 at 40 % at 23.5 in place of 18.4.
    """
    return request.planner == _AUTO_PLANNER and request.time_limit_s is None


def _defaults(request: Request) -> dict[str, Any]:
    """Options of the planner in a round; the user's go before them."""
    return {"thorough": False} if _is_quick(request) else {}


class FunctionCandidate(Candidate):
    """A function as it would run on this device.

    Args:
        step: the traced function.
        allocator: how the device counts.
        resident_bytes: device memory in use that the function does not know of.
    """

    reserve = reserves.UNSEEN

    def __init__(self, step: TracedStep, allocator: AllocatorModel, resident_bytes: int) -> None:
        self.step = step
        self.resident_bytes = resident_bytes
        self._allocator = allocator

    @property
    def graph(self) -> Graph:
        """The function's joint graph."""
        return self.step.graph

    def variant_of(self, plan: Plan) -> Variant:
        """The way to write the function that a plan is for.

        Raises:
            PlanMismatch: where it is for another function.
        """
        plan.check_graph(self.graph)
        return Variant(self.step)

    def find(self, budget_bytes: int, request: Request) -> Plan:
        """The planner's plan within a budget of the trace, found with little work."""
        options = _defaults(request) | dict(request.options)
        return find(self.graph, budget_bytes, request.planner, request.time_limit_s, **options)

    def polished(self, plan: Plan, budget_bytes: int, request: Request) -> Plan | None:
        """A cheaper plan within a budget of the trace, near the one that the rounds have found."""
        if not _is_quick(request):
            return None
        graph = self.variant_of(plan).graph_to_plan
        return self._of_variant(plan, improved(graph, plan, budget_bytes, self._room(plan, budget_bytes)))

    def _room(self, plan: Plan, budget_bytes: int) -> dict[int, int]:
        """By operation, bytes of a budget of the trace that have to stay free beside it, as far as that is known."""
        return {}

    def _of_variant(self, plan: Plan, changed: Plan | None) -> Plan | None:
        """What was made of a plan, for the variant that the plan is for."""
        if changed is None:
            return None
        changed = dataclasses.replace(changed, fingerprint=plan.fingerprint, one_by_one=plan.one_by_one)
        return changed if plan.fingerprint == self.graph.fingerprint else beside(changed, self.graph.time_s)

    def smallest_budget(self, peak_bytes: int) -> int:
        """The budget that has to be asked for so that a real peak fits, with what varies from trace to trace."""
        return int((peak_bytes + self.resident_bytes) * (1 + self.reserve + _RESIDENT_VARIES)) + 2


class ExecutedFunction(FunctionCandidate):
    """A function whose operations are run one by one; its peak is what the model of the allocator makes of them.

    Args:
        variants: the function as it is, then with loops that keep less and less.
        allocator: how the device counts.
        resident_bytes: device memory in use that the function does not know of.
    """

    rounds = Rounds(6, 4, least_gain=_LEAST_GAIN, close_enough=_CLOSE, between=6, squeezes=3, one_by_one=2)
    polishes = 2

    def __init__(self, variants: Variants[Variant], allocator: AllocatorModel, resident_bytes: int) -> None:
        super().__init__(variants[0].step, allocator, resident_bytes)
        self._variants = variants
        # By the fingerprint of a variant, how it is run, and the operation: the most bytes of a schedule's own at its
        # runs, so that no run that was seen is over the target.
        self._most: dict[tuple[str, bool], dict[int, int]] = {}

    def find(self, budget_bytes: int, request: Request) -> Plan:
        """The cheapest plan over the variants, found with little work.

        Where a budget is just below what they need, one for the function in the order in which it was written: the
        smallest peaks of both orders differ by a few per cent in either direction.
        """
        options = _defaults(request)
        try:
            return cheapest_plan(self._variants, budget_bytes, request, request.time_limit_s, **options)
        except InfeasibleBudget as error:
            if error.minimum_bytes > _JUST_BELOW * budget_bytes or not self._variants.makers_aside:
                raise
            as_written = Variants(self._variants.makers_aside)
            with contextlib.suppress(InfeasibleBudget):
                return cheapest_plan(as_written, budget_bytes, request, request.time_limit_s, **options)
            raise

    def recognises(self, plan: Plan) -> bool:
        """Is a plan for one of the variants?"""
        return self._variants.of_plan(plan) is not None

    def graph_of(self, plan: Plan) -> Graph:
        """The graph of the variant that a plan is for."""
        return self.variant_of(plan).graph

    def variant_of(self, plan: Plan) -> Variant:
        """The variant that a plan is for.

        Raises:
            PlanMismatch: where it is for another function.
        """
        found: Variant | None = self._variants.of_plan(plan)
        if found is None:
            plan.check_graph(self.graph)
            raise AssertionError("unreachable: a plan for none of the variants is refused above")
        return found

    @functools.cached_property
    def plain_peak(self) -> PeakRange:
        """The peak of the function as it is."""
        graph = self._variants[0].as_written
        return self._allocator.peak_range(graph, graph.plain_schedule)

    def real_peak(self, plan: Plan) -> PeakRange:
        """The peak of the function under a plan."""
        peak = self._allocator.peak_range(self.graph_of(plan), self._runs(plan), plan.one_by_one, self._handed_in(plan))
        is_sure = plan.one_by_one or peak.highest_bytes == peak.expected_bytes
        if not is_sure or not self._allocator.steps_are_alike(self.graph_of(plan)):
            return peak
        # A target leaves the whole reserve of its budget, of which such a plan needs less.
        unseen = reserves.UNSEEN_ONE_BY_ONE if plan.one_by_one else reserves.UNSEEN_OF_LIKE_STEPS
        return dataclasses.replace(peak, highest_bytes=int(peak.highest_bytes * (1 + unseen) / (1 + self.reserve)))

    def _handed_in(self, plan: Plan) -> frozenset[int]:
        """What is no variable's: the batch, which lies elsewhere at each step."""
        step = self.variant_of(plan).step
        roots = {step.graph.roots[tensor] for tensor in step.graph.inputs}
        return frozenset(root for root in roots if step.tensors[root].dtype != tf.resource)

    def _runs(self, plan: Plan) -> Schedule:
        return carried_out(self.variant_of(plan).step, plan.schedule)

    def order_time_s(self, plan: Plan) -> float | None:
        """Seconds that a run takes longer one by one, where all steps are alike then.

        Kernels that are cut into fewer pieces than there are threads leave cores idle with none beside them.
        """
        graph = self.graph_of(plan)
        if kernel_threads() < executor_threads() or not self._allocator.steps_are_alike(graph):
            return None
        return order_time_s(graph, self._runs(plan), executor_threads())

    def squeezed(self, plan: Plan, target_bytes: int, request: Request) -> Plan | None:
        """A plan that leaves room where runs of another one are over the target, near that one."""
        if not _is_quick(request) or self._allocator.holes is None:
            return None
        graph = self.variant_of(plan).graph_to_plan
        if plan.one_by_one:
            target_bytes = int(target_bytes * (1 + self.reserve) / (1 + reserves.UNSEEN_ONE_BY_ONE))
        most = self._most.setdefault((plan.fingerprint, plan.one_by_one), {})
        over_at = self._allocator.over_at(graph, self._runs(plan), target_bytes, plan.one_by_one, self._handed_in(plan))
        for op, added_bytes in over_at.items():
            most[op] = min(most.get(op, target_bytes), target_bytes - added_bytes)
        budget_bytes = simulate(graph, plan.schedule).peak_bytes
        return self._of_variant(plan, squeezed(graph, plan, budget_bytes, self._room(plan, budget_bytes)))

    def _room(self, plan: Plan, budget_bytes: int) -> dict[int, int]:
        """By operation, what it leaves of a budget of the trace so that no run that was seen is over the target."""
        most = self._most.get((plan.fingerprint, plan.one_by_one), {})
        return {op: budget_bytes - bytes_ for op, bytes_ in most.items() if bytes_ < budget_bytes}

    def looks_around(self, budget_bytes: int | None) -> bool:
        """Look which holes the heap has now; without that, plans are for heaps with any past."""
        before, holes = self._allocator.holes, None
        self._most.clear()
        if budget_bytes is not None:
            device = current_device()
            holes = free_chunks(device, int(budget_bytes / (1 + self.reserve)) - device.in_use_bytes)
        self._allocator = dataclasses.replace(self._allocator, holes=holes, threads=executor_threads())
        return holes != before

    def expected_time_s(self, plan: Plan | None) -> float | None:
        """On a CPU, seconds with what is in caches; TensorFlow keeps its heap, so that no page is fetched anew.

        On several threads, seconds of the clock as far as plans differ in them: what runs alone counts more.

        Args:
            plan: whose run; None for the plain step's.
        """
        if current_device().is_gpu:
            return None
        graph = self._variants[0].as_written if plan is None else self.graph_of(plan)
        schedule = graph.plain_schedule if plan is None else self._runs(plan)
        time_s = step_time_s(graph, schedule, profile_here(), cached_bytes=usable_cache_bytes())
        if min(kernel_threads(), executor_threads()) == 1:
            return time_s
        starts = (0,) if schedule == graph.plain_schedule else span_starts(graph, schedule)
        time_s += alone_time_s(graph, schedule, starts)
        if plan is not None and plan.one_by_one:
            time_s += order_time_s(graph, schedule, executor_threads())
        return time_s


class CompiledFunction(FunctionCandidate):
    """A function that XLA compiles; its peak is that of the program that XLA makes of a copy of it.

    Args:
        function: the function; it stays as it is.
        step: its trace.
        allocator: how the device counts.
        resident_bytes: device memory in use that the function does not know of.
    """

    rounds = Rounds(4, 2)
    is_compiled = True

    def __init__(
        self, function: FunctionToPlan, step: TracedStep, allocator: AllocatorModel, resident_bytes: int
    ) -> None:
        super().__init__(step, allocator, resident_bytes)
        self._function = function
        self._peaks: dict[tuple[int, ...], PeakRange] = {}

    @functools.cached_property
    def plain_peak(self) -> PeakRange:
        """The peak of the program that the function is compiled to as it is."""
        return self._peak_after(lambda _: None)

    def real_peak(self, plan: Plan) -> PeakRange:
        """The peak of the program that the function is compiled to under a plan."""
        if plan.schedule not in self._peaks:

            def follow_the_plan(tensor_named: Callable[[str], tf.Tensor]) -> None:
                emit(plan, self.step.moved(tensor_named), in_xla=True)

            self._peaks[plan.schedule] = self._peak_after(follow_the_plan)
        return self._peaks[plan.schedule]

    def first_guess(self, target_bytes: int) -> int:
        """The planner's budget to begin with: fusion may leave less than half of what the trace counts."""
        traced_bytes = simulate(self.graph, self.graph.plain_schedule).peak_bytes
        return int(target_bytes * (traced_bytes / max(1, self.plain_peak.highest_bytes)))

    def _peak_after(self, change: Callable[[Callable[[str], tf.Tensor]], None]) -> PeakRange:
        """The peak once a copy of the function has been changed and compiled."""
        function = self._function
        program = _private.compiled_program(function.func_graph, function.input_shapes, change, function.carried)
        memory = program_memory(program)
        if function.carried:
            memory = memory.in_one_block(_AROUND_A_LOOP)
        return self._allocator.peak_with_blocks(self.graph, [*memory.output_bytes, *memory.temporary_bytes])
