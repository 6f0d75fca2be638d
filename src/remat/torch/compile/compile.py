"""``compile``: ``torch.compile`` within a byte budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from remat.core.budget import parse_budget
from remat.core.errors import InfeasibleBudget, RematError
from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.core.plan import plan as plan_graph
from remat.core.schedule import Schedule
from remat.fit.loop import PeakWithReserve, infeasible, plan_within
from remat.running.cost_model import get_profile
from remat.torch.trace.step import default_profile

_Modules: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]

_ROUNDS = 4
_LAST_ROUNDS = 3
_RESERVE = 0.03


def compile(
    fn: Callable[..., Any],
    *,
    budget: int | str = "60%",
    resident_bytes: int = 0,
    planner: str = "auto",
    time_limit_s: float | None = None,
    device: str | None = None,
    **options: Any,
) -> Compiled:
    """Compile a loss function as ``torch.compile`` does, its forward and backward pass within a byte budget.

    ::

        loss_fn = remat.torch.compile(loss_fn, budget="4GiB")
        loss = loss_fn(*args)
        loss.backward()

    Forward and backward pass are planned together, and Inductor is asked what its kernels need under each plan before
    any is built. Random draws are the same in a recomputation, since Inductor derives them from seeds that are kept.

    Args:
        fn: returns the loss. It must compile as one graph (``fullgraph=True``).
        budget: peak device bytes of the step, everything counted that it reads or makes (parameters, batch, gradients,
            what lies between): an int, "4GiB", or "60%" of the peak of ``torch.compile`` itself.
        resident_bytes: what lies on the device beside the step and counts too: the optimizer's state, say.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning; there are up to seven for each combination of shapes.
        device: profile for the predicted times; None means that of the device of the tensors.
        **options: passed on to the planner.

    Returns:
        A callable like ``fn``. The first call with new shapes plans and compiles.

    Raises:
        InvalidBudget: if the budget cannot be read.
    """
    parse_budget(budget, baseline_peak_bytes=1 << 60)
    return Compiled(fn, _Request(budget, resident_bytes, planner, time_limit_s, device, options))


class Compiled:
    """What ``compile`` returns.

    Attributes:
        plans: one for each combination of shapes that was compiled, the newest last.
    """

    def __init__(self, fn: Callable[..., Any], request: _Request) -> None:
        from remat.torch.compile import _inductor

        self.plans: list[CompiledPlan] = []
        self._request = request
        self._error: RematError | None = None
        self._failed: type[Exception] = _inductor.BackendCompilerFailed
        backend = _inductor.backend(self._partition)
        self._compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)

    @property
    def plan(self) -> CompiledPlan | None:
        """The newest plan; None before the first call."""
        return self.plans[-1] if self.plans else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``fn``.

        Raises:
            InfeasibleBudget: at the first call with new shapes, if no plan fits; it names the smallest budget.
            UnsupportedStep: where shapes are not known beforehand.
        """
        self._error = None
        try:
            return self._compiled(*args, **kwargs)
        except self._failed:
            if self._error is None:
                raise
            raise self._error from None

    def _partition(self, joint: fx.GraphModule, **options: Any) -> _Modules:
        try:
            found, modules = _Partition(joint, self._request, options).within_budget()
        except RematError as error:
            self._error = error
            raise
        self.plans.append(found)
        return modules


@dataclass(frozen=True)
class CompiledPlan(Plan):
    """A plan for a compiled step. ``peak_bytes`` is what Inductor's kernels need under it, and all that they read.

    Attributes:
        graph: the step that the plan is for.
        compiled_peak_bytes: the same of ``torch.compile`` itself.
    """

    graph: Graph = dataclasses.field(kw_only=True, repr=False, compare=False)
    compiled_peak_bytes: int = dataclasses.field(kw_only=True)

    __str__ = Plan.__str__


@dataclass(frozen=True)
class _Request:
    budget: int | str
    resident_bytes: int
    planner: str
    time_limit_s: float | None
    device: str | None
    options: dict[str, Any]


class _Partition:
    """The parting of one joint graph."""

    def __init__(self, joint: fx.GraphModule, request: _Request, options: dict[str, Any]) -> None:
        # These import Inductor, which takes seconds.
        from remat.torch.compile import _inductor
        from remat.torch.compile.joint_graph import joint_step

        self._request = request
        self._options = options
        self._forward_outputs: int = options["num_fwd_outputs"]
        self._joint = _inductor.simplified(joint)
        kinds = [
            node.meta["val"].device.type for node in joint.graph.find_nodes(op="placeholder") if "val" in node.meta
        ]
        device = next((kind for kind in kinds if kind != "cpu"), "cpu")
        profile = get_profile(request.device or default_profile(device))
        static = options.get("static_lifetime_input_indices") or ()
        self._step = joint_step(self._joint, self._forward_outputs, profile, static)
        graph = self._step.graph
        self._resident_bytes = request.resident_bytes + sum(graph.tensors[n].size_bytes for n in graph.inputs)

    def within_budget(self) -> tuple[CompiledPlan, _Modules]:
        """The plan and the two modules.

        Raises:
            InfeasibleBudget: if no plan fits.
        """
        from remat.torch.compile import _inductor
        from remat.torch.compile.partition import parted

        plain = _inductor.plain_partition(self._joint, self._options)
        plain_bytes = self._peak_of(plain, _inductor.AS_EVER).expected_bytes
        budget_bytes = parse_budget(self._request.budget, plain_bytes)
        if plain_bytes <= budget_bytes:
            found = plan_for_schedule(self._step.graph, self._step.graph.plain_schedule, planner=self._request.planner)
            found = dataclasses.replace(found, peak_bytes=plain_bytes, budget_bytes=budget_bytes)
            return self._finished(found, plain_bytes), plain
        by_schedule: dict[Schedule, _Modules] = {}

        def real_peak(found: Plan) -> PeakWithReserve:
            modules = parted(self._joint, self._step, found.schedule, self._forward_outputs)
            by_schedule[found.schedule] = modules
            return self._peak_of(modules, _inductor.FRUGAL)

        try:
            found = plan_within(
                budget_bytes,
                int(budget_bytes / (1 + _RESERVE)),
                self._make_plan,
                real_peak,
                rounds=_ROUNDS,
                last_rounds=_LAST_ROUNDS,
            )
        except InfeasibleBudget as error:
            raise infeasible(budget_bytes, error.minimum_bytes, error.binding_op) from None
        modules = by_schedule[found.schedule]
        # Where memory allows, Inductor compiles as it always does.
        peak = self._peak_of(modules, _inductor.AS_EVER)
        if peak.highest_bytes <= budget_bytes:
            found = dataclasses.replace(found, peak_bytes=peak.expected_bytes)
        else:
            _inductor.use_settings(modules, _inductor.FRUGAL)
        found = dataclasses.replace(found, budget_bytes=budget_bytes)
        return self._finished(found, plain_bytes), modules

    def _finished(self, found: Plan, plain_bytes: int) -> CompiledPlan:
        values = {one.name: getattr(found, one.name) for one in dataclasses.fields(Plan)}
        return CompiledPlan(**values, graph=self._step.graph, compiled_peak_bytes=plain_bytes)

    def _make_plan(self, planner_budget: int) -> Plan:
        request = self._request
        return plan_graph(
            self._step.graph,
            planner_budget,
            planner=request.planner,
            time_limit_s=request.time_limit_s,
            **request.options,
        )

    def _peak_of(self, modules: _Modules, settings: Mapping[str, Any]) -> PeakWithReserve:
        from remat.torch.compile import _inductor

        return PeakWithReserve(self._resident_bytes + _inductor.peak_bytes(modules, settings), _RESERVE)
