"""``compile``: a loss function captured as a graph, whose steps run within a byte budget."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import fx, nn

from remat.core.errors import InfeasibleBudget, RematError, UnsupportedStep
from remat.core.graph import Graph
from remat.core.labels import shown_path
from remat.core.plan import Plan
from remat.fit.request import WHOLE_STEP_LEVERS, Request
from remat.torch.api.eager_limit import EagerLimit, loss_in
from remat.torch.api.plan import EAGER_LEVERS, StepPlan
from remat.torch.kept_results import KeptModules
from remat.torch.trace.trace import trace

if TYPE_CHECKING:
    from remat.torch.graph_mode.capture import Captured, GraphPlan

_log = logging.getLogger("remat")

# In Dynamo's messages: what comes behind the reason, and the lines of the function that was captured.
_ADVICE: Final = re.compile(
    r"\n\s*(?:Hint:|Developer debug context:|For more |For C\+\+|User Stack)|\s*Caused by: |\n\n\n"
    r"|\s*The branch condition "
)
_LINE_OF_CODE: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def compile(
    fn: Callable[..., Any],
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    backend: Literal["inductor", "aten"] = "inductor",
    optimizer: torch.optim.Optimizer | None = None,
    accumulates: bool = False,
    strict: bool = False,
    resident_bytes: int = 0,
    planner: str = "auto",
    time_limit_s: float | None = None,
    device: str | None = None,
    first_share: bool = False,
    levers: tuple[str, ...] = ("recompute",),
    checkpoints: Sequence[nn.Module] | None = None,
    **options: Any,
) -> Compiled | GraphCompiled:
    """Capture a loss function as ``torch.compile`` does, and run its forward and backward pass within a byte budget.

    ::

        loss_fn = remat.torch.compile(loss_fn, budget="4GiB", backend="aten")
        loss = loss_fn(*args)
        loss.backward()

    With ``backend="aten"``, which is graph mode, eager PyTorch's own operators run in the order of the plan: the
    numbers are those of eager PyTorch to the last bit on a CPU, nothing is built, and no operator is watched. What
    cannot be captured as one graph runs eagerly, as under ``limit_memory``, and a warning says where and why. What
    cannot be traced eagerly either, since it asks for values (``.item()``), runs in pieces, each planned by itself. A
    step whose first run takes more than the budget is captured and planned once more, for what it really took.

    With ``backend="inductor"``, the numbers are those of ``torch.compile``. Inductor is asked what its kernels need
    under each plan before any is built. Random draws are the same in a recomputation, since Inductor derives them from
    seeds that are kept.

    Args:
        fn: returns the loss. With Inductor it must compile as one graph (``fullgraph=True``).
        budget: peak device bytes of the step, everything counted that it reads or makes (parameters, batch, gradients,
            what lies between): an int, "4GiB", or "60%" of the peak of the step with nothing recomputed, by the same
            backend. "60%" is also the default.
        plan: with ``backend="aten"``: a plan made earlier for the same step, loaded from a file say, in place of a
            budget.
        backend: what runs the plan.
        optimizer: with ``backend="aten"``: its state counts as resident. Its update is a part of the plan only with the
            lever "update".
        accumulates: with ``backend="aten"``: do gradients exist already when the step starts, as they do for every
            micro-batch but the first? They count beside the new ones, which arrive together at the end of the step.
        strict: with ``backend="aten"``: raise an error where a step takes more than the budget also after it was
            planned again for what its first run took; else this is logged as a warning, once.
        resident_bytes: what lies on the device beside the step and counts too.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning; there are up to seven for each combination of shapes.
        device: profile for the predicted times; None means that of the device of the tensors. With ``backend="aten"``,
            "measured" times the calls of the step on this machine before it is planned, each kind of call by itself:
            the predicted extra time is then close, and the plan takes what is cheap here.
        first_share: with ``backend="aten"``: is a share one of the first plan's plain step, also for other shapes? Else
            it is one of each combination's own; what cannot be held within that, a small last batch say, gets the bytes
            of an earlier one.
        levers: with ``backend="aten"``: what a plan may do. "recompute" runs operators again. "split" runs the widest
            region of the step in slices, the head of a language model from its logits to their gradients say; sums over
            slices are made in another order, so that numbers differ by rounding. A split is used where it is predicted
            to take less time, or where nothing else keeps the budget. "update", with ``optimizer=``, runs the update of
            each parameter inside of the backward pass, as soon as its gradient is there and its old values are no
            longer needed, and lets go of the gradient: the same numbers to the bit. ``optimizer.step()`` stays in the
            loop, and does what is left to do. The plan says what forbids it.
        checkpoints: with ``backend="aten"``, in place of a budget: modules. What they return is kept, and all else is
            recomputed where that is exact.
        **options: passed on to the planner.

    Returns:
        A callable like ``fn``. The first call with new shapes plans.

    Raises:
        InvalidBudget: if the budget cannot be read.
        TypeError: for checkpoints that are no modules.
        ValueError: for another backend, for more than one of budget, plan and checkpoints, for unknown levers, for
            "update" without an optimizer, and for what only the other backend takes.
        UnsupportedStep: with the lever "update", for an optimizer that does not update each parameter by itself, and
            in several processes.
    """
    if backend not in ("inductor", "aten"):
        raise ValueError(f'backend={backend!r} is unknown; it is "inductor" or "aten"')
    kept = None if checkpoints is None else KeptModules(checkpoints)
    request = Request(budget, plan, kept, planner, time_limit_s, options, levers=tuple(levers))
    request = request.check("remat.torch.compile", takes_auto=False, takes_levers=WHOLE_STEP_LEVERS)
    if "update" in request.levers and optimizer is None and backend == "aten":
        raise ValueError("the lever 'update' of remat.torch.compile runs updates of an optimizer: give optimizer=")
    if kept is not None and request.levers != ("recompute",):
        raise ValueError("checkpoints= names what is kept, so that no other lever than 'recompute' is chosen")
    if not request.plans:
        request = dataclasses.replace(request, budget="60%")
    if backend == "aten":
        beside = Beside(optimizer, accumulates, resident_bytes)
        return GraphCompiled(fn, request, beside, device, strict=strict, first_share=first_share)
    known = {"plan": plan, "optimizer": optimizer, "accumulates": accumulates, "strict": strict}
    known |= {"levers": request.levers != ("recompute",), "checkpoints": kept is not None}
    if given := [name for name, value in known.items() if value not in (None, False)]:
        raise ValueError(f'{given[0]}= of remat.torch.compile needs backend="aten"')
    return Compiled(fn, request, resident_bytes, device)


@dataclass(frozen=True)
class Beside:
    """What counts against the budget of a step beside its forward and its backward pass.

    Attributes:
        optimizer: its state counts.
        accumulates: do gradients exist before the step?
        resident_bytes: further bytes that lie on the device.
    """

    optimizer: torch.optim.Optimizer | None = None
    accumulates: bool = False
    resident_bytes: int = 0

    @property
    def for_plan(self) -> dict[str, Any]:
        """The arguments of ``remat.torch.plan`` that say the same."""
        return dataclasses.asdict(self) if self.optimizer is None else dict(vars(self))


class GraphCompiled:
    """What ``compile`` returns with ``backend="aten"``.

    Args:
        fn: returns the loss.
        request: with a budget, a plan, or modules whose results are kept.
        beside: what counts beside the step.
        device: profile for the predicted times.
        strict: is a step over its budget an error?
        first_share: is a share one of the first plan's plain step?

    Attributes:
        plans: one for each combination of shapes that was planned, the newest last; a plan's ``mode`` is "graph", or
            "eager" where the function could not be captured.
        reason: why the function could not be captured, and where; None where it could.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        request: Request,
        beside: Beside,
        device: str | None,
        *,
        strict: bool = False,
        first_share: bool = False,
    ) -> None:
        from remat.torch.graph_mode import capture, data_parallel, taken_gradients  # Dynamo takes seconds to import.

        self.plans: list[GraphPlan | StepPlan] = []
        self.reason: str | None = None
        self._fn = fn
        self._kept: KeptModules | None = request.checkpoints
        if self._kept is not None:
            request = dataclasses.replace(request, checkpoints=self._kept.called)
        self._request = request
        self._beside = beside
        self._device = device
        self._strict = strict
        self._capture = capture
        self._reducers = data_parallel.Reducers(fn)
        early = None
        moves_updates = "update" in request.levers or (request.plan is not None and request.plan.update is not None)
        if beside.optimizer is not None and moves_updates:
            early = taken_gradients.EarlyUpdates(beside.optimizer, accumulates=beside.accumulates)
        self._early = early
        # By what a step does with its gradients.
        self._captured: dict[Hashable, Captured] = {}
        self._capture_anew = functools.partial(
            capture.Captured,
            fn,
            request,
            self._resident_bytes,
            device,
            self.plans,
            strict=strict,
            first_share=first_share,
            takers_for=self._takers_for,
            early=early,
            ranks=lambda: self._reducers.ranks,
        )
        self._eager: EagerLimit | None = None
        self._for_more_shapes: EagerLimit | None = None
        self._is_eager_said = False
        self._in_pieces: Captured | None = None
        self._optimizer_bytes: int | None = None
        functools.update_wrapper(self, fn, updated=())  # A module has attributes that are not for this object.

    def __getattr__(self, name: str) -> Any:
        """An attribute of ``fn``, so that what was a module still has parameters."""
        return _attribute_of(self, name)

    @property
    def plan(self) -> GraphPlan | StepPlan | None:
        """The newest plan; None before the first call."""
        return self.plans[-1] if self.plans else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``fn``; where gradients are disabled, as it is.

        Raises:
            InfeasibleBudget: at the first call with new shapes, if no plan fits; it names the smallest budget.
            PlanMismatch: where the plan that was given is for another step.
            UnsupportedStep: for a step that cannot be planned as a whole and has a budget in bytes.
        """
        if not torch.is_grad_enabled():
            return self._fn(*args, **kwargs)
        if self._beside.optimizer is not None and self._optimizer_bytes is None:
            self._optimizer_bytes = _optimizer_bytes(self._fn, args, kwargs, self._beside.optimizer)
        if self._eager is None:
            try:
                self._reducers.find(args, kwargs)
                reduction = self._reducers.reduction
                if reduction not in self._captured:
                    self._captured[reduction] = self._capture_anew()
                with nullcontext() if self._kept is None else self._kept.marking_captured():
                    return self._reducers.run(self._captured[reduction], args, kwargs)
            except self._capture.TooManyShapes as error:
                with self._beyond(error).applied_for(args, kwargs):
                    return self._fn(*args, **kwargs)
            except (UnsupportedStep, *self._capture.NOT_CAPTURED) as error:
                if self._reducers.ranks is not None:
                    self._reducers.ranks.agree(reason_not_captured(error) or type(error).__name__)
                self._eager = self._eager_limit(error)
        if self._in_pieces is None:
            try:
                applied = self._eager.applied_for(args, kwargs)
            except UnsupportedStep as error:
                self._in_pieces = self._pieces(error)
            except InfeasibleBudget:
                self._say_eager()
                raise
            except Exception:
                if not self._is_eager_said:
                    # The function's own error, for this batch: of other calls it says nothing.
                    self._eager = self.reason = None
                raise
            else:
                self._say_eager()
                with applied:
                    return self._fn(*args, **kwargs)
        return self._in_pieces(*args, **kwargs)

    def _resident_bytes(self, gradients_bytes: int) -> int:
        found = self._beside.resident_bytes + (self._optimizer_bytes or 0) + self._reducers.bucket_bytes
        return found + gradients_bytes if self._beside.accumulates else found

    def _takers_for(self, inputs: Sequence[Any]) -> dict[int, Any]:
        used = {} if self._early is None else self._early.takers_for(inputs)
        return used | self._reducers.takers_for(inputs)

    @property
    def _name(self) -> str:
        return _name_of(self._fn)

    def _eager_limit(self, error: Exception, met_before: int = 0) -> EagerLimit:
        """Where the step cannot be captured: plans for running it eagerly."""
        self.reason = reason_not_captured(error)
        name = self._name
        if self._request.plan is not None:
            raise UnsupportedStep(
                f"{name} cannot be captured as one graph, so that plan= cannot be carried out in graph mode: "
                f"{self.reason}. Use remat.torch.plan and remat.torch.apply"
            ) from error
        levers = tuple(lever for lever in self._request.levers if lever in EAGER_LEVERS)
        if not levers:
            raise UnsupportedStep(
                f"{name} cannot be captured as one graph, so that it cannot run in slices: {self.reason}. Add "
                '"recompute" to levers=, which an eager step can do'
            ) from error
        request = self._request
        options = _how_to_plan(request, self._device) | self._beside.for_plan | {"levers": levers}
        if self._kept is not None:
            options["checkpoints"] = self._kept.modules
        return EagerLimit(self._fn, request.budget, True, self._strict, options, self.plans, met_before)

    def _beyond(self, error: Exception) -> EagerLimit:
        """Plans for more shapes than are captured."""
        if self._for_more_shapes is None:
            self._for_more_shapes = self._eager_limit(error, len(self.plans))
            _log.warning(
                "%s: %s, and stay in graph mode; what has other shapes runs eagerly within its budget. This is said "
                "once.",
                *(self._name, error),
            )
        return self._for_more_shapes

    def _say_eager(self) -> None:
        if not self._is_eager_said:
            self._is_eager_said = True
            _log.warning(
                "%s runs eagerly within its budget, not in graph mode, since it cannot be captured: %s",
                *(self._name, self.reason),
            )

    def _pieces(self, error: Exception) -> Captured:
        """Where the step needs values of tensors as well, so that no plan can be made for the whole of it."""
        request = self._request
        if "%" not in str(request.budget):
            raise UnsupportedStep(
                f"{self._name} cannot be captured as one graph: {self.reason}. Nor can it run eagerly within a plan: "
                f"{error}. Or give the budget as a share, such as 60%: then each part of the step that can be captured "
                "is planned by itself"
            ) from error
        _log.warning(
            "%s runs in pieces, since it cannot be captured as one graph: %s. Each piece is planned by itself: %s of "
            "its own peak, or as little as it can take. What the pieces keep for each other counts in none of them. It "
            "cannot run eagerly within a plan for the whole either: %s",
            *(self._name, self.reason, request.budget, error),
        )
        return self._capture.Captured(self._fn, request, self._resident_bytes, self._device, self.plans, in_pieces=True)


def reason_not_captured(error: Exception) -> str:
    """Why Dynamo, or AOTAutograd, could not capture a function, and at which line of it: one line of text."""
    why, _, where = str(error).partition("from user code")
    why = _ADVICE.split(why, maxsplit=1)[0]
    lines = _LINE_OF_CODE.findall(where or str(error))
    place = "" if not lines else " ({}:{} in {})".format(shown_path(lines[-1][0]), *lines[-1][1:])
    return " ".join(why.split()) + place


def _how_to_plan(request: Request, device: str | None) -> dict[str, Any]:
    """What a request asks of its planner, as options of ``remat.torch.plan``."""
    return {**request.options, "planner": request.planner, "time_limit_s": request.time_limit_s, "device": device}


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


def _attribute_of(compiled: Compiled | GraphCompiled, name: str) -> Any:
    """An attribute that a compiled function does not have itself: that of the function.

    Raises:
        AttributeError: if the function has none of this name either.
    """
    fn = vars(compiled).get("_fn")
    if fn is None or name.startswith("__"):
        raise AttributeError(f"{type(compiled).__name__!r} object has no attribute {name!r}")
    return getattr(fn, name)


def _optimizer_bytes(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: torch.optim.Optimizer
) -> int:
    """Bytes of an optimizer's state, those that it makes at its first update counted."""
    graph = trace(lambda: loss_in(fn(*args, **kwargs)), optimizer=optimizer)
    return sum(
        graph.tensors[number].size_bytes for number in graph.inputs if graph.tensors[number].role == "optimizer_state"
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
        from remat.torch._dynamo import (  # Both import Dynamo or Inductor, which takes seconds.
            once_left_unsaid,
            with_code_of_its_own,
        )
        from remat.torch.compiled import _inductor

        self.plans: list[CompiledPlan | StepPlan] = []
        self._fn = fn
        self._request = request
        self._resident_bytes = resident_bytes
        self._device = device
        self._error: RematError | None = None
        self._capturing = once_left_unsaid
        self._failed: type[Exception] = _inductor.BackendCompilerFailed
        self._too_many_shapes: type[Exception] = _inductor.FailOnRecompileLimitHit
        self._for_more_shapes: EagerLimit | None = None
        backend = _inductor.backend(self._partition)
        own = with_code_of_its_own(fn)
        self._compiled = torch.compile(own, backend=backend, fullgraph=True, dynamic=False)

    def __getattr__(self, name: str) -> Any:
        """An attribute of ``fn``, so that what was a module still has parameters."""
        return _attribute_of(self, name)

    @property
    def plan(self) -> CompiledPlan | StepPlan | None:
        """The newest plan; None before the first call."""
        return self.plans[-1] if self.plans else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``fn``; with more combinations of shapes than Dynamo captures, others eagerly within their budget.

        Raises:
            InfeasibleBudget: at the first call with new shapes, if no plan fits; it names the smallest budget.
            UnsupportedStep: where shapes are not known beforehand.
        """
        self._error = None
        try:
            with self._capturing():
                return self._compiled(*args, **kwargs)
        except self._failed:
            if self._error is None:
                raise
            raise self._error from None
        except self._too_many_shapes:
            if not torch.is_grad_enabled():
                return self._fn(*args, **kwargs)
            with self._beyond().applied_for(args, kwargs):
                return self._fn(*args, **kwargs)

    def _beyond(self) -> EagerLimit:
        """Plans for more shapes than are compiled."""
        if self._for_more_shapes is None:
            request, met = self._request, len(self.plans)
            options = _how_to_plan(request, self._device) | {"resident_bytes": self._resident_bytes}
            self._for_more_shapes = EagerLimit(self._fn, request.budget, True, False, options, self.plans, met)
            _log.warning(
                "%s was compiled for %d combinations of shapes, and Dynamo's limit is reached "
                "(torch._dynamo.config.recompile_limit): what has other shapes runs eagerly within its budget. Batches "
                "padded to a few lengths need fewer. This is said once.",
                *(_name_of(self._fn), met),
            )
        return self._for_more_shapes

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
