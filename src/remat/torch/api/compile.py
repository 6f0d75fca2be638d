"""``compile``: ``torch.compile`` within a byte budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.core.budget import check_budget
from remat.core.errors import RematError
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.request import Request


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
    check_budget(budget)
    request = Request(budget, planner=planner, time_limit_s=time_limit_s, options=options)
    return Compiled(fn, request.check("remat.torch.compile"), resident_bytes, device)


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
