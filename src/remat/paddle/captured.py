"""A layer or a function under ``paddle.jit.to_static`` whose programs are planned, one for each signature.

``to_static`` traces a call, appends the backward pass and cuts the program in two halves. A hook of Paddle's own sees
the whole before it is cut: there the program is planned and rewritten. Copies stand in the second half, so that the
first stays as it was.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import paddle

from remat.core.budget import format_bytes
from remat.core.errors import InfeasibleBudget, RematError, UnsupportedStep
from remat.fit.request import Request
from remat.paddle import _private
from remat.paddle.candidate import ProgramCandidate, ProgramPlan
from remat.paddle.first_step import MOST_CORRECTIONS, FirstStep, Training, gradient_bytes
from remat.paddle.recompute import layers_of
from remat.paddle.sequential import BackwardOrder, in_program_order
from remat.paddle.tensors import tensors_in
from remat.paddle.trace.program import Cut, TracedProgram, trace_program
from remat.paddle.trace.sizes import Sizes
from remat.running.cost_model import device_here, get_profile

_log = logging.getLogger("remat")


class CannotCapture(UnsupportedStep):
    """Paddle's ``to_static`` cannot make a program of a function.

    Args:
        message: what to do instead.
        reason: what Paddle says, in one line.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class _Beside:
    """What a plan counts beside a layer.

    Attributes:
        there_bytes: what lay beside the layer before the step that the plan was made for.
        counted_bytes: what the plan counts: that, and what steps under earlier plans were seen to take.
        corrections: how many such plans there were.
        budget_bytes: of the plan before; None where the request says it.
    """

    there_bytes: int = 0
    counted_bytes: int = 0
    corrections: int = 0
    budget_bytes: int | None = None


@dataclass
class _Made:
    """A program that was made, and what is known of it.

    Attributes:
        partial: Paddle's own object, held so that its id stays its own.
        modes: what it was asked for by.
        error: why it could not be planned.
        beside: what its plan counts beside the layer.
        first_step: the first step under its plan; None where nothing was planned.
        corrected: the program that runs in its place, because its first step broke the budget.
    """

    partial: Any
    modes: str
    error: RematError | None
    beside: _Beside = field(default_factory=_Beside)
    first_step: FirstStep | None = None
    corrected: _Made | None = None


class Captured:
    """A function or a layer, captured as programs that keep a budget.

    Args:
        target: the function that is called, a layer's ``forward`` say.
        request: what was asked for; a request that plans nothing leaves the programs as they are.
        resident_bytes: what lies in memory beside the step and counts.
        device: profile for the predicted times; None means this machine.
        plans_again: is a program planned once more after a first step that took more than its budget?
        strict: is a step over its budget an error, from the call after it?

    Attributes:
        plans: one for each signature, the newest last.
        traced: the newest program, as it was before it was rewritten.
        share_of_bytes: what "60%" is a share of; None for the plain peak of the program.
        training: what trains the layer, where that is known; it says what lies beside the layer.
        first_step: that of the program which ran last; None before one was planned.
    """

    def __init__(
        self,
        target: Any,
        request: Request,
        resident_bytes: int = 0,
        device: str | None = None,
        *,
        plans_again: bool = True,
        strict: bool = False,
    ) -> None:
        self.plans: list[ProgramPlan] = []
        self.traced: TracedProgram | None = None
        self._target = target
        self._request = request
        self._resident_bytes = resident_bytes
        self._device = device
        self.share_of_bytes: int | None = None
        self.training: Training | None = None
        self.first_step: FirstStep | None = None
        self._plans_again = plans_again and request.budget is not None
        self._strict = strict
        self._error: RematError | None = None
        self._made: dict[int, _Made] = {}
        self._beside = _Beside()
        self._backward_order = BackwardOrder(self._note)
        self._static = _private.StaticFunction(target, self._hook)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; the backward pass that follows runs in the program's order too.

        Raises:
            InfeasibleBudget: where no schedule of this call's program fits.
            UnsupportedStep: where Paddle cannot capture the function.
        """
        made = self._made_for(args, kwargs)
        self.first_step = made.first_step
        if self._request.plans and paddle.is_grad_enabled():
            if self.training is not None and self.training.gradients_are_cleared:
                for leaf in self._static.leaves:
                    if not leaf.stop_gradient:
                        leaf.clear_gradient(False)  # Zeros, in place of which this step makes new ones.
            if made.first_step is not None:
                made.first_step.begin()
        with in_program_order():
            result = self._static(args, kwargs, made.modes)
        if self._request.plans and paddle.is_grad_enabled():
            leaves = [*self._static.leaves, *tensors_in((args, kwargs))]
            self._backward_order.watch(tensors_in(result), leaves)
        return result

    def _note(self) -> None:
        if self.first_step is not None:
            self.first_step.note()

    def program_of(self, *args: Any, **kwargs: Any) -> TracedProgram:
        """Trace the program of a call without running it."""
        self._make(args, kwargs, self._modes(args))
        assert self.traced is not None, "the hook was called"
        return self.traced

    def _made_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Made:
        """The program for a call; made anew where the first step under its plan took more than its budget."""
        modes = self._modes(args)
        there_bytes = self._there_bytes(args)
        made = self._make(args, kwargs, modes, _Beside(there_bytes, there_bytes))
        while made.corrected is not None:
            made = made.corrected
        if made.first_step is None:
            return made
        excess_bytes = made.first_step.excess_bytes(there_bytes)
        if not excess_bytes:
            return made
        corrections = made.beside.corrections + 1
        # A share stays one of the layer's own plain peak, unless it is known what trains the layer.
        budget_bytes = made.first_step.plan.budget_bytes if self.training is None else None
        beside = _Beside(there_bytes, made.beside.counted_bytes + excess_bytes, corrections, budget_bytes)
        try:
            made.corrected = self._make(args, kwargs, f"{modes} {corrections}", beside)
        except InfeasibleBudget as error:
            made.first_step.tell_no_room(excess_bytes, there_bytes, error)
            return made
        return made.corrected

    def _there_bytes(self, args: tuple[Any, ...]) -> int:
        """What lies beside the layer before a step, and counts: gradients from before, the state of an optimizer."""
        if not self._request.plans:
            return 0
        training = self.training
        if training is not None and training.gradients_are_cleared:
            return training.state_bytes()
        parameters = {id(p): p for layer in layers_of(self._target, args) for p in layer.parameters()}
        return gradient_bytes(parameters.values()) + (0 if training is None else training.state_bytes())

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: str, beside: _Beside | None = None) -> _Made:
        """Make the program of a call. Paddle's translation does not outlive an error in a hook, so it comes after."""
        self._beside = beside or _Beside()
        plans = len(self.plans)
        try:
            with in_program_order():
                partial = self._static.make_program(args, kwargs, modes)
        except Exception as error:
            name = getattr(self._target, "__qualname__", type(self._target).__name__)
            raise CannotCapture(
                f"paddle.jit.to_static cannot capture {name}: {_last_line(error)!r}. Give tensors as arguments where "
                "the function closes over them, or wrap the model's blocks in remat.paddle.recompute, which is eager",
                _last_line(error),
            ) from error
        made = self._made.get(id(partial))
        if made is None:
            made = self._made[id(partial)] = _Made(partial, modes, self._error)
            self._error = None
            if len(self.plans) > plans:
                made.beside = self._beside
                made.first_step = self._first_step(self.plans[-1], self._beside)
        if made.error is not None:
            raise _untraced(made.error)
        return made

    def _first_step(self, plan: ProgramPlan, beside: _Beside) -> FirstStep:
        counted_bytes = plan.graph.pinned_bytes + self._resident_bytes + beside.there_bytes
        plans_again = self._plans_again and beside.corrections < MOST_CORRECTIONS
        return FirstStep(plan, beside.there_bytes, counted_bytes, plans_again=plans_again, strict=self._strict)

    def _modes(self, args: tuple[Any, ...]) -> str:
        """What decides on the program of a call beside its arguments: which layers train, and autocast."""
        layers = (part for layer in layers_of(self._target, args) for part in layer.sublayers(include_self=True))
        return "".join("ET"[layer.training] for layer in layers) + repr(_private.autocast_state())

    def _hook(self, program: Any, forward_end: int, backward_start: int) -> int:
        """Plan a joint program; returns where its forward pass ends now."""
        try:
            return self._planned(program, forward_end, backward_start)
        except RematError as error:
            self._error = _untraced(error)
            return forward_end

    def _planned(self, program: Any, forward_end: int, backward_start: int) -> int:
        profile = get_profile(self._device or device_here("cpu"))
        ops = list(program.global_block().ops)
        sizes = Sizes(program)
        # Of a list that nobody takes apart (the gradients of the first states of an LSTM) nothing is returned.
        unread = [v for op in ops[backward_start:] for v in op.results() if v.initialized() and v.use_empty()]
        gradients = [value for value in unread if sizes.elements_of(value) is None]
        # Whoever starts the backward pass holds the gradients of the results until it is over.
        given = [v for op in ops[forward_end:backward_start] for v in op.results() if v.initialized()]
        cut = Cut(forward_end, backward_start)
        traced = trace_program(program, profile, sizes, kept=[*gradients, *given], cut=cut)
        self.traced = traced
        if not self._request.plans:
            return forward_end
        beside = self._beside
        request = self._request
        if beside.budget_bytes is not None:
            request = replace(request, budget=beside.budget_bytes)
        resident_bytes = self._resident_bytes + beside.counted_bytes
        candidate = ProgramCandidate(traced, resident_bytes, "to_static")
        plan = candidate.planned(request, share_of_bytes=self.share_of_bytes)
        last = ops[forward_end - 1]
        copies = candidate.carry_out(plan)
        self.plans.append(plan)
        _log.info("Planned %d operators: %d copies, peak %s.", len(ops), copies, format_bytes(plan.peak_bytes))
        return next(n for n, op in enumerate(program.global_block().ops) if op == last) + 1


def _untraced(error: RematError) -> RematError:
    """The same error without the frames that it passed: it is kept, and they hold whatever a step has made."""
    same = type(error).__new__(type(error), *error.args)
    same.__dict__.update(error.__dict__)
    return same


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
