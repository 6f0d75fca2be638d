"""Parts a joint graph of forward and backward pass in two, within a budget: the partitioner that Inductor is given."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from torch import fx

from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.core.schedule import Schedule
from remat.fit.candidate import Candidate
from remat.fit.fit import fit, fits_plainly
from remat.fit.loop import Rounds
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.running.cost_model import get_profile
from remat.torch.compiled import _inductor
from remat.torch.compiled.inductor_peak import AS_EVER, FRUGAL, peak_bytes
from remat.torch.compiled.joint_graph import JointStep, joint_step
from remat.torch.compiled.joint_nodes import draws, is_pointwise
from remat.torch.trace import gpu_scratch
from remat.torch.trace.aot_notes import is_tangent
from remat.torch.trace.trace import default_profile

Modules: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]
"""Forward and backward pass."""

_RESERVE: Final = 0.03
"""The share of a peak that is left for scratch memory of operators that are not Inductor's own.

A judgement: one point above the reserve of eager plans, of which docs/torch_measured.md shows up to 1.9 % in use. Too
small, a step breaks its budget; too large, it recomputes more than it has to.
"""
_RESERVE_ON_CPU: Final = 0.01
"""The same on a CPU, where scratch memory is asked of the kernels, and the peaks of compiled plans that were measured
are those predicted (docs/torch_compile.md). With 3 %, a step was refused the bytes that ``torch.compile`` itself
takes.
"""

_OWN_BUDGETS: Final = (0.75, 0.5, 0.25)
"""PyTorch's ``activation_memory_budget`` for its own partitions that are tried beside a planner's. A judgement: a cut
takes 1 to 2 s for 1,300 nodes, and one whose schedule is worth a look the code of both passes. With fewer, a step may
need more than ``torch.compile`` does with a budget of its own."""
_OWN: Final = "torch.compile"
"""The planner's name in plans that are PyTorch's own partitions."""


class CompiledCandidate(Candidate):
    """A step as ``torch.compile`` runs it: Inductor's kernels for the two passes into which a joint graph is parted.

    An op of its graph stands for a kernel already, so that its plans do not show a second peak from before fusion.

    Args:
        joint: the joint graph of forward and backward pass, as AOTAutograd traced it.
        options: those with which AOTAutograd calls a partitioner.
        resident_bytes: what lies on the device beside the step.
        device: profile for the predicted times.
    """

    rounds: Rounds = Rounds(4, 3)

    def __init__(
        self, joint: fx.GraphModule, options: Mapping[str, Any], resident_bytes: int, device: str | None
    ) -> None:
        self._forward_outputs: int = options["num_fwd_outputs"]
        self._joint = _inductor.simplified(joint)
        inputs = [n.meta["val"] for n in joint.graph.find_nodes(op="placeholder") if "val" in n.meta]
        device_type = next((value.device.type for value in inputs if value.device.type != "cpu"), "cpu")
        static = options.get("static_lifetime_input_indices") or ()
        self._options = dict(options)
        self._reserve = _RESERVE_ON_CPU if device_type == "cpu" else _RESERVE
        profile = get_profile(device or default_profile(device_type))
        self._step = joint_step(self._joint, self._forward_outputs, profile, static)
        # Inductor's figures are without the inputs of the step.
        inputs_bytes = sum(self.graph.tensors[tensor].size_bytes for tensor in self.graph.inputs)
        functions = (node.target for node in joint.graph.nodes)
        cublas_bytes = gpu_scratch.cublas_bytes(functions, gpu_scratch.capability_of(device_type))
        self._beside_bytes = resident_bytes + inputs_bytes + cublas_bytes
        self._plain = _inductor.own_partition(self._joint, self._options)
        self._plain_peak = PeakRange.exactly(self._peak_of(self._plain, AS_EVER).expected_bytes)
        self._modules: dict[tuple[str, Schedule], Modules] = {}

    @property
    def graph(self) -> Graph:
        """The joint graph, an op for each kernel."""
        return self._step.graph

    @property
    def plain_peak(self) -> PeakRange:
        """The peak of ``torch.compile`` itself."""
        return self._plain_peak

    def real_peak(self, plan: Plan) -> PeakRange:
        """What Inductor's kernels need under a plan, with the settings that take the least memory."""
        return self._peak_of(self._modules_of(plan), FRUGAL)

    def suggestions(self) -> Iterator[Plan]:
        """PyTorch's own partitions within budgets of its own for activations, those with less to recompute first."""
        for schedule in self._own_partitions:
            yield plan_for_schedule(self.graph, schedule, planner=_OWN)

    @functools.cached_property
    def _own_partitions(self) -> dict[Schedule, Modules]:
        """By the schedules that come closest to them: an op stands for a kernel, which they take apart at times."""
        found: dict[Schedule, Modules] = {}
        for budget in _OWN_BUDGETS:
            # Given a budget, PyTorch 2.13 draws the seeds of random numbers again in the backward pass: other masks,
            # and so wrong gradients.
            modules = _inductor.own_partition(self._joint, self._options, budget, must_save=draws)
            if not _draws_again(modules):
                found.setdefault(schedule_of(self._step, modules), modules)
        return found

    def _modules_of(self, plan: Plan) -> Modules:
        key = plan.planner, plan.schedule
        if key not in self._modules:
            own = self._own_partitions.get(plan.schedule) if plan.planner == _OWN else None
            found = own or parted(self._joint, self._step, plan.schedule, self._forward_outputs)
            self._modules[key] = found
        return self._modules[key]

    def first_guess(self, target_bytes: int) -> int:
        """The graph counts what Inductor is likely to store, but for the reserve."""
        return int(target_bytes / (1 + self._reserve))

    def fitted(self, request: Request) -> tuple[Plan, Modules]:
        """The cheapest plan found, and the two passes under it.

        Raises:
            InfeasibleBudget: if no plan fits.
        """
        found = fit(self, request)
        if fits_plainly(self, found.budget_bytes):
            return found, self._plain
        modules = self._modules_of(found)
        # Where memory allows, Inductor compiles as it always does.
        peak = self._peak_of(modules, AS_EVER)
        if peak.highest_bytes <= found.budget_bytes:
            found = dataclasses.replace(found, peak_bytes=peak.expected_bytes)
        else:
            _inductor.use_settings(modules, FRUGAL)
        return found, modules

    def _peak_of(self, modules: Modules, settings: Mapping[str, Any]) -> PeakRange:
        return PeakRange.with_reserve(self._beside_bytes + peak_bytes(modules, settings), self._reserve)


def _draws_again(modules: Modules) -> bool:
    """Does the backward pass draw anew what the forward pass has drawn? Then its masks are others."""
    forward, backward = modules
    drawn = {node.name for node in forward.graph.nodes if draws(node)}
    return any(draws(node) and node.name in drawn for node in backward.graph.nodes)


def schedule_of(step: JointStep, modules: Modules) -> Schedule:
    """The schedule that comes closest to two passes that PyTorch's own partitioner has made of a joint graph.

    What the backward pass makes again runs again right before what reads it, if its op may run twice.
    """
    graph = step.graph
    _, backward = modules
    again = {node.name for node in backward.graph.nodes if node.op == "call_function"}
    waiting = {
        index
        for index, op in enumerate(graph.ops[: step.first_backward])
        if op.recomputable and any(graph.tensors[tensor].name in again for tensor in op.outputs)
    }
    schedule = list(range(step.first_backward + 1))

    def make_again(op: int) -> None:
        for tensor in graph.ops[op].inputs:
            maker = graph.producer[tensor]
            if maker in waiting:
                waiting.remove(maker)
                make_again(maker)
                schedule.append(maker)

    for index in range(step.first_backward + 1, len(graph.ops)):
        make_again(index)
        schedule.append(index)
    return tuple(schedule)


def parted(joint: fx.GraphModule, step: JointStep, schedule: Sequence[int], num_fwd_outputs: int) -> Modules:
    """Forward and backward pass of a joint module under a schedule.

    The forward pass is what runs before the incoming gradients arrive, the backward pass what runs after them. What the
    backward pass reads and does not make itself is saved in between.
    """
    unrolled = _Unrolled(joint, step.inlined)
    cut = schedule.index(step.first_backward)
    for op in schedule[:cut]:
        unrolled.run(step.groups[op])
    unrolled.end_forward(num_fwd_outputs)
    for op in schedule[cut:]:
        unrolled.run(step.groups[op])
    module, saved = unrolled.finished(num_fwd_outputs)
    return _inductor.extracted(module, saved, num_fwd_outputs)


class _Unrolled:
    """A joint graph in which an op that a schedule runs twice stands twice; a read binds to the newest instance."""

    def __init__(self, joint: fx.GraphModule, inlined: Collection[fx.Node]) -> None:
        self._joint = joint
        self._inlined = inlined
        self._graph = fx.Graph()
        self._newest: dict[fx.Node, fx.Node] = {}
        self._views: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self._values: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        for node in joint.graph.find_nodes(op="placeholder"):
            self._newest[node] = self._graph.node_copy(node)
        (self._output,) = joint.graph.find_nodes(op="output")
        self._results: list[Any] = []
        self._in_forward: set[fx.Node] = set()

    def run(self, group: Sequence[fx.Node]) -> None:
        """Run the nodes of one op once more. What they read and is no op is made anew for them."""
        self._values.clear()
        for node in group:
            self._newest[node] = self._graph.node_copy(node, self._resolved)

    def end_forward(self, num_fwd_outputs: int) -> None:
        """From here on nodes belong to the backward pass, which makes views of its own."""
        self._results = [self._result(one) for one in self._outputs[:num_fwd_outputs]]
        self._in_forward = set(self._graph.nodes)
        self._views.clear()
        self._values.clear()

    def finished(self, num_fwd_outputs: int) -> tuple[fx.GraphModule, list[fx.Node]]:
        """The module, and the nodes of the forward pass that the backward pass reads."""
        self._results += [self._result(one) for one in self._outputs[num_fwd_outputs:]]
        read = {one for one in self._results[num_fwd_outputs:] if isinstance(one, fx.Node)}
        for node in self._graph.nodes:
            if node not in self._in_forward:
                read.update(node.all_input_nodes)
        saved = [node for node in self._graph.nodes if node in read & self._in_forward and not is_tangent(node)]
        self._graph.output(tuple(self._results)).meta.update(self._output.meta)
        return fx.GraphModule(self._joint, self._graph), saved

    @property
    def _outputs(self) -> list[Any]:
        (results,) = self._output.args
        assert isinstance(results, list | tuple)
        return list(results)

    def _result(self, value: Any) -> Any:
        return self._resolved(value) if isinstance(value, fx.Node) else value

    def _resolved(self, node: fx.Node) -> fx.Node:
        if node not in self._inlined:
            return self._newest[node]
        known = self._values if is_pointwise(node) else self._views
        key = (node, tuple(self._resolved(one) for one in node.all_input_nodes))
        if key not in known:
            known[key] = self._graph.node_copy(node, self._resolved)
        return known[key]
