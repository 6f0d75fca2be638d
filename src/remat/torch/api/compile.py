"""``compile``: a loss function captured as a graph, whose steps run within a byte budget."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from remat.core.errors import RematError, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.request import Request
from remat.torch.api.limit import limit_memory
from remat.torch.api.plan import StepPlan

if TYPE_CHECKING:
    from remat.torch.graph_mode.capture import GraphPlan

_log = logging.getLogger("remat")


def compile(
    fn: Callable[..., Any],
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    backend: Literal["inductor", "aten"] = "inductor",
    resident_bytes: int = 0,
    planner: str = "auto",
    time_limit_s: float | None = None,
    device: str | None = None,
    **options: Any,
) -> Compiled | GraphCompiled:
    """Capture a loss function as ``torch.compile`` does, and run its forward and backward pass within a byte budget.

    ::

        loss_fn = remat.torch.compile(loss_fn, budget="4GiB", backend="aten")
        loss = loss_fn(*args)
        loss.backward()

    With ``backend="aten"``, which is graph mode, eager PyTorch's own operators run in the order of the plan: the numbers
    are those of eager PyTorch to the last bit on a CPU, nothing is built, and no operator is watched. What cannot be
    captured as one graph runs eagerly, as under ``limit_memory``, and a warning says where and why.

    With ``backend="inductor"``, the numbers are those of ``torch.compile``. Inductor is asked what its kernels need under
    each plan before any is built. Random draws are the same in a recomputation, since Inductor derives them from seeds
    that are kept.

    Args:
        fn: returns the loss. With Inductor it must compile as one graph (``fullgraph=True``).
        budget: peak device bytes of the step, everything counted that it reads or makes (parameters, batch, gradients,
            what lies between): an int, "4GiB", or "60%" of the peak of the step with nothing recomputed, by the same
            backend. "60%" is also the default.
        plan: with ``backend="aten"``: a plan made earlier for the same step, loaded from a file say, instead of a budget.
        backend: what runs the plan.
        resident_bytes: what lies on the device beside the step and counts too: the optimizer's state, say.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning; there are up to seven for each combination of shapes.
        device: profile for the predicted times; None means that of the device of the tensors.
        **options: passed on to the planner.

    Returns:
        A callable like ``fn``. The first call with new shapes plans.

    Raises:
        InvalidBudget: if the budget cannot be read.
        ValueError: for another backend, for both a budget and a plan, and for a plan with Inductor.
    """
    if backend not in ("inductor", "aten"):
        raise ValueError(f'backend={backend!r} is unknown; it is "inductor" or "aten"')
    request = Request(budget, plan, planner=planner, time_limit_s=time_limit_s, options=options)
    request = request.check("remat.torch.compile", takes_auto=False)
    if not request.plans:
        request = dataclasses.replace(request, budget="60%")
    if backend == "aten":
        return GraphCompiled(fn, request, resident_bytes, device)
    if plan is not None:
        raise ValueError('plan= of remat.torch.compile needs backend="aten"; give Inductor a budget')
    return Compiled(fn, request, resident_bytes, device)


class GraphCompiled:
    """What ``compile`` returns with ``backend="aten"``.

    Args:
        fn: returns the loss.
        request: with a budget or a plan.
        resident_bytes: what lies on the device beside the step.
        device: profile for the predicted times.

    Attributes:
        plans: one for each combination of shapes that was planned, the newest last; a plan's ``mode`` is "graph", or
            "eager" where the function could not be captured.
        reason: why the function could not be captured, and where; None where it could.
    """

    def __init__(self, fn: Callable[..., Any], request: Request, resident_bytes: int, device: str | None) -> None:
        from remat.torch.graph_mode import capture  # It imports Dynamo, which takes seconds.

        self.reason: str | None = None
        self._fn = fn
        self._request = request
        self._options = {"resident_bytes": resident_bytes, "device": device}
        self._captured = capture.Captured(fn, request, resident_bytes, device)
        self._not_captured = capture.NOT_CAPTURED
        self._eager: Any = None
        functools.update_wrapper(self, fn)

    @property
    def plans(self) -> list[GraphPlan | StepPlan]:
        """One for each combination of shapes that was planned, the newest last."""
        return [*self._captured.plans, *(self._eager.plans if self._eager is not None else ())]

    @property
    def plan(self) -> GraphPlan | StepPlan | None:
        """The newest plan; None before the first call."""
        return self.plans[-1] if self.plans else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``fn``.

        Raises:
            InfeasibleBudget: at the first call with new shapes, if no plan fits; it names the smallest budget.
            PlanMismatch: where the plan that was given is for another step.
        """
        if self._eager is None:
            try:
                return self._captured(*args, **kwargs)
            except (UnsupportedStep, *self._not_captured) as error:
                self._run_eagerly(error)
        return self._eager(*args, **kwargs)

    def _run_eagerly(self, error: Exception) -> None:
        self.reason = " ".join(str(error).split("\n\nfrom user code")[0].split())
        name = getattr(self._fn, "__qualname__", type(self._fn).__name__)
        if self._request.plan is not None:
            raise UnsupportedStep(
                f"{name} cannot be captured as one graph, so that plan= cannot be carried out in graph mode: "
                f"{self.reason}. Use remat.torch.plan and remat.torch.apply"
            ) from error
        _log.warning("%s runs eagerly within its budget, not in graph mode, since it cannot be captured: %s", name, self.reason)
        request = self._request
        assert request.budget is not None, "a request has a budget or a plan"
        self._eager = limit_memory(
            self._fn,
            request.budget,
            planner=request.planner,
            time_limit_s=request.time_limit_s,
            **self._options,
            **request.options,
        )


class Compiled:
    """What ``compile`` returns with ``backend="inductor"``.

    Args:
        fn: returns the loss.
        request: with a budget.
        resident_bytes: what lies on the device beside the step.
        device: profile for the predicted times.

    Attributes:
        plans: one for each combination of shapes that was compiled, the newest last.
    """

    def __init__(self, fn: Callable[..., Any], request: Request, resident_bytes: int, device: str | None) -> None:
        from remat.torch.compiled import _inductor  # It imports Inductor, which takes seconds.

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

    def _partition(self, joint: fx.GraphModule, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        from remat.torch.compiled.partition import CompiledCandidate

        try:
            candidate = CompiledCandidate(joint, options, self._resident_bytes, self._device)
            found, modules = candidate.fitted(self._request)
        except RematError as error:
            self._error = error
            raise
        values = {one.name: getattr(found, one.name) for one in dataclasses.fields(Plan)}
        values["mode"] = "inductor"
        plain_bytes = candidate.plain_peak.expected_bytes
        self.plans.append(CompiledPlan(**values, graph=candidate.graph, compiled_peak_bytes=plain_bytes))
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
