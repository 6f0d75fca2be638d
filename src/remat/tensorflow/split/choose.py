"""Slices among the levers of a function: the cheapest plan of it as it is, or with regions in slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import tensorflow as tf

from remat.core.plan import Plan, Split
from remat.fit.levers import LEAST_SAVED, MOST_EXTRA_TIME, Variant, fit_with_splits
from remat.fit.request import Request
from remat.tensorflow import _private
from remat.tensorflow.peak.candidates import FunctionCandidate
from remat.tensorflow.split.split_function import Splitter, Written
from remat.tensorflow.trace.func_graph import FunctionToPlan, TracedStep


@dataclasses.dataclass(frozen=True)
class _InSlices:
    """A copy of a function with regions in slices."""

    candidate: FunctionCandidate
    function: FunctionToPlan
    original_inputs: dict[str, str]
    written: Written


class SplittableFunction:
    """A function as it is, and with its widest region, or inner layers, in any number of slices; each in a copy of it.

    Args:
        function: the function, whose trace is over.
        plain: what ``remat.fit`` sees of it.
        candidate_of: the same of a copy.
    """

    def __init__(
        self,
        function: FunctionToPlan,
        plain: FunctionCandidate,
        candidate_of: Callable[[FunctionToPlan], FunctionCandidate],
    ) -> None:
        self._function = function
        self._plain = plain
        self._candidate_of = candidate_of
        self._splitters: dict[bool, Splitter] = {}
        self._known: dict[tuple[int, bool], _InSlices | None] = {}

    def fitted(self, request: Request, *, proves: bool = True) -> Plan:
        """The cheapest plan within the budget of a request.

        Args:
            request: with a budget.
            proves: is the plan's bound wanted?

        Raises:
            InfeasibleBudget: where no plan fits.
        """
        with_inner_layers = partial(self._variant, inner=True)
        return fit_with_splits(self._plain, request, self._variant, with_inner_layers, proves=proves)

    def candidate_for(self, plan: Plan) -> FunctionCandidate:
        """The function as a plan has it; as it is, where it cannot be cut so."""
        made = None if plan.split is None else self._in_slices(plan.split.slices, plan.split.inner)
        return self._plain if made is None else made.candidate

    def write(self, plan: Plan, step: TracedStep) -> TracedStep:
        """Write the slices of a plan into the function itself.

        Args:
            plan: one with a split, for a copy of the function.
            step: the trace of that copy, for which the plan is.

        Returns:
            The same step, of the function.
        """
        assert plan.split is not None, "only a plan with slices has slices to write"
        made = self._in_slices(plan.split.slices, plan.split.inner)
        graph = self._function.func_graph
        written = self._splitter(plan.split.inner).write(graph, graph.get_tensor_by_name, plan.split.slices)
        assert made is not None, "the plan was made for a copy in as many slices"
        assert written is not None, "what a copy can be cut into, the function can"
        pairs = zip(made.written.operations, written.operations, strict=True)
        new_names = {copied.name: own.name for copied, own in pairs}

        def tensor_named(name: str) -> tf.Tensor:
            if name in made.original_inputs:
                return graph.get_tensor_by_name(made.original_inputs[name])
            op, _, number = name.partition(":")
            return graph.get_tensor_by_name(f"{new_names.get(op, op)}:{number}")

        return step.moved(tensor_named)

    def _splitter(self, inner: bool) -> Splitter:
        if inner not in self._splitters:
            least_bytes = int(LEAST_SAVED * self._plain.plain_peak.highest_bytes)
            self._splitters[inner] = Splitter(self._function, least_bytes, inner=inner)
        return self._splitters[inner]

    def _in_slices(self, slices: int, inner: bool) -> _InSlices | None:
        if (slices, inner) not in self._known:
            self._known[slices, inner] = self._written(slices, inner)
        return self._known[slices, inner]

    def _written(self, slices: int, inner: bool) -> _InSlices | None:
        splitter = self._splitter(inner)
        if slices > splitter.length:
            return None
        function = self._function
        graph, named = _private.copy_to_change(function.func_graph)
        written = splitter.write(graph, named, slices)
        assert written is not None, "the regions have as many units"
        copied = dataclasses.replace(
            function,
            func_graph=graph,
            input_shapes={named(name).name: shape for name, shape in function.input_shapes.items()},
            carried=frozenset(named(name).name for name in function.carried),
            moved=_numbers(graph, written),
        )
        inputs = {named(tensor.name).name: tensor.name for tensor in function.func_graph.inputs}
        return _InSlices(self._candidate_of(copied), copied, inputs, written)

    def _variant(self, slices: int, inner: bool = False) -> Variant | None:
        """The function in so many slices; None where there is no region, or where a slice is too small."""
        made = self._in_slices(slices, inner)
        if made is None:
            return None
        plain = self._plain.graph
        graph = made.candidate.graph
        extra_time_s = graph.time_s - plain.time_s
        if extra_time_s > MOST_EXTRA_TIME * plain.time_s:
            return None
        places = {op.name: number for number, op in enumerate(plain.ops)}
        pairs = ((number, made.written.stands_for.get(op.name)) for number, op in enumerate(graph.ops))
        stands_for = tuple((number, places[name]) for number, name in pairs if name in places)
        saved_bytes = self._splitter(inner).saved_bytes
        split = Split(slices, saved_bytes, extra_time_s, plain.fingerprint, stands_for, inner)
        return Variant(made.candidate, split)


def _numbers(graph: _private.FuncGraph, written: Written) -> dict[str, int]:
    """The places of what was written into a function, as numbers of its operations; constants stand in front."""
    numbers = {op.name: number for number, op in enumerate(graph.get_operations())}
    behind = len(numbers) - len(written.operations)
    places = zip(written.operations, written.places, strict=True)
    found = {op.name: behind if place is None else numbers[place] for op, place in places}
    return found | dict.fromkeys(written.constants, 0)
