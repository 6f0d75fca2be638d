"""Slices among the levers of a function: the cheapest plan of it as it is, or with a region in slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from remat.core.graph import Graph
from remat.core.plan import Plan, Split
from remat.fit.levers import LEAST_SAVED, MOST_EXTRA_TIME, Variant, fit_with_splits
from remat.fit.request import Request
from remat.jax._private import ClosedJaxpr
from remat.jax.candidate import FunctionCandidate
from remat.jax.split.split_jaxpr import SCOPE, Splitter
from remat.jax.trace.program import Program


class SplittableFunction:
    """A function as it is, and with its widest region in any number of slices.

    Args:
        closed: the function, traced.
        candidate_of: what ``remat.fit`` sees of a function that is written in so many slices, 1 for as it is.

    Attributes:
        plain: the function as it is.
    """

    def __init__(self, closed: ClosedJaxpr, candidate_of: Callable[[ClosedJaxpr, int], FunctionCandidate]) -> None:
        self._closed = closed
        self._candidate_of = candidate_of
        self.plain = candidate_of(closed, 1)
        self._splitters: dict[bool, Splitter] = {}
        self._known: dict[tuple[int, bool], FunctionCandidate | None] = {}

    def planned(self, request: Request, share_of_bytes: int | None = None) -> Plan:
        """The plan that a request asks for; with slices where it brings such a plan, or where they are cheapest.

        Args:
            request: its ``known`` plan is followed where it is for this function.
            share_of_bytes: as in ``remat.fit.fit.fit``.

        Raises:
            InfeasibleBudget: where no plan fits.
            PlanMismatch: where ``request.plan`` is for another function.
            UnsupportedStep: where the checkpoints name nothing.
        """
        given = request.plan if request.plan is not None else request.known
        if given is not None and self.candidate_for(given).recognises(given):
            return given
        if request.plan is not None or request.budget is None or "split" not in request.levers:
            return self.plain.planned(request, share_of_bytes)
        plan = fit_with_splits(
            self.plain, request, self._variant, partial(self._variant, inner=True), share_of_bytes=share_of_bytes
        )
        if plan.split is None:
            return plan
        return dataclasses.replace(plan, split=dataclasses.replace(plan.split, stands_for=self._stands_for(plan)))

    def candidate_for(self, plan: Plan) -> FunctionCandidate:
        """The function as a plan has it."""
        made = None if plan.split is None else self._in_slices(plan.split.slices, plan.split.inner)
        return self.plain if made is None else made

    @property
    def least_bytes(self) -> int:
        """What lives inside of a region before it is worth the trouble."""
        return int(LEAST_SAVED * self.plain.plain_peak.highest_bytes)

    def _splitter(self, inner: bool) -> Splitter:
        if inner not in self._splitters:
            self._splitters[inner] = Splitter(self._closed, self.least_bytes, inner=inner)
        return self._splitters[inner]

    def _in_slices(self, slices: int, inner: bool) -> FunctionCandidate | None:
        if (slices, inner) not in self._known:
            closed = self._splitter(inner).split(slices)
            self._known[slices, inner] = None if closed is None else self._candidate_of(closed, slices)
        return self._known[slices, inner]

    def _variant(self, slices: int, inner: bool = False) -> Variant | None:
        """The function in so many slices; None where there is no region, or where a slice is too small."""
        made = self._in_slices(slices, inner)
        if made is None:
            return None
        extra_time_s = made.graph.time_s - self.plain.graph.time_s
        if extra_time_s > MOST_EXTRA_TIME * self.plain.graph.time_s:
            return None
        fingerprint = self.plain.graph.fingerprint
        return Variant(made, Split(slices, self._saved_bytes(inner), extra_time_s, fingerprint, (), inner))

    def _region_ops(self, inner: bool) -> tuple[int, ...]:
        """The ops of the unsplit graph that the slices stand for, those that only part of is in the region included."""
        program: Program = self.plain.program
        inside = self._splitter(inner).values
        return tuple(
            number
            for number, instruction in enumerate(program.instructions)
            if any(value in inside for one in instruction.equations for value in one.outputs)
        )

    def _saved_bytes(self, inner: bool) -> int:
        """Bytes of the tensors that only the region's ops read, without the values that the compiler fuses away."""
        graph, region = self.plain.graph, set(self._region_ops(inner))
        kept = {*graph.outputs, *(v for n, op in enumerate(graph.ops) if n not in region for v in op.inputs)}
        kept_roots = {graph.roots[value] for value in kept}
        made = (value for number in region for value in graph.ops[number].outputs)
        return sum(graph.tensors[value].size_bytes for value in made if graph.roots[value] == value not in kept_roots)

    def _stands_for(self, plan: Plan) -> tuple[tuple[int, int], ...]:
        graph: Graph = self.candidate_for(plan).graph_of(plan)
        loops = [number for number, op in enumerate(graph.ops) if f"{SCOPE}/" in op.name and op.kind == "scan"]
        assert plan.split is not None, "only a plan with slices has ops that stand for others"
        inside = self._region_ops(plan.split.inner)
        return tuple((loop, op) for loop in loops for op in inside)
