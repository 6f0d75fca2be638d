"""Layers under ``lax.scan``: what the loop of the forward part keeps, and what that of the backward part makes again.

Differentiation makes two loops of one: the first stacks what the second reads. Both bodies together are one joint
program. A menu of choices keeps less and less of it; the loop of the backward part then computes the rest
again, one iteration at a time, so that what is recomputed exists for one layer only. Below that, the body of the
backward loop is planned as any step is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from remat.core.errors import InfeasibleBudget
from remat.core.simulator import simulate
from remat.jax import _private
from remat.jax._private import ClosedJaxpr
from remat.jax.context import native_tie
from remat.jax.emit.evaluate import emit
from remat.jax.scans.bodies import Body, run_first, run_second
from remat.jax.scans.pairs import Pair, find_pairs
from remat.jax.scans.stacked import cheapest_choice
from remat.jax.trace import op_facts
from remat.jax.trace.function import graph_of_program
from remat.jax.trace.program import Atom, Flattener, Program, Step, alive, program_of, program_of_steps
from remat.planners.view.problem import Problem
from remat.planning.find import find
from remat.running.cost_model import DeviceProfile

Talking: TypeAlias = Callable[[Any], Mapping[int, frozenset[int]]]
"""Takes the flat function with named body values; gives, by the number of a loop, the values that devices send."""

# Shares of all that the loops could keep, which the menu offers.
_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.12, 0.06, 0.0)
# Over several devices each entry takes two more compilations, to see what a device holds.
_SHARES_OVER_DEVICES = (0.7, 0.4, 0.0)
# Shares of what the body of a backward loop needs, where the loops keep least.
_BODY_SHARES = (0.85, 0.7, 0.55, 0.4)
# A menu must come out the same each time, so that a saved plan is for one of its entries: no time limits.
_BODY_PLANNER = "peak_greedy"
# A constant of a loop that is so many times as large as what it is broadcast from is made in the body.
_INFLATION = 4


def scan_menu(closed: ClosedJaxpr, profile: DeviceProfile, talking: Talking | None = None) -> list[ClosedJaxpr]:
    """The function with its pairs of loops keeping less and less; empty where it has none.

    Args:
        closed: the function.
        profile: for the predicted times.
        talking: over several devices, which values of the bodies come from others; these are kept. Bodies are not
            planned there, since what the backward one sends is not known.

    Raises:
        UnsupportedStep: where a shape is unknown.
    """
    flattener = Flattener()
    inputs = tuple(flattener.value(var.aval) for var in closed.jaxpr.invars)
    outputs = flattener.add(closed, inputs)
    steps = alive(flattener.steps, outputs)
    pairs = find_pairs(steps, outputs)
    if not pairs:
        return []
    bodies = [_forward_program(pair) for pair in pairs]
    graphs = [graph_of_program(body, profile) for body in bodies]
    shapes = [_shape(flattener.avals[value]) for value in inputs]

    def run(choice: Sequence[frozenset[int]], planned: Callable[[Body, Any, Any], Body]) -> Any:
        kept = {pair.forward: own for pair, own in zip(pairs, choice, strict=True)}
        return _rewritten(flattener, steps, inputs, outputs, kept, pairs, planned)

    def as_it_is(body: Body, carry: Any, stacked: Any) -> Body:
        return body

    once: Mapping[int, frozenset[int]] = {}
    if talking is not None:
        once = talking(run([frozenset(pair.needed) - pair.free for pair in pairs], as_it_is))
    choices: dict[tuple[frozenset[int], ...], None] = {}
    for share in _SHARES if talking is None else _SHARES_OVER_DEVICES:
        choice = []
        for pair, body, graph in zip(pairs, bodies, graphs, strict=True):
            length, own = int(pair.first.eqn.params["length"]), once.get(pair.forward, frozenset())
            choice.append(cheapest_choice(body, graph, pair.needed, pair.free, own, length, share))
        choices[tuple(choice)] = None
    menu = [jax.make_jaxpr(run(choice, as_it_is))(*shapes) for choice in choices]
    if talking is not None:
        return menu
    least = math.inf
    for share in _BODY_SHARES:
        bodies_planned = _PlannedBodies(share, profile)
        made = jax.make_jaxpr(run(list(choices)[-1], bodies_planned))(*shapes)
        if bodies_planned.peak_bytes < least:
            least = bodies_planned.peak_bytes
            menu.append(made)
    return menu


class _PlannedBodies:
    """Plans the body of a backward loop as a step of its own.

    Args:
        share: of the bytes that it needs as it is, what it was given left out.
        profile: for the predicted times.

    Attributes:
        peak_bytes: of all bodies planned so far.
    """

    def __init__(self, share: float, profile: DeviceProfile) -> None:
        self._share = share
        self._profile = profile
        self.peak_bytes = 0

    def __call__(self, body: Body, carry: Any, stacked: Any) -> Body:
        first = jax.eval_shape(lambda arrays: jax.tree.map(lambda array: array[0], arrays), stacked)
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(carry, first)
        program = program_of(closed)
        graph = graph_of_program(program, self._profile)
        needed = simulate(graph, graph.plain_schedule).peak_bytes - graph.pinned_bytes
        budget_bytes = max(1, graph.pinned_bytes + int(self._share * needed))
        try:
            plan = find(graph, budget_bytes, planner=_BODY_PLANNER)
        except InfeasibleBudget as error:
            plan = find(graph, error.minimum_bytes, planner=_BODY_PLANNER)
        self.peak_bytes += plan.peak_bytes
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
    return program_of_steps(body, alive(pair.first_steps, outputs), pair.first_inputs, outputs)


def _rewritten(
    flattener: Flattener,
    steps: Sequence[Step],
    inputs: Sequence[int],
    outputs: Sequence[Atom],
    choices: Mapping[int, frozenset[int]],
    pairs: Sequence[Pair],
    planned: Callable[[Body, Any, Any], Body],
) -> Any:
    starts = {pair.forward: pair for pair in pairs}
    ends = {pair.backward: pair for pair in pairs}
    broadcasts = {step.outputs[0]: step for step in steps if _inflates(step, flattener.avals)}

    def run(*arguments: Any) -> list[Any]:
        values: dict[int, Any] = {**dict(zip(inputs, arguments, strict=True)), **flattener.constants}
        kept: dict[int, dict[int, Any]] = {}
        for number, step in enumerate(steps):
            if number in starts:
                made, kept[number] = run_first(starts[number], choices[number], values, broadcasts)
            elif number in ends:
                pair = ends[number]
                made = run_second(pair, kept.pop(pair.forward), values, broadcasts, planned)
            else:
                read = [values[atom] if isinstance(atom, int) else atom.val for atom in step.inputs]
                made = dict(zip(step.outputs, _private.evaluate(step.eqn, read), strict=True))
            values.update(made)
        return [values[atom] if isinstance(atom, int) else atom.val for atom in outputs]

    return run


def _inflates(step: Step, avals: Sequence[Any]) -> bool:
    if step.eqn.primitive.name not in ("broadcast_in_dim", "iota"):
        return False
    made, read = (sum(op_facts.size_bytes(avals[value]) for value in values) for values in (step.outputs, step.reads))
    return made >= _INFLATION * read
