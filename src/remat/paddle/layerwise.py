"""Layer-wise recomputation, chosen by a plan: what ``limit_memory`` does where ``to_static`` cannot capture a layer.

The forward pass runs once under hooks that note what autograd saves in each part of the layer, and keep nothing of it.
That makes a graph of parts: a part's result is kept, what it saves may be made again. The parts that the plan runs
twice are run by ``recompute`` from then on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from remat.core.budget import format_bytes
from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph, Op, Tensor
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.fit.candidate import Candidate
from remat.fit.fit import fit
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.paddle import _private
from remat.paddle.candidate import ProgramPlan
from remat.paddle.emit.fences import settled_bytes
from remat.paddle.first_step import MOST_CORRECTIONS, FirstStep, Training, gradient_bytes
from remat.paddle.recompute import recompute, side_effects_left_alone
from remat.paddle.tensors import bytes_of, tensors_in

_log = logging.getLogger("remat")

_RESERVE: Final = 0.05
"""The share of a peak that is left for kernels' scratch memory, and for gradients inside of a part of which only the
largest tensors are known. Too small, a step breaks its budget; too large, it recomputes more than it has to."""
_LARGEST_SHARE: Final = 1 / 8
"""A part that saves a larger share of all is taken apart into its own parts, so that little is made again at once. A
judgement: much less, and parts are single operators, which save little; much more, and one part binds the budget."""
_COVERED_SHARE: Final = 0.8
"""A part is taken apart only where its own parts save so much of what it saves: the rest of it could not be dropped."""


@dataclass(eq=False)
class Part:
    """A call of a layer in a forward pass, and what autograd saved in it.

    Attributes:
        layer: that was called.
        name: its name in the whole.
        given: where its inputs lie, and their bytes.
        saved_bytes: of what autograd saved outside of inner calls; the layer's inputs, results and parameters left out.
        results: where its results lie, and their bytes.
        largest_bytes: the largest tensor of these.
        scratch_bytes: more bytes than at its end were allocated at once while it ran: what kernels need by the way.
        time_s: seconds that it took.
        inner: the layers that it called itself.
        started: how many calls began before it.
        died: how many calls had begun when nothing held its results any more.
    """

    layer: Any
    name: str
    saved_bytes: int = 0
    largest_bytes: int = 0
    scratch_bytes: int = 0
    time_s: float = 0.0
    inner: list[Part] = field(default_factory=list)
    given: dict[int, int] = field(default_factory=dict)
    results: dict[int, int] = field(default_factory=dict)
    held: dict[int, Any] = field(default_factory=dict)
    started: int = 0
    died: int = 0

    @property
    def total_bytes(self) -> int:
        """What autograd saved in the call and in all inner ones."""
        inner = (one.total_bytes + one.result_bytes(without=self.results) for one in self.inner)
        return self.saved_bytes + sum(inner)

    def result_bytes(self, without: Collection[int] = ()) -> int:
        """Bytes of the results, those left out that lie at some places."""
        return sum(size_bytes for place, size_bytes in self.results.items() if place not in without)


@dataclass(frozen=True)
class _Planned:
    """The plan for one signature.

    Attributes:
        chosen: the layers that are recomputed, by id.
        first_step: the first step under the plan.
        counted_bytes: what the plan counts beside the layer.
        corrections: how many plans of the signature were before it.
    """

    chosen: frozenset[int]
    first_step: FirstStep
    counted_bytes: int
    corrections: int


class Layerwise:
    """A layer that runs eagerly, some of its parts recomputed.

    Args:
        layer: whose memory is limited.
        plain: its own ``forward``.
        request: with a budget.
        resident_bytes: memory that counts beside the layer's.
        reason: why the layer was not captured, for the line that says so.
        plans_again: is a signature planned once more after a first step that took more than its budget?
        strict: is a step over its budget an error, from the call after it?

    Attributes:
        plans: one for each signature, the newest last.
        training: what trains the layer, where that is known.
        first_step: that under the plan which was followed last; None before one was made.
    """

    def __init__(
        self,
        layer: Any,
        plain: Callable[..., Any],
        request: Request,
        resident_bytes: int,
        reason: str,
        *,
        plans_again: bool = True,
        strict: bool = False,
    ) -> None:
        self.plans: list[ProgramPlan] = []
        self._layer = layer
        self._plain = plain
        self._request = request
        self._resident_bytes = resident_bytes
        self._reason = reason
        self.training: Training | None = None
        self.first_step: FirstStep | None = None
        self._plans_again = plans_again
        self._strict = strict
        self._watched: set[int] = set()
        self._planned: dict[Any, _Planned] = {}
        self._chosen: frozenset[int] = frozenset()
        self._switched: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; a call of a new signature is planned first.

        Raises:
            InfeasibleBudget: where no choice of parts fits; it names the smallest budget.
            UnsupportedStep: where the layer calls no other layers.
        """
        key = _signature(args, kwargs)
        parameters = self._layer.parameters()
        there_bytes = gradient_bytes(parameters) + (0 if self.training is None else self.training.state_bytes())
        known = self._planned.get(key)
        if known is None:
            known = self._planned[key] = self._plan(args, kwargs, there_bytes, there_bytes)
        elif excess_bytes := known.first_step.excess_bytes(there_bytes):
            known = self._planned[key] = self._plan_again(args, kwargs, known, there_bytes, excess_bytes)
        self._chosen = known.chosen
        self.first_step = known.first_step
        for parameter in parameters:
            if not parameter.stop_gradient and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_hook(self._note)
        self.first_step.begin()
        return self._plain(*args, **kwargs)

    def _note(self, _: Any) -> None:
        if self.first_step is not None:
            self.first_step.note()

    def _plan_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], known: _Planned, there_bytes: int, excess_bytes: int
    ) -> _Planned:
        """Plan a signature for what its first step took; the plan from before where nothing leaves so much room."""
        budget_bytes = known.first_step.plan.budget_bytes if self.training is None else None
        counted_bytes = known.counted_bytes + excess_bytes
        try:
            return self._plan(args, kwargs, there_bytes, counted_bytes, budget_bytes, known.corrections + 1)
        except InfeasibleBudget as error:
            known.first_step.tell_no_room(excess_bytes, there_bytes, error)
            return known

    def _plan(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        there_bytes: int,
        counted_bytes: int,
        budget_bytes: int | None = None,
        corrections: int = 0,
    ) -> _Planned:
        whole = observe(self._layer, self._plain, args, kwargs)
        parts = parts_of(whole)
        name = type(self._layer).__name__
        if not parts:
            raise UnsupportedStep(
                f"paddle.jit.to_static cannot capture {name} ({self._reason}), and {name} calls no layers that could "
                "be recomputed one by one; put its parts into layers of their own"
            )
        candidate = _PartsCandidate(self._layer, parts, whole, args, kwargs, self._resident_bytes + counted_bytes)
        request = self._request if budget_bytes is None else dataclasses.replace(self._request, budget=budget_bytes)
        plan = fit(candidate, request)
        schedule = candidate.as_it_runs(plan.schedule)
        again = [n for n in range(len(parts)) if schedule.count(candidate.saves(n)) > 1]
        values = {one.name: getattr(plan, one.name) for one in dataclasses.fields(Plan)}
        found = ProgramPlan(**{**values, "schedule": schedule, "mode": "layers"}, graph=candidate.graph)
        self.plans.append(found)
        for number in again:
            self._switch(parts[number].layer)
        _log.log(
            logging.INFO if corrections else logging.WARNING,
            "paddle.jit.to_static cannot capture %s (%s): it runs eagerly, %d of its %d parts recomputed; peak %s.",
            name,
            self._reason,
            len(again),
            len(parts),
            format_bytes(plan.peak_bytes),
        )
        first_step = FirstStep(
            found,
            there_bytes,
            found.graph.pinned_bytes + self._resident_bytes + there_bytes,
            plans_again=self._plans_again and corrections < MOST_CORRECTIONS,
            strict=self._strict,
        )
        chosen = frozenset(id(parts[number].layer) for number in again)
        return _Planned(chosen, first_step, counted_bytes, corrections)

    def _switch(self, layer: Any) -> None:
        """Let a part be recomputed by the calls whose plan says so."""
        if id(layer) in self._switched:
            return
        self._switched.add(id(layer))
        plain = layer.forward
        again = recompute(plain)

        def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
            return (again if id(layer) in self._chosen else plain)(*args, **kwargs)

        layer.forward = types.MethodType(forward, layer)


def observe(layer: Any, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Part:
    """Run a forward pass that keeps nothing, moves no statistics and draws nothing; return what its parts save."""
    whole = Part(layer, "", given=_places((list(args), kwargs)))
    stack = [whole]
    parameters = {p.data_ptr() for p in layer.parameters()}

    def pack(tensor: Any) -> None:
        part, place = stack[-1], tensor.data_ptr()
        if place not in parameters and place not in part.given and place not in part.held:
            # Held until the next call begins or ends, so that nothing else is given its place.
            part.held[place] = tensor.detach()
            size_bytes = tensor.size * tensor.element_size()
            part.saved_bytes += size_bytes
            part.largest_bytes = max(part.largest_bytes, size_bytes)

    gc.collect()  # What an earlier step left in circles must not go while a part is looked at.
    with _calls_noted(layer, stack), side_effects_left_alone(forward, args):
        started = time.perf_counter()
        with _private.saved_tensors_hooks(pack, lambda _: None):
            forward(*args, **kwargs)
        whole.time_s = time.perf_counter() - started
    whole.held.clear()
    return whole


@contextlib.contextmanager
def _calls_noted(layer: Any, stack: list[Part]) -> Iterator[None]:
    """Inside, every call of a layer within another one is a part of the newest one on the stack."""
    removers = []
    # What the layers inside of a part were given and returned, until the part ends. Tensors are known by their place in
    # memory, so nothing else may get the place of one of these.
    alive: list[Any] = []
    begun = 0
    settled_bytes()
    _private.reset_peak()

    def enter(name: str) -> Callable[..., None]:
        def before(called: Any, inputs: Any) -> None:
            nonlocal begun
            begun += 1
            stack[-1].held.clear()
            note_peak()
            part = Part(called, name, given=_places(list(inputs)), time_s=-time.perf_counter(), started=begun)
            stack[-1].inner.append(part)
            stack.append(part)
            alive.append(inputs)

        return before

    def note_peak() -> None:
        peak_bytes = _private.peak_bytes()
        for part in stack:
            part.scratch_bytes = max(part.scratch_bytes, peak_bytes)
        settled_bytes()  # What is being freed at this moment is no part of the next peak.
        _private.reset_peak()

    def note_death(part: Part) -> None:
        part.died = begun

    def leave(called: Any, inputs: Any, result: Any) -> None:
        note_peak()
        part = stack.pop()
        part.scratch_bytes = max(0, part.scratch_bytes - settled_bytes())
        part.time_s += time.perf_counter()
        part.results = _places(result)
        for tensor in tensors_in(result):
            weakref.finalize(tensor, note_death, part).atexit = False
        part.saved_bytes -= sum(size for place, size in part.results.items() if place in part.held)
        part.largest_bytes = max([part.largest_bytes, *(inner.largest_bytes for inner in part.inner)])
        part.held.clear()
        alive.append(result)
        if len(stack) == 1:
            alive.clear()

    for name, inner in layer.named_sublayers():
        removers.append(inner.register_forward_pre_hook(enter(name)))
        removers.append(inner.register_forward_post_hook(leave))
    try:
        yield
    finally:
        for remover in removers:
            remover.remove()


def parts_of(whole: Part) -> list[Part]:
    """The parts to choose from, in the order of their calls: none within another, none that is called twice."""
    calls: dict[int, int] = {}
    whole_bytes = whole.total_bytes

    def count(part: Part) -> None:
        calls[id(part.layer)] = calls.get(id(part.layer), 0) + 1
        for inner in part.inner:
            count(inner)

    def taken_apart(part: Part) -> list[Part]:
        covered = part.total_bytes - part.saved_bytes
        is_large = part.total_bytes > _LARGEST_SHARE * whole_bytes and len(part.inner) > 1
        is_large = is_large and covered >= _COVERED_SHARE * part.total_bytes
        if not is_large and calls[id(part.layer)] == 1:
            return [part]  # Also one that saves nothing of its own: its inputs are kept for it.
        return [one for inner in part.inner for one in taken_apart(inner)]

    count(whole)
    return [one for inner in whole.inner for one in taken_apart(inner)]


class _PartsCandidate(Candidate):
    """The parts of a layer as a graph: for each, what it returns, what it saves, and its backward pass."""

    reserve = _RESERVE

    def __init__(
        self,
        layer: Any,
        parts: Sequence[Part],
        whole: Part,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        resident_bytes: int,
    ) -> None:
        self.resident_bytes = resident_bytes
        self._count = len(parts)
        self._graph = _graph_of(layer, parts, whole, args, kwargs)
        self._plain_peak = PeakRange.exactly(simulate(self._graph, self._graph.plain_schedule).peak_bytes)

    @property
    def graph(self) -> Graph:
        """The parts."""
        return self._graph

    @property
    def plain_peak(self) -> PeakRange:
        """What the observed forward pass says."""
        return self._plain_peak

    def real_peak(self, plan: Plan) -> PeakRange:
        """That of the order in which ``recompute`` makes things again."""
        return PeakRange.exactly(simulate(self._graph, self.as_it_runs(plan.schedule)).peak_bytes)

    def saves(self, part: int) -> int:
        """The op that makes what a part saves."""
        return 2 * part + 2

    def as_it_runs(self, schedule: Sequence[int]) -> tuple[int, ...]:
        """The schedule with each recomputation just before the backward pass of its part."""
        found = list(range(2 * self._count + 2))
        for part in reversed(range(self._count)):
            if schedule.count(self.saves(part)) > 1:
                found.append(self.saves(part))
            found.append(2 * self._count + 2 + self._count - 1 - part)
        return tuple(found)


def _rest_bytes(part: Part, chosen_from: Collection[int]) -> int:
    """What autograd saved outside of the parts to choose from."""
    if id(part) in chosen_from:
        return 0
    return part.saved_bytes + sum(_rest_bytes(inner, chosen_from) for inner in part.inner)


def _graph_of(layer: Any, parts: Sequence[Part], whole: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    tensors: list[Tensor] = []
    ops: list[Op] = []
    outputs: list[int] = []

    def tensor(size_bytes: int, name: str) -> int:
        tensors.append(Tensor(size_bytes, name))
        return len(tensors) - 1

    def op(name: str, kind: str, inputs: Iterable[int], made: Sequence[int], time_s: float, **more: Any) -> None:
        phase = "backward" if kind in ("loss", "backward") else "forward"
        ops.append(Op(name, kind, tuple(inputs), tuple(made), time_s, phase=phase, **more))

    pinned = [
        tensor(bytes_of((*layer.parameters(), *layer.buffers())), "parameters"),
        tensor(bytes_of(tensors_in((list(args), kwargs))), "batch"),
    ]
    rest = tensor(_rest_bytes(whole, {id(part) for part in parts}), "saved between the parts")
    op("between the parts", "forward", pinned, [rest], 0.0, recomputable=False)
    lies_at = dict.fromkeys(whole.given, pinned[1])
    reads, saved = [], []
    for part in parts:
        made = []
        for place, size_bytes in part.given.items():
            if place not in lies_at:
                lies_at[place] = tensor(size_bytes, f"{part.name}, given")
                made.append(lies_at[place])
        reads.append([lies_at[place] for place in part.given])
        before = [t for t in reads[-1] if t not in made] or [rest]
        results = []
        for place, size_bytes in part.results.items():
            if place not in part.given:
                lies_at[place] = tensor(size_bytes, part.name)
                results.append(lies_at[place])
        op(part.name, "forward", before, [*made, *results], 0.0, recomputable=False)
        saved.append(tensor(part.total_bytes, f"{part.name}, saved"))
        op(f"{part.name}, saved", "forward", reads[-1], [saved[-1]], part.time_s)
    gradients = [tensor(sum(part.results.values()), f"gradient of {part.name}") for part in parts]
    # The gradient of a result is there from the backward pass of the last part that may read the result.
    last_readers = [
        max((n for n in range(number + 1, len(parts)) if parts[n].started <= part.died), default=number + 1)
        for number, part in enumerate(parts)
    ]
    made_by = [
        [gradients[n] for n, last in enumerate(last_readers) if last == number] for number in range(len(parts) + 1)
    ]
    op("loss", "loss", [ops[-2].outputs[-1] if ops[-2].outputs else rest], made_by[-1], 0.0, recomputable=False)
    for number in reversed(range(len(parts))):
        part = parts[number]
        trained = bytes_of(p for p in part.layer.parameters() if not p.stop_gradient)
        outputs.append(tensor(trained, f"gradients of {part.name}"))
        op(
            f"{part.name}, backward",
            "backward",
            dict.fromkeys([saved[number], *reads[number], gradients[number], *([rest] if number == 0 else [])]),
            [*made_by[number], outputs[-1]],
            2 * part.time_s,
            recomputable=False,
            # Two gradients inside of the part, of which no more is known than what they are gradients of.
            workspace_bytes=2 * part.largest_bytes + part.scratch_bytes,
        )
    return Graph(tuple(ops), tuple(tensors), tuple(pinned), tuple(outputs), free_order=False)


def _places(value: Any) -> dict[int, int]:
    """Where tensors lie, and their bytes."""
    return {t.data_ptr(): t.size * t.element_size() for t in tensors_in(value)}


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple((tuple(t.shape), str(t.dtype)) for t in tensors_in((list(args), kwargs)))
