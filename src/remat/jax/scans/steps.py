"""Loops over whole steps, such as those over training steps or over micro-batches: their bodies are planned.

A loop that has no backward loop leaves nothing behind, and may still need nearly all of a function's memory: while one
iteration runs. Its body is then a step like any other, with loops of its own, and is planned within less and less. So
are the branches of a ``lax.cond``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import jax

from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.fit.request import Request
from remat.fit.variants import Variants, cheapest_plan
from remat.jax import _private
from remat.jax._private import ClosedJaxpr, JaxprEqn
from remat.jax.blocks import plans_of_blocks
from remat.jax.context import Tie
from remat.jax.emit.evaluate import emit
from remat.jax.trace.program import Equation, Program
from remat.planners.view.problem import Problem

_BODIES: Final = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}
"""By the name of the primitive, the parameter that holds what may be a step: one body, or several branches."""

LEAST_SHARE: Final = 0.1
"""A loop's body is planned where the function would need less by this share if the body needed nothing. A judgement:
elsewhere what is outside of loops binds, and is planned as it is."""

_BY_HAND: Final = 2
"""How many ways to write bodies by hand are tried: around blocks, and with cuts between them, or around loops."""

VariantsOfBody: TypeAlias = Callable[[ClosedJaxpr], Variants[Any]]
"""Gives the ways to write a body: each is a ``remat.jax.variants.Variant``."""


class StepBody:
    """The body of a loop, or a branch, as a step of its own.

    Args:
        closed: the body.
        variants: the ways to write it.
        tie: how recomputations are held back.

    Attributes:
        needed_bytes: what it needs as it is, beside what it is given and what it returns.
    """

    def __init__(self, closed: ClosedJaxpr, variants: Variants[Any], tie: Tie) -> None:
        self._closed = closed
        self._tie: Tie = tie
        self._variants = variants
        graph: Graph = variants[0].graph
        self._around_bytes = graph.pinned_bytes + _bytes_returned(graph)
        peak_bytes = simulate(graph, graph.plain_schedule).peak_bytes
        self.needed_bytes = max(0, peak_bytes - self._around_bytes)
        self._least_bytes = 0  # The smallest budget, once one was too small.
        self._written: dict[int, ClosedJaxpr] = {}

    def within(self, own_bytes: int) -> ClosedJaxpr:
        """The body that needs so many bytes beside what it is given and returns, or as few as it can.

        It comes out the same each time: a saved plan is for one of them.
        """
        if own_bytes >= self.needed_bytes:
            return self._closed
        budget_bytes = max(1, self._least_bytes, own_bytes + self._around_bytes)
        try:
            return self._planned(budget_bytes)
        except InfeasibleBudget as error:
            self._least_bytes = error.minimum_bytes
            return self._planned(error.minimum_bytes)

    @cached_property
    def by_hand(self) -> Sequence[ClosedJaxpr]:
        """The body as users would write it: with ``jax.checkpoint`` around its loops' bodies, or around its blocks."""
        graph: Graph = self._variants[0].graph
        plans = (*map(self._variants.as_it_is, self._variants.suggested), *plans_of_blocks(graph, Problem.of(graph)))
        return [self._following(plan) for plan in plans]

    def _planned(self, budget_bytes: int) -> ClosedJaxpr:
        if budget_bytes not in self._written:
            plan = cheapest_plan(self._variants, budget_bytes, Request(), None, thorough=False)
            self._written[budget_bytes] = self._following(plan)
        return self._written[budget_bytes]

    def _following(self, plan: Plan) -> ClosedJaxpr:
        variant = self._variants.of_plan(plan)
        assert variant is not None, "the plan was made for one of the variants"
        program: Program = variant.program
        run = emit(program, plan.schedule, variant.turning_point, self._tie)
        captured = tuple(program.constants.values())
        shapes = [_private.shape_of_aval(var.aval) for var in self._closed.jaxpr.invars]
        made: ClosedJaxpr = jax.make_jaxpr(lambda *arguments: run(arguments, captured))(*shapes)
        return made


@dataclass(frozen=True)
class StepLoop:
    """A loop over steps, or branches that are steps.

    Attributes:
        place: number of the equation.
        equation: as it is.
        bodies: what it runs; of branches, one of them.
    """

    place: int
    equation: Equation
    bodies: tuple[StepBody, ...]

    @property
    def needed_bytes(self) -> int:
        """What the largest of its bodies needs."""
        return max(body.needed_bytes for body in self.bodies)

    def within(self, own_bytes: int) -> Equation:
        """The loop with bodies that need so many bytes, or as few as they can."""
        return self._with([body.within(own_bytes) for body in self.bodies])

    def by_hand(self, number: int) -> Equation:
        """The loop with bodies as users would write them in one of several ways; as small as they can be without it."""
        return self._with(
            [body.by_hand[number] if number < len(body.by_hand) else body.within(0) for body in self.bodies]
        )

    def _with(self, written: Sequence[ClosedJaxpr]) -> Equation:
        eqn = self.equation.eqn
        name = _BODIES[eqn.primitive.name]
        given = tuple(written) if isinstance(eqn.params[name], tuple) else written[0]
        return dataclasses.replace(self.equation, eqn=eqn.replace(params={**eqn.params, name: given}))


class StepLoops:
    """The loops over steps of a flat program, written again together.

    Args:
        loops: in program order.
        equations: all of the program's.
        peak_bytes: what the program needs as it is.

    Attributes:
        peak_bytes: as above.
    """

    def __init__(self, loops: Sequence[StepLoop], equations: Sequence[Equation], peak_bytes: int) -> None:
        self._loops = loops
        self._equations = equations
        self.peak_bytes = peak_bytes

    def __bool__(self) -> bool:
        return bool(self._loops)

    @classmethod
    def of(
        cls,
        equations: Sequence[Equation],
        paired: Collection[int],
        program_of: Callable[[], tuple[Program, Graph]],
        variants_of: VariantsOfBody,
        tie: Tie,
    ) -> StepLoops:
        """Those whose bodies are worth planning.

        Args:
            equations: the flat program.
            paired: numbers of the equations that are forward and backward loops of one another.
            program_of: gives the program with its equations fused, and its graph; asked where there are other loops.
            variants_of: the ways to write a body.
            tie: how recomputations in bodies are held back.
        """
        loops = {
            id(equation): number
            for number, equation in enumerate(equations)
            if equation.eqn.primitive.name in _BODIES
            and number not in paired
            and equation.mapped is None
            # What a body changes in place is a part of the loop around it.
            and not any(_private.is_reference(var.aval) for var in equation.eqn.invars)
        }
        if not loops:
            return cls((), equations, 0)
        program, graph = program_of()
        last = (instruction.equations[-1] for instruction in program.instructions)
        ops = {number: loops[id(one)] for number, one in enumerate(last) if id(one) in loops}
        free = [
            dataclasses.replace(op, workspace_bytes=0) if number in ops else op for number, op in enumerate(graph.ops)
        ]
        other = dataclasses.replace(graph, ops=tuple(free))
        peak_bytes = simulate(graph, graph.plain_schedule).peak_bytes
        least_bytes = LEAST_SHARE * peak_bytes
        if peak_bytes - simulate(other, other.plain_schedule).peak_bytes < least_bytes:
            return cls((), equations, peak_bytes)
        known: dict[int, StepBody] = {}  # A function that is called twice has one body.
        found = []
        for op, number in ops.items():
            if graph.ops[op].workspace_bytes >= least_bytes:
                bodies = _bodies_of(equations[number].eqn)
                for body in bodies:
                    if id(body) not in known:
                        known[id(body)] = StepBody(body, variants_of(body), tie)
                found.append(StepLoop(number, equations[number], tuple(known[id(body)] for body in bodies)))
        return cls(found, equations, peak_bytes)

    def written(self, count: int) -> list[Callable[[], list[Equation]]]:
        """Write the equations in so many ways: with bodies that need less and less, all within the same bytes."""
        most = max(loop.needed_bytes for loop in self._loops)
        return [partial(self._within, most * (count - n) // count) for n in range(1, count + 1)]

    def by_hand(self) -> list[Callable[[], list[Equation]]]:
        """Write the equations as users would, in ``_BY_HAND`` ways."""
        return [partial(self._by_hand, number) for number in range(_BY_HAND)]

    def _by_hand(self, number: int) -> list[Equation]:
        return self._each(lambda loop: loop.by_hand(number))

    def _within(self, own_bytes: int) -> list[Equation]:
        return self._each(lambda loop: loop.within(own_bytes))

    def _each(self, write: Callable[[StepLoop], Equation]) -> list[Equation]:
        equations = list(self._equations)
        for loop in self._loops:
            equations[loop.place] = write(loop)
        return equations


def _bodies_of(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    given = eqn.params[_BODIES[eqn.primitive.name]]
    return given if isinstance(given, tuple) else (given,)


def _bytes_returned(graph: Graph) -> int:
    return sum(graph.tensors[value].size_bytes for value in graph.outputs)
