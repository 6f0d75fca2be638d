"""Variants of layers under ``lax.scan``: the loops leave less and less behind, the backward one makes the rest again.

Both bodies of a scan together are one step of training. Each variant goes one step down the menus of its pairs
(``remat.jax.scans.menu``): fewer values are stacked, or more iterations run in chunks. Below the last option, the body
of the backward loop is planned as any step is. A variant is traced when somebody asks for it, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import jax

from remat.core.errors import InfeasibleBudget
from remat.core.simulator import simulate
from remat.fit.loop_menu import merged
from remat.jax import _private
from remat.jax._private import ClosedJaxpr
from remat.jax.context import native_tie
from remat.jax.emit.evaluate import emit
from remat.jax.scans.loops import Body, Choice, LoopPair
from remat.jax.scans.menu import LoopBody, menu_of
from remat.jax.scans.pairs import Pair, find_pairs
from remat.jax.trace import op_facts
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import Atom, Equation, Flattener, Program, alive, program_of, program_of_equations
from remat.planners.view.problem import Problem
from remat.planning.find import find
from remat.running.cost_model import DeviceProfile

FindReceived: TypeAlias = Callable[[Any], Mapping[int, frozenset[int]]]
"""Takes a flat function whose loops are written again. By the number of a loop, gives the values of its body that come
from other devices."""

TraceBody: TypeAlias = Callable[[Callable[..., Sequence[Any]]], ClosedJaxpr]
"""Takes a flat function that computes what the body of a ``shard_map`` does, and traces it in that body's place."""

Maker: TypeAlias = Callable[[], ClosedJaxpr]
"""Traces one variant."""

_MOST_VARIANTS: Final = 96
"""So many at most, those between left out evenly: a saved plan is for one of them, which must be found again."""

_BODY_SHARES: Final = (0.85, 0.7, 0.55, 0.4)
"""The shares of what the body of a backward loop needs that become variants. Judgements, not measured."""

_SHARES_OVER_DEVICES: Final = (0.7, 0.4, 0.0)
"""The shares of all that loops could stack, over several devices. Few, since there each variant also takes two
compilations, which show what one device holds."""

_BODY_PLANNER: Final = "peak_greedy"
"""Plans the bodies. It needs no time limit, so the variants come out the same each time: a saved plan is for one."""


@dataclass(frozen=True)
class ScanVariants:
    """A function with pairs of loops that leave less and less behind.

    Attributes:
        makers: trace the variants, in this order.
        checkpointed: number of the one whose loops make everything again in each iteration, as with ``jax.checkpoint``
            around their bodies; None where there is none.
    """

    makers: Sequence[Maker]
    checkpointed: int | None = None


def scan_variants(
    closed: ClosedJaxpr,
    profile: DeviceProfile,
    find_received: FindReceived | None = None,
    trace_body: TraceBody | None = None,
) -> ScanVariants:
    """The function with pairs of loops that leave less and less behind; no variant where it has no such pair.

    Args:
        closed: the function.
        profile: for the predicted times.
        find_received: over several devices, finds the values of the bodies that come from other devices, which are
            then kept. Bodies are not planned there, since it is not known what the backward one receives.
        trace_body: where the function is the body of a ``shard_map``, traces one that takes its place. Loops with
            collectives are written again, too: what comes from other devices is stacked, so that each collective runs
            once. Bodies of backward loops are not planned there either.

    Raises:
        UnsupportedStep: where a shape is unknown.
    """
    flattener = Flattener()
    inputs = tuple(flattener.value(var.aval) for var in closed.jaxpr.invars)
    outputs = flattener.add(closed, inputs)
    equations = alive(flattener.equations, outputs)
    pairs = find_pairs(equations, outputs, op_facts.may_repeat if trace_body is None else op_facts.may_be_stacked)
    if not pairs or (trace_body is not None and (flattener.constants or any(pair.constants for pair in pairs))):
        return ScanVariants(())  # An array that a mapped body captures would become one more argument of it.
    bodies = [_forward_program(pair) for pair in pairs]
    graphs = [graph_of_program(body, profile) for body in bodies]
    shapes = [_shape(flattener.avals[value]) for value in inputs]
    rewritten = _Rewritten(flattener, equations, inputs, outputs, pairs)

    def traced(choices: Sequence[Choice], share: float | None = None) -> ClosedJaxpr:
        planned = _as_it_is if share is None else partial(_planned_body, share, profile)
        run = rewritten.with_choices(choices, planned)
        made: ClosedJaxpr = jax.make_jaxpr(run)(*shapes) if trace_body is None else trace_body(run)
        return made

    if find_received is not None:
        everything = [Choice(frozenset(pair.needed) - pair.free) for pair in pairs]
        received = find_received(rewritten.with_choices(everything, _as_it_is))
        loops = [
            LoopBody(pair, body, graph, received.get(pair.forward, frozenset()))
            for pair, body, graph in zip(pairs, bodies, graphs, strict=True)
        ]
        rows = [tuple(loop.cheapest(share).way for loop in loops) for share in _SHARES_OVER_DEVICES]
        return ScanVariants([partial(traced, row) for row in dict.fromkeys(rows)])
    rows = merged([menu_of(pair, body, graph) for pair, body, graph in zip(pairs, bodies, graphs, strict=True)])
    thinned = [rows[number * (len(rows) - 1) // max(1, _MOST_VARIANTS - 1)] for number in range(_MOST_VARIANTS)]
    rows = rows if len(rows) <= _MOST_VARIANTS else list(dict.fromkeys(thinned))
    whole = [number for number, row in enumerate(rows) if not any(choice.chunks for choice in row)]
    makers = [partial(traced, row) for row in rows]
    if trace_body is None:
        makers += [partial(traced, rows[-1], share) for share in _BODY_SHARES]
    return ScanVariants(makers, max(whole, default=None))


def _as_it_is(body: Body, carry: Any, stacked: Any) -> Body:
    return body


def _planned_body(share: float, profile: DeviceProfile, body: Body, carry: Any, stacked: Any) -> Body:
    """The body of a backward loop, planned as a step of its own within a share of the bytes that it needs as it is."""
    first = jax.eval_shape(lambda arrays: jax.tree.map(lambda array: array[0], arrays), stacked)
    closed, shapes = jax.make_jaxpr(body, return_shape=True)(carry, first)
    program = program_of(closed)
    graph = graph_of_program(program, profile)
    needed = simulate(graph, graph.plain_schedule).peak_bytes - graph.pinned_bytes
    budget_bytes = max(1, graph.pinned_bytes + int(share * needed))
    try:
        plan = find(graph, budget_bytes, planner=_BODY_PLANNER)
    except InfeasibleBudget as error:
        plan = find(graph, error.minimum_bytes, planner=_BODY_PLANNER)
    # Loops are compiled alike by every jit, so the ties are those that all of them keep.
    run = emit(program, plan.schedule, Problem.of(graph).turning_point, native_tie())
    captured = tuple(program.constants.values())

    def planned(carry: Any, each: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(shapes), run(jax.tree.leaves((carry, each)), captured))

    return planned


def _shape(aval: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _forward_program(pair: Pair) -> Program:
    body = Flattener()
    body.avals, body.constants = list(pair.avals), dict(pair.constants)
    outputs: list[Atom] = [*pair.first_outputs, *pair.needed]
    return program_of_equations(body, alive(pair.first_equations, outputs), pair.first_inputs, outputs)


class _Rewritten:
    """A flat program whose pairs of loops are run by choices.

    Args:
        flattener: has written the program.
        equations: those of it that are needed.
        inputs, outputs: of the program.
        pairs: the loops.
    """

    def __init__(
        self,
        flattener: Flattener,
        equations: Sequence[Equation],
        inputs: Sequence[int],
        outputs: Sequence[Atom],
        pairs: Sequence[Pair],
    ) -> None:
        self._constants = flattener.constants
        self._equations = equations
        self._inputs = inputs
        self._outputs = outputs
        self._pairs = pairs
        self._broadcasts = {one.outputs[0]: one for one in equations if _inflates(one, flattener.avals)}

    def with_choices(
        self, choices: Sequence[Choice], planned: Callable[[Body, Any, Any], Body]
    ) -> Callable[..., list[Any]]:
        """The flat function; there is a choice for each pair, and ``planned`` is as in ``LoopPair``."""

        def run(*arguments: Any) -> list[Any]:
            loops = [
                LoopPair(pair, choice, self._broadcasts, planned)
                for pair, choice in zip(self._pairs, choices, strict=True)
            ]
            starts = {loop.pair.forward: loop for loop in loops}
            ends = {loop.pair.backward: loop for loop in loops}
            values: dict[int, Any] = {**dict(zip(self._inputs, arguments, strict=True)), **self._constants}
            for number, equation in enumerate(self._equations):
                if number in starts:
                    made = starts[number].run_first(values)
                elif number in ends:
                    made = ends[number].run_second(values)
                else:
                    read = [values[atom] if isinstance(atom, int) else atom.val for atom in equation.inputs]
                    made = dict(zip(equation.outputs, _private.evaluate(equation.eqn, read), strict=True))
                values.update(made)
            return [values[atom] if isinstance(atom, int) else atom.val for atom in self._outputs]

        return run


def _inflates(equation: Equation, avals: Sequence[Any]) -> bool:
    if equation.eqn.primitive.name not in ("broadcast_in_dim", "iota"):
        return False
    made, read = (
        sum(op_facts.size_bytes(avals[value]) for value in values) for values in (equation.outputs, equation.reads)
    )
    return made >= op_facts.INFLATION * read
