"""Chooses the number of micro-batches: each size is traced aside, planned for the budget, and timed.

Nothing of it trains: the functions traced here compute gradients and throw them away, and the variables that a layer
writes while they are timed get their values back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import tensorflow as tf

from remat.core.budget import parse_budget
from remat.core.errors import InfeasibleBudget
from remat.fit.fit import fits_plainly
from remat.fit.request import Request
from remat.micro_batches.choose import choose_for_batch
from remat.micro_batches.cut import largest_size
from remat.micro_batches.options import MicroBatchChoice, Option
from remat.micro_batches.timing import least_times_s
from remat.tensorflow import _private
from remat.tensorflow._traces import arguments_of_calls, call_when_traced
from remat.tensorflow.peak.device import called_with, current_device
from remat.tensorflow.planned import PlannableFunction, rewrite, with_bytes_for_auto
from remat.tensorflow.trace.func_graph import FunctionToPlan, carried_inputs

# Called in the body of a loop over micro-batches, with the batch's tensors and the pieces cut from them.
OnBody = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], None]

Result = TypeVar("Result")

TIMED_PIECES: Final = 2
"""Micro-batches that are timed in one run. The second adds its gradients to the first one's, as in a real update."""


@dataclass(frozen=True)
class _Traced:
    function: Any
    body: _private.FuncGraph
    leaves: list[tf.Tensor]
    pieces: list[tf.Tensor]


class Pieces:
    """The gradients of micro-batches, to be planned and timed for any size of them.

    Args:
        run: computes two micro-batches of what it is given, calls back in the body of its loop, and returns what must
            not be optimized away. AutoGraph does not see it.
        leaves: the tensors of a batch.
        shapes: of the largest batch, per leaf.
        in_xla: will the step be compiled with XLA?

    Raises:
        UnsupportedStep: where the batch cannot be split, or the loss not be put together again.
    """

    def __init__(
        self,
        run: Callable[[list[tf.Tensor], OnBody], Any],
        leaves: Sequence[tf.Tensor],
        shapes: Sequence[Sequence[int]],
        in_xla: bool,
    ) -> None:
        self._run = run
        self._leaves = list(leaves)
        self._shapes = [tuple(shape) for shape in shapes]
        self._in_xla = in_xla
        self._known: dict[int, _Traced] = {}
        self._plannable: dict[int, PlannableFunction] = {}
        # The compiler has to know sizes; elsewhere one trace serves them all.
        self._traced(1)

    def plannable(self, size: int) -> PlannableFunction:
        """The body of the loop over micro-batches of ``size`` samples."""
        if size not in self._plannable:
            traced = self._traced(size)
            known = self._real_shapes(traced.body, traced.leaves, traced.pieces, size)
            function = self._function_to_plan(traced.body, known, size)
            self._plannable[size] = PlannableFunction(function)
        return self._plannable[size]

    def times_s(self, sizes: Iterable[int], requests: Mapping[int, Request] | None = None) -> dict[int, float]:
        """Measured seconds of one micro-batch, by its number of samples: the least of a few runs of two of them.

        See :func:`remat.micro_batches.timing.least_times_s`.

        Args:
            sizes: numbers of samples.
            requests: the budgets of those that are to be planned, by size. One that no plan keeps is left out.
        """
        functions: dict[int, Any] = {}
        for size in sizes:
            request = (requests or {}).get(size)
            with contextlib.suppress(InfeasibleBudget):
                functions[size] = self._traced(size).function if request is None else self._planned(size, request)
        runs: dict[int, Callable[[], None]] = {}
        for size, function in functions.items():  # Only now: what lies on the device counts against the budgets.
            rows = tf.range(TIMED_PIECES * size)
            batch = [tf.gather(leaf, rows % tf.maximum(1, tf.shape(leaf)[0])) for leaf in self._leaves]
            runs[size] = functools.partial(_run, function, batch)
        variables = {id(v): v for function in functions.values() for v in function.graph.variables}
        with _unchanged(list(variables.values())):
            found = least_times_s(runs, on_processor=not current_device().is_gpu)
        return {size: seconds / TIMED_PIECES for size, seconds in found.items()}

    def _traced(self, size: int) -> _Traced:
        key = size if self._in_xla else 0
        if key not in self._known:
            bodies: list[tuple[_private.FuncGraph, list[tf.Tensor], list[tf.Tensor]]] = []

            def on_body(leaves: Sequence[tf.Tensor], pieces: Sequence[tf.Tensor]) -> None:
                bodies.append((tf.compat.v1.get_default_graph(), list(leaves), list(pieces)))

            function = self._function(size, on_body)
            self._known[key] = _Traced(function, *bodies[0])
        return self._known[key]

    def _planned(self, size: int, request: Request) -> Any:
        """The function with the loop's body planned, and written, for micro-batches of ``size`` samples."""

        def on_body(leaves: Sequence[tf.Tensor], pieces: Sequence[tf.Tensor]) -> None:
            body = tf.compat.v1.get_default_graph()

            def finish(succeeded: bool) -> None:
                if succeeded:
                    known = self._real_shapes(body, leaves, pieces, size)
                    rewrite(self._function_to_plan(body, known, size), request)

            call_when_traced(finish)

        return self._function(size, on_body)

    def _function_to_plan(
        self, body: _private.FuncGraph, known: Mapping[str, Sequence[int]], size: int
    ) -> FunctionToPlan:
        count = -(-self._shapes[0][0] // size)
        return FunctionToPlan(body, known, self._in_xla, carried=carried_inputs(body), iterations=count)

    def _function(self, size: int, on_body: OnBody) -> Any:
        rows = TIMED_PIECES * size if self._in_xla else None
        specs = [tf.TensorSpec((rows, *leaf.shape[1:]), leaf.dtype) for leaf in self._leaves]

        def run(*leaves: tf.Tensor) -> Any:
            return self._run(list(leaves), on_body)

        return tf.function(run, jit_compile=self._in_xla, autograph=False).get_concrete_function(*specs)

    def _real_shapes(
        self, body: _private.FuncGraph, leaves: Sequence[tf.Tensor], pieces: Sequence[tf.Tensor], size: int
    ) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs of the loop's body, by name, for micro-batches of ``size`` samples."""
        inside = {outer.name: inner.name for outer, inner in body.captures if tf.is_symbolic_tensor(outer)}
        known = {}
        for leaf, piece, shape in zip(leaves, pieces, self._shapes, strict=True):
            if leaf.name in inside:
                rows = TIMED_PIECES * size if self._in_xla else shape[0]
                known[inside[leaf.name]] = (rows, *shape[1:])
            known[piece.name] = (size, *shape[1:])
        return known


def choose_count(
    whole: PlannableFunction,
    pieces: Callable[[], Pieces],
    batch_size: int,
    request: Request,
    coupled: Sequence[str] = (),
) -> MicroBatchChoice:
    """The number of micro-batches that takes the least time within a budget.

    Args:
        whole: the step that takes the batch in one piece.
        pieces: makes the micro-batches' computation; called where the batch does not fit as it is.
        batch_size: samples of the largest batch.
        request: the budget, a percentage being one of the whole step's plain peak, and how to plan.
        coupled: names of what couples the samples of a batch, so that micro-batches change it.

    Raises:
        InfeasibleBudget: where no number of micro-batches fits.
    """
    request = with_bytes_for_auto(request)
    assert request.budget is not None
    budget_bytes = bytes_of_share(request.budget, whole)
    request = dataclasses.replace(request, budget=budget_bytes)
    cut = functools.cache(pieces)

    def plannable(count: int) -> PlannableFunction:
        return whole if count == 1 else cut().plannable(largest_size(batch_size, count))

    def request_for(count: int) -> Request:
        return request if count == 1 else for_pieces(request)

    def predicted_s(size: int) -> float:
        return (whole if size == batch_size else cut().plannable(size)).plain.graph.time_s

    def measure(options: Sequence[Option]) -> dict[int, float]:
        # Also where nothing is recomputed: a plan fixes the order of operations, which takes time of its own.
        asked = {o.size: dataclasses.replace(request_for(o.micro_batches), known=o.plan) for o in options}
        seconds = cut().times_s(asked, asked)
        return {o.micro_batches: o.micro_batches * seconds[o.size] for o in options if o.size in seconds}

    return choose_for_batch(
        batch_size,
        budget_bytes,
        lambda count: plannable(count).fitted(request_for(count), proves=False),
        fits_plainly=lambda count: fits_plainly(plannable(count).plain, budget_bytes),
        predicted_s=predicted_s,
        times_s=lambda sizes: cut().times_s(sizes),
        measure=measure,
        coupled=coupled,
    )


def for_pieces(request: Request) -> Request:
    """The request for the body of the loop over micro-batches, in which no update stands."""
    levers = tuple(lever for lever in request.levers if lever != "update")
    return dataclasses.replace(request, levers=levers or ("micro_batches",))


def bytes_of_share(budget: int | str, whole: PlannableFunction) -> int:
    """A budget in bytes; a share is one of the plain peak of the step that takes the batch in one piece."""
    plain = whole.plain
    # A step of small blocks alone shows nothing on a CPU's counter; it keeps any budget.
    return parse_budget(budget, max(1, plain.plain_peak.expected_bytes + plain.resident_bytes))


def outside(function: Callable[[], Result]) -> Result:
    """What ``function`` returns where no function is being traced, eagerly, while one is.

    In a thread of its own: ``tf.init_scope`` would keep tapes from recording.
    """
    given = arguments_of_calls()  # There, the calls that led here are not to be seen.

    def run() -> Result:
        with called_with(given):
            return function()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()


@contextlib.contextmanager
def _unchanged(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """What the block writes to variables that are not trained is taken back."""
    before = [(variable, variable.read_value()) for variable in variables if not variable.trainable]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _run(function: Any, batch: Sequence[tf.Tensor]) -> None:
    function(*batch)
    tf.test.experimental.sync_devices()
