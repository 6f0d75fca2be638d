"""A loss function -> functions that run its steps under a plan each: Dynamo captures, AOTAutograd differentiates.

Dynamo's guards see to it that a call with other shapes, or through another branch, is captured anew and gets a plan of
its own.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from torch import fx

from remat.core.collecting import without_collections
from remat.core.errors import InfeasibleBudget, RematError, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.first_step import broken_budget, exceeds, no_room_for_excess, tell
from remat.fit.request import Request
from remat.torch import _private
from remat.torch.emit.first_step import StorageMeter
from remat.torch.graph_mode import _aot
from remat.torch.graph_mode._answers import Answers
from remat.torch.graph_mode.by_calling import CalledFunction, NotCalled, State
from remat.torch.graph_mode.calls import Calls
from remat.torch.graph_mode.candidate import GraphCandidate
from remat.torch.graph_mode.captured_ranks import CapturedRanks
from remat.torch.graph_mode.contributions import Apart
from remat.torch.graph_mode.source import function_of
from remat.torch.graph_mode.taken_gradients import Updates
from remat.torch.graph_mode.timed_calls import TimedCalls
from remat.torch.new_shapes import NewShapes
from remat.torch.trace import aot_notes

_log = logging.getLogger("remat")

_NUMBER: Final = "remat_step"  # Where a module carries the number of its step to the point where it is compiled.

_MOST_CAPTURES: Final = 4
"""Captures of one and the same step. A judgement: a step that reads a flag is captured for each of its values; one
that reads a number which counts calls would be captured at each call, which takes seconds. With fewer, flags take a
step out of graph mode; with more, a user waits longer for such a step."""

TooManyShapes = _aot.TooManyShapes

NOT_CAPTURED: Final = (_aot.TorchDynamoException, _aot.BackendCompilerFailed, NotCalled, TooManyShapes)
"""What ``Captured`` raises where a function cannot be captured as one graph."""


@dataclass(frozen=True)
class GraphPlan(Plan):
    """A plan that graph mode carries out.

    Attributes:
        graph: the step that the plan is for: ``remat.simulate(plan.graph, plan.schedule)`` shows its memory over time.
        forward_source: the forward pass as Python code.
        backward_source: the backward pass as Python code.
    """

    graph: Graph = field(kw_only=True, repr=False, compare=False)
    forward_source: str = field(default="", kw_only=True, repr=False, compare=False)
    backward_source: str = field(default="", kw_only=True, repr=False, compare=False)

    __str__ = Plan.__str__


class Captured:
    """A function that returns a loss, captured and planned call by call.

    Args:
        fn: the function.
        request: what each capture is planned for.
        resident_bytes: what lies on the device beside the step, given the bytes of the step's gradients.
        device: profile for the predicted times.
        plans: where the plan of each capture that has a backward pass is added.
        strict: is a step over its budget an error, once it was planned again?
        replans: is a step planned again, once, whose first run took more than its budget?
        first_share: is a share one of the first plan's plain step?
        takers_for: the inputs of a captured graph whose gradients are taken before the end of its backward pass, see
            ``_aot.backend``.
        early: the updates that steps run themselves, where that is asked for.
        ranks: given that the function was called, the processes that must run the same; None where each may run what it
            likes.
        in_pieces: may the function be captured as several graphs, with what cannot be captured in between? Each is then
            planned by itself, as well as it can be.
        state_of: where the function is captured by calling it (``by_calling``), what it depends on beside its
            arguments; None where Dynamo follows it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        request: Request,
        resident_bytes: Callable[[int], int],
        device: str | None,
        plans: list[Any],
        *,
        strict: bool = False,
        replans: bool = True,
        first_share: bool = False,
        takers_for: Callable[[Sequence[Any]], dict[int, Any]] = lambda _: {},
        early: Updates | None = None,
        ranks: Callable[[], CapturedRanks | None] = lambda: None,
        in_pieces: bool = False,
        state_of: Callable[[Any], State] | None = None,
    ) -> None:
        self._state_of = state_of
        self._ranks = ranks
        self._takers_for = takers_for
        self._early = early
        self._in_pieces = in_pieces
        self._answers = Answers()
        self._numbers = _aot.ChangingNumbers()
        self._plans = plans
        self._request = request
        self._resident_bytes = resident_bytes
        self._device = device
        self._strict = strict
        # Pieces promise no budget, and whoever names what is kept asks for none.
        self._replans = replans and request.plan is None and request.checkpoints is None and not in_pieces
        self._first_share = first_share
        self._calls = Calls()
        self._timed = TimedCalls()
        self._error: RematError | None = None
        self._steps: list[_PlannedStep] = []
        self._fn = fn
        # By the fingerprint of a step: its plan, and what its first step took more than was predicted.
        self._planned: dict[str, GraphPlan] = {}
        self._excess_bytes: dict[str, int] = {}
        self._captures: Counter[str] = Counter()
        self._shapes = NewShapes()
        self._is_new = True
        self._compiled = self._captured_anew()

    def _captured_anew(self) -> Callable[..., Any]:
        """The function for Dynamo, with a backend of its own: nothing that was captured before is taken."""
        self._is_outdated, self._is_new = False, True
        compilers = (self._compile_forward, self._compile_backward, self._compile_alone)
        self._backend = _aot.Backend(self._partition, *compilers, self._takers_for)
        if self._state_of is not None:
            return CalledFunction(self._fn, self._backend, self._state_of)
        fullgraph = not self._in_pieces
        surroundings = functools.partial(_aot.capturing, self._answers, self._numbers, fullgraph=fullgraph)
        return _aot.compiled(self._fn, self._backend, surroundings, fullgraph=fullgraph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function.

        Raises:
            InfeasibleBudget: at the first call with new shapes, if no plan fits; it names the smallest budget.
            UnsupportedStep: where shapes are not known beforehand.
            TorchDynamoException: where Dynamo cannot capture the function as one graph.
            TooManyShapes: where it has captured too many, and none is for these shapes.
            NotCalled: where it cannot be captured by calling it.
        """
        if self._state_of is not None:
            return self._run(args, kwargs)
        told, reason = len(self._answers.told), ""
        while True:
            try:
                result = self._run(args, kwargs)
            except _aot.TorchDynamoException as error:
                if self._error is not None or not self._answers.tell_more(error):
                    raise
                reason = str(error).partition("\n")[0]
            else:
                break
        if len(self._answers.told) > told:
            _log.warning(
                "The branches for eager PyTorch cannot be captured (%s). Captured is what is done for a compiler in: "
                '%s; remat.torch.check(..., mode="graph") tells whether the numbers stay.',
                reason,
                self._answers,
            )
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._error = None
        if self._is_outdated:
            self._compiled = self._captured_anew()
        uncollected = without_collections() if self._is_new else nullcontext()
        try:
            with uncollected:
                result = self._compiled(*args, **kwargs)
            self._is_new = False
            return result
        except Exception:
            if self._error is None:
                raise
            # Its traceback leads through all that captures, and holds on to what was traced.
            raise self._error.with_traceback(None) from None

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        try:
            candidate = GraphCandidate(joint, options, self._resident_bytes, self._device, self._early, self._timed)
            ranks = self._ranks()
            if ranks is not None:
                ranks.agree()
            plan = self._plan_for(candidate)
            program, apart = candidate.program(plan)
            takers = {taker for _, taker in aot_notes.takers_of(joint, options["num_fwd_outputs"]).values()}
            assert takers <= {node.target for node in program.backward.graph.nodes}, "nobody gets these gradients"
        except RematError as error:
            self._error = error
            raise
        for module in (program.forward, program.backward):
            module.meta[_NUMBER] = len(self._steps)
        # Dynamo keeps a step for as long as what its guards look at lives: it must not hold the function.
        over_budget = weakref.WeakMethod(self._over_budget) if self._may_plan_again(plan) else None
        step = _PlannedStep(
            plan, program.donated, candidate.resident_bytes, self._strict, over_budget, self._early, ranks, apart
        )
        self._steps.append(step)
        return program.forward, program.backward

    def _plan_for(self, candidate: GraphCandidate) -> GraphPlan:
        """The plan of a captured step: that from before, unless it took more than its budget."""
        name = candidate.graph.fingerprint
        self._captures[name] += 1
        if self._captures[name] > _MOST_CAPTURES:
            raise UnsupportedStep(
                f"the same step was captured {_MOST_CAPTURES} times, since something that it reads is another at each "
                "call: a counter, say, or another module"
            )
        known = self._planned.get(name)
        excess_bytes = self._excess_bytes.get(name, 0)
        if known is not None and not (excess_bytes and known.measured_peak_bytes is not None):
            return known
        request = self._request
        if self._first_share and self._plans:
            request = dataclasses.replace(request, budget=self._plans[0].budget_bytes)
        resident_bytes = candidate.resident_bytes
        candidate.resident_bytes += excess_bytes
        try:
            ranks = self._ranks()
            if ranks is None:
                found = self._fitted(candidate, request)
            else:
                found = ranks.plan(
                    candidate.graph,
                    candidate.resident_bytes,
                    request.budget,
                    lambda: self._fitted(candidate, request),
                )
        except InfeasibleBudget as error:
            if known is None or self._strict:
                raise
            _log.warning("%s", no_room_for_excess(excess_bytes, error.minimum_bytes))
            return known
        finally:
            candidate.resident_bytes = resident_bytes
        values = {one.name: getattr(found, one.name) for one in dataclasses.fields(Plan)}
        graph = candidate.graph_of(found)
        plan = GraphPlan(**{**values, "mode": "graph", "measured_peak_bytes": None}, graph=graph)
        self._planned[name] = plan
        self._shapes.count(len(self._planned))
        self._plans.append(plan)
        return plan

    def _may_plan_again(self, plan: GraphPlan) -> bool:
        """Is a first step over its budget followed by another plan?"""
        return self._replans and plan.unsplit_fingerprint not in self._excess_bytes

    def _over_budget(self, plan: GraphPlan, excess_bytes: int) -> None:
        """The next call is captured anew. What the step took more than was predicted counts as there before it."""
        self._excess_bytes[plan.unsplit_fingerprint] = excess_bytes
        self._is_outdated = True

    def _fitted(self, candidate: GraphCandidate, request: Request) -> Plan:
        try:
            return candidate.fitted(request)
        except InfeasibleBudget as error:
            given_bytes = max((plan.budget_bytes for plan in self._plans), default=0)
            if self._in_pieces:
                given_bytes = error.minimum_bytes
            elif "%" not in str(request.budget) or given_bytes < error.minimum_bytes:
                raise
            # Of a small batch, the last of an epoch say, parameters may be more than the share.
            return candidate.fitted(dataclasses.replace(request, budget=given_bytes))

    def _compile_forward(self, module: fx.GraphModule) -> Callable[[list[Any]], Any]:
        step = self._step_of(module)
        function = function_of(module, self._calls, "forward")
        object.__setattr__(step.plan, "forward_source", function.source)  # type: ignore[attr-defined]
        return step.forward(function)

    def _compile_backward(self, module: fx.GraphModule) -> Callable[[list[Any]], Any]:
        step = self._step_of(module)
        function = function_of(module, self._calls, "backward")
        object.__setattr__(step.plan, "backward_source", function.source)  # type: ignore[attr-defined]
        if step.apart is None:
            return step.backward(function)
        in_parts = functools.cache(functools.partial(function_of, step.apart.module, self._calls, "backward"))
        return step.backward(function, in_parts)

    def _step_of(self, module: fx.GraphModule) -> _PlannedStep:
        """The step that a module is a pass of; other captures may have come since it was parted."""
        number: int = module.meta.get(_NUMBER, -1)
        return self._steps[number]

    def _compile_alone(self, module: fx.GraphModule) -> Callable[[list[Any]], Any]:
        if self._ranks() is not None:
            self._error = UnsupportedStep("it has no backward pass, and reads parameters under fully_shard")
            raise self._error
        return function_of(module, self._calls, "forward")


class _PlannedStep:
    """Both passes of one capture; the first step is measured.

    Args:
        plan: of the step.
        donated: places of saved tensors that the backward pass writes over.
        resident_bytes: what lies on the device beside the step.
        strict: is a first step over its budget an error?
        over_budget: a method that is called in place of that with what a first step took more than was predicted, where
            the step will be planned again.
        early: the updates that the step runs itself. Where the first of them make the optimizer's state, which counts
            as there before, the second step is measured.
        ranks: the processes that must run the same, where there are any.
        apart: the backward pass with gradients in parts, where some have several.
    """

    def __init__(
        self,
        plan: GraphPlan,
        donated: tuple[int, ...],
        resident_bytes: int,
        strict: bool,
        over_budget: weakref.WeakMethod[Any] | None,
        early: Updates | None,
        ranks: CapturedRanks | None,
        apart: Apart | None,
    ) -> None:
        self.plan = plan
        self.apart = apart
        self._ranks = ranks
        self._is_new = ranks is not None
        self._makes_state = early is not None and not early.has_state
        self._strict = strict
        self._over_budget = over_budget
        self._resident_bytes = resident_bytes
        self._donated = donated
        self._is_measured = True
        self._meter: StorageMeter | None = None

    def forward(self, function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """The forward pass, given its function."""

        def run(args: list[Any]) -> Any:
            if self._is_new and self._ranks is not None:
                self._is_new = False
                self._ranks.done()
            if not self._is_measured or self.plan.measured_peak_bytes is not None or self._makes_state:
                self._makes_state = False
                return function(args)
            if self._meter is not None:
                self._meter.stop()  # Its step had no backward pass, or has it together with this one.
            self._meter = StorageMeter()
            with self._meter, _private.observed_sharding(self._meter):
                return function(args)

        return run

    def backward(
        self,
        function: Callable[[list[Any]], Any],
        in_parts: Callable[[], Callable[[list[Any]], Any]] | None = None,
    ) -> Callable[[list[Any]], Any]:
        """The backward pass, given its function, and what makes one that hands over gradients in parts."""

        def run(args: list[Any]) -> Any:
            if _private.keeps_graph():
                _aot.refuse_second_derivatives()
                for place in self._donated:
                    args[place] = args[place].clone()
            if self.apart is not None and in_parts is not None and self.apart.is_due():
                if self._meter is not None:
                    self._meter.stop()
                    self._meter = None
                self._is_measured = False  # No plan is for such steps.
                return self.apart.handed_over(in_parts()(args))
            meter = self._meter
            if meter is None:
                return function(args)
            with meter, _private.observed_sharding(meter):
                gradients = function(args)
            self._measured(meter)
            return gradients

        return run

    def _measured(self, meter: StorageMeter) -> None:
        meter.stop()
        self._meter = None
        plan = self.plan
        measured_bytes = plan.graph.pinned_bytes + self._resident_bytes + meter.peak_bytes
        plan.set_measured_peak(measured_bytes)
        if self._ranks is not None:
            # Where one process takes too much, all plan again.
            measured_bytes = plan.peak_bytes + self._ranks.most(measured_bytes - plan.peak_bytes)
        if not exceeds(plan, measured_bytes):
            return
        message = broken_budget(plan, measured_bytes, meter.unpredicted)
        if self._over_budget is not None and (over_budget := self._over_budget()) is not None:
            _log.info("%s. The next step is planned again.", message)
            over_budget(plan, measured_bytes - plan.peak_bytes)
        else:
            tell(message, strict=self._strict)
