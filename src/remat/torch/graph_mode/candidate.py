"""A joint graph as a candidate for ``remat.fit``: what the planner counts is what runs."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import torch
from torch import fx

from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan, Split, Update
from remat.core.simulator import simulate
from remat.fit.candidate import Candidate
from remat.fit.fit import fit, infeasible
from remat.fit.levers import LEAST_SAVED, MOST_EXTRA_TIME, Variant, fit_with_splits
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.planning.checkpoints import plan_with_checkpoints
from remat.running.cost_model import MEASURED, DeviceProfile, get_profile
from remat.running.step_time import step_time_s
from remat.torch._private import storage_key
from remat.torch.graph_mode import collectives, marks, nodes
from remat.torch.graph_mode.contributions import Apart, apart
from remat.torch.graph_mode.joint_step import gradient_bytes, joint_step, late_peak_bytes
from remat.torch.graph_mode.layouts import with_layouts
from remat.torch.graph_mode.program import Program, program_of
from remat.torch.graph_mode.reuse import reuse_storage
from remat.torch.graph_mode.split_joint import Splitter
from remat.torch.graph_mode.taken_gradients import Updates, UsedGradient
from remat.torch.graph_mode.timed_calls import TimedCalls
from remat.torch.trace import aot_notes, gpu_scratch
from remat.torch.trace.trace import default_profile

_LARGE: Final = 1000
"""Ops from which on a plan is not sought thoroughly at first, since a user waits for it. Measured on a GPT-2 of 24
layers (2,013 ops) at 60 %: 4.1 s in place of 11.3, for 5.56 % in place of 5.54 %. Smaller steps are planned in a few
seconds; with a larger number, the first call of a deep model takes half a minute."""


def _cublas_bytes(joint: fx.GraphModule, device_types: Iterable[str]) -> int:
    """What cuBLAS keeps on a GPU for the products of a step."""
    capability = next(filter(None, map(gpu_scratch.capability_of, device_types)), None)
    return gpu_scratch.cublas_bytes((node.target for node in joint.graph.nodes), capability)


def _constant_bytes(joint: fx.GraphModule, device_types: Collection[str]) -> int:
    """Of tensors that are a part of the captured function, such as what ``torch.tensor`` makes of numbers in it."""
    constants = (nodes.attribute_of(joint, node) for node in joint.graph.nodes if node.op == "get_attr")
    storages = [
        one.untyped_storage() for one in constants if isinstance(one, torch.Tensor) and one.device.type in device_types
    ]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def _profile_of(device: str) -> DeviceProfile:
    """A device profile; of this machine also where ``remat measure`` made none, for what cannot be timed by itself."""
    try:
        return get_profile(device)
    except FileNotFoundError:
        return get_profile("a100" if torch.cuda.is_available() else "cpu")


class GraphCandidate(Candidate):
    """A step as graph mode runs it: each operator at its place in the schedule, each tensor dropped at its last read.

    Args:
        joint: the joint graph of forward and backward pass, as AOTAutograd traced it. It is changed.
        options: those with which AOTAutograd calls a partitioner.
        resident_bytes: what lies on the device beside the step, given the bytes of the step's gradients.
        device: profile for the predicted times; with "measured", the step's calls are timed.
        early: the updates that the step is to run itself, where that is asked for.
        timed: the calls that were timed before.
    """

    is_exact = True

    def __init__(
        self,
        joint: fx.GraphModule,
        options: Mapping[str, Any],
        resident_bytes: Callable[[int], int],
        device: str | None,
        early: Updates | None = None,
        timed: TimedCalls | None = None,
    ) -> None:
        self._early = early
        self._splitters: dict[bool, Splitter] = {}
        self._known: dict[tuple[int, bool], tuple[GraphCandidate, tuple[tuple[int, int], ...]]] = {}
        nodes.with_fills(joint)
        with_layouts(joint)
        self._marked = marks.taken_out(joint)
        nodes.without_idle_views(joint, options["num_fwd_outputs"])
        joint.graph.eliminate_dead_code(lambda node: node.is_impure() or bool(nodes.statistics_of(node)))
        self._forward_outputs: int = options["num_fwd_outputs"]
        collectives.with_collectives(joint, self._forward_outputs)
        if any(collectives.is_gather(nodes.base_of(one)) for one in nodes.outputs_of(joint)):
            raise UnsupportedStep("it returns a view of a parameter under fully_shard, which is whole inside only")
        placeholders = joint.graph.find_nodes(op="placeholder")
        types = [nodes.device_of(node).type for node in placeholders]
        device = device or default_profile(next((one for one in types if one != "cpu"), "cpu"))
        self._seconds: Mapping[fx.Node, float] = {}
        self._profile = _profile_of(device)
        self._runs_on_cpu = set(types) <= {"cpu"}
        self._static: tuple[int, ...] = tuple(options.get("static_lifetime_input_indices") or ())
        self._timed = (timed or TimedCalls()) if device.lower() == MEASURED else None
        self._look_at(joint)
        self._time_calls()
        if early is not None:
            takers = [taker for _, taker in aot_notes.takers_of(joint, self._forward_outputs).values()]
            updates = [one for one in takers if isinstance(one, UsedGradient)]
            self._after_bytes, self._without_early_bytes = late_peak_bytes(
                self._step, early.scratch_bytes_together(updates)
            )
        self._leave_updates_out()
        beside_bytes = _cublas_bytes(joint, types) + _constant_bytes(joint, types)
        self.resident_bytes = resident_bytes(gradient_bytes(self._step)) + beside_bytes

    def _look_at(self, joint: fx.GraphModule) -> None:
        self._joint = joint
        self._step = joint_step(joint, self._forward_outputs, self._profile, self._static, self._seconds)
        self._plain_peak = PeakRange.exactly(simulate(self.graph, self.graph.plain_schedule).peak_bytes)

    def _time_calls(self) -> None:
        """Where the device is this machine: replace what the roofline says by what the step's calls take."""
        if self._timed is not None:
            most_bytes = self._plain_peak.expected_bytes - self.graph.pinned_bytes
            self._seconds = self._timed.of_step(self._joint, most_bytes)
            self._look_at(self._joint)

    def _leave_updates_out(self) -> None:
        """Updates that need more where they stand than they save are left to the optimizer's step."""
        while self._step.updates and self._plain_peak.expected_bytes > self._without_early_bytes:
            bytes_ = simulate(self.graph, self.graph.plain_schedule).bytes
            aot_notes.leave_out(self._step.updates[max(self._step.updates, key=bytes_.__getitem__)])
            self._look_at(self._joint)

    @property
    def graph(self) -> Graph:
        """The joint graph, an op for each operator."""
        return self._step.graph

    @property
    def _share_of_bytes(self) -> int | None:
        """What a share is a share of where that is not the plain peak, since parameters come again in plain steps."""
        order = collectives.as_fully_shard_does(self.graph, self._step.calls, self._step.first_backward)
        if order == self.graph.plain_schedule:
            return None
        return simulate(self.graph, order).peak_bytes + self.resident_bytes

    @property
    def plain_peak(self) -> PeakRange:
        """The peak with nothing recomputed."""
        return self._plain_peak

    def real_peak(self, plan: Plan) -> PeakRange:
        """The simulator's, since every allocation and release is written down."""
        return PeakRange.exactly(plan.peak_bytes)

    def expected_time_s(self, plan: Plan | None) -> float | None:
        """On a CPU, seconds of timed calls with what is in caches.

        Pages that glibc gives back and fetches anew are in no prediction. The seconds of a roofline for another CPU
        leave out too much arithmetic for caches to be set against them: with caches, plans of GPT-2 that took 5.8 and
        20.7 % more were expected at -1.2 and +0.7, where the roofline alone says 5.2 and 11.6.

        Args:
            plan: whose run; None for the plain step's.
        """
        if self._timed is None or not (self._profile.is_cpu and self._runs_on_cpu):
            return None
        graph = self.graph if plan is None else self.graph_of(plan)
        schedule = graph.plain_schedule if plan is None else plan.schedule
        return step_time_s(graph, schedule, self._profile, timed_alone=True)

    def find(self, budget_bytes: int, request: Request) -> Plan:
        """The planner's plan; for a large step a thorough search comes only after a quick one in vain."""
        if len(self.graph.ops) < _LARGE or request.planner != "auto" or "thorough" in request.options:
            return super().find(budget_bytes, request)
        quick = dataclasses.replace(request, options={**request.options, "thorough": False})
        try:
            return super().find(budget_bytes, quick)
        except InfeasibleBudget:
            return super().find(budget_bytes, request)

    def fitted(self, request: Request) -> Plan:
        """The cheapest plan found that stays within the budget of a request, or the plan that it brings.

        With the lever "split", the step with a region in slices counts as well. A request's checkpoints are a function
        of the numbers that the step was marked with; what has one of those that it returns is kept, and all else is
        recomputed where that is exact.

        Raises:
            InfeasibleBudget: if no plan fits.
            PlanMismatch: where the request's plan is for another step.
        """
        if request.plan is not None:
            request.plan.check_graph(self.graph_of(request.plan), "graph")
            return request.plan
        if request.checkpoints is not None:
            return self._keeping(request.checkpoints(self._marked.keys()))
        if self._early is None:
            return self._cheapest(request, self._share_of_bytes)
        # The update is a part of the step, early or late.
        share_of_bytes = self._without_early_bytes + self.resident_bytes
        try:
            plan = self._cheapest(request, share_of_bytes)
        except InfeasibleBudget as error:
            if not self._step.updates:
                raise
            plan = self._without_updates(request, share_of_bytes, error)
        return dataclasses.replace(plan, update=self._update(self._early))

    def _cheapest(self, request: Request, share_of_bytes: int | None) -> Plan:
        if "split" in request.levers:
            inner = functools.partial(self._variant, inner=True)
            return fit_with_splits(self, request, self._variant, inner, share_of_bytes=share_of_bytes)
        return fit(self, request, share_of_bytes=share_of_bytes)

    def _without_updates(self, request: Request, share_of_bytes: int, error: InfeasibleBudget) -> Plan:
        """The plan of the step where the optimizer updates all parameters, since an early update needs too much.

        Raises:
            InfeasibleBudget: where neither fits, the one that names less.
        """
        after_bytes = self._after_bytes + self.resident_bytes
        if max(after_bytes, error.budget_bytes) >= error.minimum_bytes:
            raise error
        self._leave_all_updates_out()
        late: InfeasibleBudget | None = None
        try:
            plan = self._cheapest(request, share_of_bytes)
        except InfeasibleBudget as found:
            late = found
        else:
            if after_bytes <= plan.budget_bytes:
                return plan
        minimum_bytes = max(after_bytes, plan.peak_bytes if late is None else late.minimum_bytes)
        if minimum_bytes >= error.minimum_bytes:
            raise error
        raise infeasible(error.budget_bytes, minimum_bytes, "the optimizer's step" if late is None else late.binding_op)

    def _leave_all_updates_out(self) -> None:
        for parameter in self._step.updates.values():
            aot_notes.leave_out(parameter)
        self._known.clear()
        self._splitters.clear()
        self._look_at(self._joint)

    def _update(self, early: Updates) -> Update:
        """What the updates of this step are."""
        if early.bound_by:
            return Update(0, 0, early.bound_by, gradient_bytes(self._step))
        saved_bytes = self._without_early_bytes - self._plain_peak.expected_bytes
        return Update(len(self._step.updates), saved_bytes, "", 0)

    def _keeping(self, numbers: Iterable[int]) -> Plan:
        values = [value for number in numbers for value in self._marked[number]]
        kept = {self._step.tensors[value] for value in values} - set(self.graph.inputs)
        plan = plan_with_checkpoints(self.graph, kept, self._step.first_backward - 1)
        beside = self.resident_bytes
        return dataclasses.replace(
            plan,
            peak_bytes=plan.peak_bytes + beside,
            baseline_peak_bytes=plan.baseline_peak_bytes + beside,
            budget_bytes=plan.budget_bytes + beside,
        )

    def graph_of(self, plan: Plan) -> Graph:
        """The graph that a plan is for: with slices, where the plan has them."""
        return self._of(plan).graph

    def program(self, plan: Plan) -> tuple[Program, Apart | None]:
        """Both passes under a plan; and the backward pass with gradients in parts, if some have several."""
        one = self._of(plan)
        program = program_of(one._joint, one._step, plan.schedule, one._forward_outputs)
        in_parts = apart(one._joint, program.backward, one._forward_outputs)
        reuse_storage(program.forward, program.backward)
        return program, in_parts

    def _of(self, plan: Plan) -> GraphCandidate:
        if plan.update is not None and not plan.update.moved and self._step.updates:
            self._leave_all_updates_out()
        variant = None if plan.split is None else self._in_slices(plan.split.slices, plan.split.inner)
        return self if variant is None else variant[0]

    def _variant(self, slices: int, inner: bool = False) -> Variant | None:
        """The step with its widest region in slices; None where there is none, or where a slice is too small.

        With ``inner``, inner layers are in slices as well.
        """
        made = self._in_slices(slices, inner)
        if made is None:
            return None
        one, stands_for = made
        extra_time_s = one.graph.time_s - self.graph.time_s
        if extra_time_s > MOST_EXTRA_TIME * self.graph.time_s:
            return None
        saved_bytes = self._splitter(inner).saved_bytes
        return Variant(one, Split(slices, saved_bytes, extra_time_s, self.graph.fingerprint, stands_for, inner))

    def _splitter(self, inner: bool) -> Splitter:
        if inner not in self._splitters:
            least_bytes = int(LEAST_SAVED * self._plain_peak.highest_bytes)
            self._splitters[inner] = Splitter(self._joint, least_bytes, inner=inner)
        return self._splitters[inner]

    def _in_slices(self, slices: int, inner: bool) -> tuple[GraphCandidate, tuple[tuple[int, int], ...]] | None:
        """The step in slices, and for each op that a slice runs the op that it is a part of."""
        if (slices, inner) not in self._known:
            split = self._splitter(inner).split(slices)
            if split is None:
                return None
            one = copy.copy(self)
            one._look_at(split.joint)
            one._time_calls()
            places = {op.name: index for index, op in enumerate(self.graph.ops)}
            pairs = ((index, split.stands_for.get(op.name)) for index, op in enumerate(one.graph.ops))
            stands_for = tuple((index, places[name]) for index, name in pairs if name in places)
            self._known[slices, inner] = one, stands_for
        return self._known[slices, inner]
