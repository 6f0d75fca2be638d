"""The ways to write a traced function: as it is, and with loops that leave less and less behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.jax._private import ClosedJaxpr
from remat.jax.scans.variants import FindReceived, scan_variants
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import Program, program_of, trace_jaxpr
from remat.planners.view.problem import Problem
from remat.running.cost_model import device_here, get_profile


@dataclass(frozen=True)
class Variant:
    """One way to write the function: as it is, or with loops that keep less.

    Attributes:
        program: the traced function.
        graph: what planners see of it.
        turning_point: the instruction that ends its forward part.
        held: ops that no plan repeats, because the user asked for their results to be kept.
    """

    program: Program
    graph: Graph
    turning_point: int
    held: frozenset[int] = frozenset()

    @property
    def graph_to_plan(self) -> Graph:
        """The graph in which what is held may not run twice."""
        if not self.held:
            return self.graph
        ops = tuple(
            dataclasses.replace(op, recomputable=op.recomputable and number not in self.held)
            for number, op in enumerate(self.graph.ops)
        )
        return dataclasses.replace(self.graph, ops=ops)


class Variants(Sequence[Variant]):
    """Variants that are made when they are asked for: the function as it is, then those whose loops leave less.

    Args:
        makers: make the variants, in this order; each is called once at most.
    """

    def __init__(self, makers: Sequence[Callable[[], Variant]]) -> None:
        self._makers = tuple(makers)
        self._made: dict[int, Variant] = {}

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        place = range(len(self))[number]
        if place not in self._made:
            self._made[place] = self._makers[place]()
        return self._made[place]

    def changed(self, change: Callable[[Variant], Variant]) -> Variants:
        """The same variants, each changed when it is asked for."""
        return Variants([partial(lambda place: change(self[place]), place) for place in range(len(self))])

    def first_within(self, budget_bytes: int) -> int:
        """Number of the variant that keeps the most and fits as it is; the number of variants where none fits.

        Each variant needs less than those before it, apart from the first and from neighbours that differ by little,
        so few of them have to be made.
        """
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._plain_peak_bytes(middle) <= budget_bytes:
                high = middle
            else:
                low = middle + 1
        return low

    def of_plan(self, plan: Plan) -> Variant | None:
        """The variant that a plan is for; None where it is for none of them."""
        return next((one for one in self._likeliest_first(plan) if one.graph.fingerprint == plan.fingerprint), None)

    def _plain_peak_bytes(self, number: int) -> int:
        graph = self[number].graph
        return simulate(graph, graph.plain_schedule).peak_bytes

    def _likeliest_first(self, plan: Plan) -> Iterator[Variant]:
        made = dict(sorted(self._made.items()))
        yield from made.values()
        budget_bytes = plan.budget_bytes if plan.traced_budget_bytes is None else plan.traced_budget_bytes
        near = self.first_within(budget_bytes)
        for number in sorted(range(len(self)), key=lambda one: abs(one - near)):
            if number not in made:
                yield self[number]


def variants_of_jaxpr(
    closed: ClosedJaxpr, find_received: FindReceived | None = None, kept_names: Sequence[str] = ()
) -> Variants:
    """A traced function as it is, then with loops that keep less and less.

    Args:
        closed: the function.
        find_received: as in ``scan_variants``, where the arguments lie on several devices.
        kept_names: as in ``program_of``.

    Raises:
        UnsupportedStep: where a shape is unknown.
    """
    profile = get_profile(device_here("cpu" if jax.default_backend() == "cpu" else "a100"))

    def variant_of(make: Callable[[], Any]) -> Variant:
        program = program_of(make(), kept_names)
        graph = graph_of_program(program, profile)
        return Variant(program, graph, Problem.of(graph).turning_point)

    makers: list[Callable[[], Any]] = [lambda: closed, *scan_variants(closed, profile, find_received)]
    return Variants([partial(variant_of, make) for make in makers])


def variants_of(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    find_received: FindReceived | None = None,
    kept_names: Sequence[str] = (),
) -> tuple[Variants, Any]:
    """A function as it is, then with loops that keep less and less; and the structure of what it returns.

    Args:
        function: takes the flat arguments.
        arguments: arrays, tracers or shapes.
        find_received: as in ``variants_of_jaxpr``.
        kept_names: likewise.

    Raises:
        UnsupportedStep: where a shape is unknown, or values are offloaded.
    """
    closed, structure = trace_jaxpr(function, arguments)
    return variants_of_jaxpr(closed, find_received, kept_names), structure
