"""A layer or a function under ``paddle.jit.to_static`` whose programs are planned, one for each signature.

``to_static`` traces a call, appends the backward pass and cuts the program in two halves. A hook of Paddle's own sees
the whole before it is cut: there the program is planned and rewritten. Copies stand in the second half, so that the
first stays as it was.
"""

from __future__ import annotations

import logging
from typing import Any

import paddle

from remat.core.budget import format_bytes
from remat.core.errors import RematError, UnsupportedStep
from remat.fit.request import Request
from remat.paddle import _private
from remat.paddle.candidate import ProgramCandidate, ProgramPlan
from remat.paddle.emit.shape_reads import redirect_shape_reads
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


class Captured:
    """A function or a layer, captured as programs that keep a budget.

    Args:
        target: the function that is called, a layer's ``forward`` say.
        request: what was asked for; a request that plans nothing leaves the programs as they are.
        resident_bytes: what lies in memory beside the step and counts.
        device: profile for the predicted times; None means this machine.

    Attributes:
        plans: one for each signature, the newest last.
        traced: the newest program, as it was before it was rewritten.
        share_of_bytes: what "60%" is a share of; None for the plain peak of the program.
    """

    def __init__(self, target: Any, request: Request, resident_bytes: int = 0, device: str | None = None) -> None:
        self.plans: list[ProgramPlan] = []
        self.traced: TracedProgram | None = None
        self._target = target
        self._request = request
        self._resident_bytes = resident_bytes
        self._device = device
        self.share_of_bytes: int | None = None
        self._error: RematError | None = None
        self._errors: dict[int, tuple[Any, RematError]] = {}
        self._backward_order = BackwardOrder()
        self._static = _private.StaticFunction(target, self._hook)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; the backward pass that follows runs in the program's order too.

        Raises:
            InfeasibleBudget: where no schedule of this call's program fits.
            UnsupportedStep: where Paddle cannot capture the function.
        """
        self._make(args, kwargs)
        with in_program_order():
            result = self._static(args, kwargs, self._modes(args))
        if self._request.plans and paddle.is_grad_enabled():
            leaves = [*self._static.leaves, *tensors_in((args, kwargs))]
            self._backward_order.watch(tensors_in(result), leaves)
        return result

    def program_of(self, *args: Any, **kwargs: Any) -> TracedProgram:
        """Trace the program of a call without running it."""
        self._make(args, kwargs)
        assert self.traced is not None, "the hook was called"
        return self.traced

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the program of a call. Paddle's translation does not outlive an error in a hook, so it comes after."""
        try:
            with in_program_order():
                made = self._static.make_program(args, kwargs, self._modes(args))
        except Exception as error:
            name = getattr(self._target, "__qualname__", type(self._target).__name__)
            raise CannotCapture(
                f"paddle.jit.to_static cannot capture {name}: {_last_line(error)!r}. Give tensors as arguments where "
                "the function closes over them, or wrap the model's blocks in remat.paddle.recompute, which is eager",
                _last_line(error),
            ) from error
        if (refused := self._error) is not None:
            self._error = None
            self._errors[id(made)] = made, refused
        if id(made) in self._errors:
            raise self._errors[id(made)][1]

    def _modes(self, args: tuple[Any, ...]) -> str:
        """What decides on the program of a call beside its arguments: which layers train, and autocast."""
        layers = (part for layer in layers_of(self._target, args) for part in layer.sublayers(include_self=True))
        return "".join("ET"[layer.training] for layer in layers) + repr(_private.autocast_state())

    def _hook(self, program: Any, forward_end: int, backward_start: int) -> int:
        """Plan a joint program; returns where its forward pass ends now."""
        try:
            return self._planned(program, forward_end, backward_start)
        except RematError as error:
            self._error = error
            return forward_end

    def _planned(self, program: Any, forward_end: int, backward_start: int) -> int:
        profile = get_profile(self._device or device_here("cpu"))
        ops = list(program.global_block().ops)
        gradients = [v for op in ops[backward_start:] for v in op.results() if v.initialized() and v.use_empty()]
        # Whoever starts the backward pass holds the gradients of the results until it is over.
        given = [v for op in ops[forward_end:backward_start] for v in op.results() if v.initialized()]
        sizes = Sizes(program)
        held = redirect_shape_reads(ops, backward_start, sizes)
        cut = Cut(forward_end, backward_start, held)
        traced = trace_program(program, profile, sizes, kept=[*gradients, *given], cut=cut)
        self.traced = traced
        if not self._request.plans:
            return forward_end
        candidate = ProgramCandidate(traced, self._resident_bytes, "to_static")
        plan = candidate.planned(self._request, share_of_bytes=self.share_of_bytes)
        last = ops[forward_end - 1]
        copies = candidate.carry_out(plan)
        self.plans.append(plan)
        _log.info("Planned %d operators: %d copies, peak %s.", len(ops), copies, format_bytes(plan.peak_bytes))
        return next(n for n, op in enumerate(program.global_block().ops) if op == last) + 1


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
