"""``compile``: ``torch.compile`` within a byte budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import fx

from remat.core.errors import RematError
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.schedule import Schedule
from remat.fit.candidate import Candidate
from remat.fit.fit import fit, fits_plainly
from remat.fit.loop import Rounds
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.running.cost_model import get_profile
from remat.torch.trace.step import default_profile

_Modules: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]

_RESERVE: Final = 0.03
"""The share of a peak that is left for scratch memory of operators that are not Inductor's own.

A judgement: one point above the reserve of eager plans, of which docs/torch.md shows up to 1.9 % in use. The peaks of
compiled plans that were measured there are those predicted. Too small, a step breaks its budget; too large, it
recomputes more than it has to.
"""


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
    request = Request(budget, planner=planner, time_limit_s=time_limit_s, options=options)
    return Compiled(fn, request.check("remat.torch.compile", takes_auto=False), resident_bytes, device)


class Compiled:
    """What ``compile`` returns.

    Args:
        fn: returns the loss.
        request: with a budget.
        resident_bytes: what lies on the device beside the step.
        device: profile for the predicted times.

    Attributes:
        plans: one for each combination of shapes that was compiled, the newest last.
    """

    def __init__(self, fn: Callable[..., Any], request: Request, resident_bytes: int, device: str | None) -> None:
        from remat.torch.compile import _inductor

        self.plans: list[CompiledPlan] = []
        self._request = request
        self._resident_bytes = resident_bytes
        self._device = device
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
            candidate = CompiledCandidate(joint, options, self._resident_bytes, self._device)
            found, modules = candidate.fitted(self._request)
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


class CompiledCandidate(Candidate):
    """A step as ``torch.compile`` runs it: Inductor's kernels for the two passes into which a joint graph is parted.

    An op of its graph stands for a kernel already, so that its plans do not show a second peak from before fusion.

    Args:
        joint: the joint graph of forward and backward pass, as AOTAutograd traced it.
        options: those with which AOTAutograd calls a partitioner.
        resident_bytes: what lies on the device beside the step.
        device: profile for the predicted times.
    """

    rounds: ClassVar[Rounds] = Rounds(4, 3)

    def __init__(
        self, joint: fx.GraphModule, options: Mapping[str, Any], resident_bytes: int, device: str | None
    ) -> None:
        # These import Inductor, which takes seconds.
        from remat.torch.compile import _inductor
        from remat.torch.compile.joint_graph import joint_step

        self._forward_outputs: int = options["num_fwd_outputs"]
        self._joint = _inductor.simplified(joint)
        inputs = [n.meta["val"] for n in joint.graph.find_nodes(op="placeholder") if "val" in n.meta]
        device_type = next((value.device.type for value in inputs if value.device.type != "cpu"), "cpu")
        static = options.get("static_lifetime_input_indices") or ()
        profile = get_profile(device or default_profile(device_type))
        self._step = joint_step(self._joint, self._forward_outputs, profile, static)
        # Inductor's figures are without the inputs of the step.
        inputs_bytes = sum(self.graph.tensors[tensor].size_bytes for tensor in self.graph.inputs)
        self._beside_bytes = resident_bytes + inputs_bytes
        self._plain = _inductor.plain_partition(self._joint, dict(options))
        self._plain_peak = PeakRange.exactly(self._peak_of(self._plain, _inductor.AS_EVER).expected_bytes)
        self._modules: dict[Schedule, _Modules] = {}

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
        from remat.torch.compile import _inductor
        from remat.torch.compile.partition import parted

        self._modules[plan.schedule] = parted(self._joint, self._step, plan.schedule, self._forward_outputs)
        return self._peak_of(self._modules[plan.schedule], _inductor.FRUGAL)

    def first_guess(self, target_bytes: int) -> int:
        """The graph counts what Inductor is likely to store, but for the reserve."""
        return int(target_bytes / (1 + _RESERVE))

    def fitted(self, request: Request) -> tuple[CompiledPlan, _Modules]:
        """The cheapest plan found, and forward and backward pass under it.

        Raises:
            InfeasibleBudget: if no plan fits.
        """
        from remat.torch.compile import _inductor

        found = fit(self, request)
        if fits_plainly(self, found.budget_bytes):
            return self._finished(found), self._plain
        modules = self._modules[found.schedule]
        # Where memory allows, Inductor compiles as it always does.
        peak = self._peak_of(modules, _inductor.AS_EVER)
        if peak.highest_bytes <= found.budget_bytes:
            found = dataclasses.replace(found, peak_bytes=peak.expected_bytes)
        else:
            _inductor.use_settings(modules, _inductor.FRUGAL)
        return self._finished(found), modules

    def _finished(self, found: Plan) -> CompiledPlan:
        values = {one.name: getattr(found, one.name) for one in dataclasses.fields(Plan)}
        return CompiledPlan(**values, graph=self.graph, compiled_peak_bytes=self._plain_peak.expected_bytes)

    def _peak_of(self, modules: _Modules, settings: Mapping[str, Any]) -> PeakRange:
        from remat.torch.compile import _inductor

        return PeakRange.with_reserve(self._beside_bytes + _inductor.peak_bytes(modules, settings), _RESERVE)
