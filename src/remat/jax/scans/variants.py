"""Variants of layers under ``lax.scan``: the forward loop keeps less and less, the backward one makes the rest again.

Both bodies of a scan together are one step of training. Each variant keeps a smaller share of what the forward loop
could stack. The backward loop then computes the rest again, one iteration at a time, so that what is recomputed exists
for one layer only. Below the last share, the body of the backward loop is planned as any step is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import numpy as np

from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.simulator import simulate
from remat.jax import _private
from remat.jax._private import ClosedJaxpr
from remat.jax.context import native_tie
from remat.jax.emit.evaluate import emit
from remat.jax.scans.loops import Body, Pair, find_pairs, run_first, run_second
from remat.jax.trace import op_facts
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import Atom, Equation, Flattener, Program, alive, program_of, program_of_equations
from remat.planners.linear.keep import KeepModel
from remat.planners.view.problem import BoolArray, FloatArray, Problem
from remat.planning.find import find
from remat.running.cost_model import DeviceProfile

FindReceived: TypeAlias = Callable[[Any], Mapping[int, frozenset[int]]]
"""Takes a flat function whose loops are written again. By the number of a loop, gives the values of its body that come
from other devices."""

# The shares of all that the loops could stack, and of what the body of a backward loop needs, that become variants. All
# are judgements, not measured. More of them: a plan comes closer to its budget, and tracing takes longer, since each
# variant is traced once. Fewer: more of a budget stays unused.
_SHARES: Final = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.12, 0.06, 0.0)
_BODY_SHARES: Final = (0.85, 0.7, 0.55, 0.4)
# Fewer over several devices: there each variant also takes two compilations, which show what one device holds.
_SHARES_OVER_DEVICES: Final = (0.7, 0.4, 0.0)

_BODY_PLANNER: Final = "peak_greedy"
"""Plans the bodies. It needs no time limit, so the variants come out the same each time: a saved plan is for one."""


# The model of what to stack is solved to this share of the optimum. Bodies have tens of values, for which HiGHS takes
# milliseconds. The time limit is for bodies of thousands; one that reaches it may come out otherwise the next time.
_GAP: Final = 0.005
_TIME_LIMIT_S: Final = 2.0

_LITTLE: Final = 1e-6  # The weight of what decides among equals, and the rounding that a limit on bytes allows.
_SMALLEST_TIME_S: Final = 1e-300  # In place of a body that takes no time, by which nothing can be divided.


def scan_variants(
    closed: ClosedJaxpr, profile: DeviceProfile, find_received: FindReceived | None = None
) -> list[ClosedJaxpr]:
    """The function with pairs of loops that keep less and less; nothing where it has no such pair.

    Args:
        closed: the function.
        profile: for the predicted times.
        find_received: over several devices, finds the values of the bodies that come from other devices, which are
            then kept. Bodies are not planned there, since it is not known what the backward one receives.

    Raises:
        UnsupportedStep: where a shape is unknown.
    """
    flattener = Flattener()
    inputs = tuple(flattener.value(var.aval) for var in closed.jaxpr.invars)
    outputs = flattener.add(closed, inputs)
    equations = alive(flattener.equations, outputs)
    pairs = find_pairs(equations, outputs)
    if not pairs:
        return []
    bodies = [_forward_program(pair) for pair in pairs]
    graphs = [graph_of_program(body, profile) for body in bodies]
    shapes = [_shape(flattener.avals[value]) for value in inputs]

    def run(choice: Sequence[frozenset[int]], planned: Callable[[Body, Any, Any], Body]) -> Any:
        kept = {pair.forward: own for pair, own in zip(pairs, choice, strict=True)}
        return _rewritten(flattener, equations, inputs, outputs, kept, pairs, planned)

    def as_it_is(body: Body, carry: Any, stacked: Any) -> Body:
        return body

    received: Mapping[int, frozenset[int]] = {}
    if find_received is not None:
        received = find_received(run([frozenset(pair.needed) - pair.free for pair in pairs], as_it_is))
    choices: dict[tuple[frozenset[int], ...], None] = {}
    for share in _SHARES if find_received is None else _SHARES_OVER_DEVICES:
        choice = []
        for pair, body, graph in zip(pairs, bodies, graphs, strict=True):
            length, once = int(pair.first.eqn.params["length"]), received.get(pair.forward, frozenset())
            choice.append(_cheapest_choice(body, graph, pair.needed, pair.free, once, length, share))
        choices[tuple(choice)] = None
    variants = [jax.make_jaxpr(run(choice, as_it_is))(*shapes) for choice in choices]
    if find_received is not None:
        return variants
    least = math.inf
    for share in _BODY_SHARES:
        bodies_planned = _PlannedBodies(share, profile)
        made = jax.make_jaxpr(run(list(choices)[-1], bodies_planned))(*shapes)
        if bodies_planned.peak_bytes < least:
            least = bodies_planned.peak_bytes
            variants.append(made)
    return variants


def _cheapest_choice(
    body: Program,
    graph: Graph,
    needed: Sequence[int],
    free: frozenset[int],
    once: frozenset[int],
    length: int,
    share: float,
) -> frozenset[int]:
    """The values to stack so that making the rest again costs least.

    The model is :class:`remat.planners.linear.keep.KeepModel` over the values and instructions of the body, with one
    limit on bytes: a stack counts once for each iteration, a value that is made again counts once.

    Args:
        body: the forward body.
        graph: its graph.
        needed: ids of the values that the backward body reads.
        free: ids of what it can read without a stack.
        once: ids of values that must not be made again, whatever made them.
        length: iterations.
        share: of the bytes of stacking everything that is needed; 0 for the least that is possible.
    """
    wanted = [value for value in dict.fromkeys(needed) if value not in free]
    producer = {value: n for n, instruction in enumerate(body.instructions) for value in instruction.outputs}
    values = list(dict.fromkeys([*wanted, *producer, *(v for i in body.instructions for v in i.reads)]))
    values = [value for value in values if value not in free]
    column = {value: k for k, value in enumerate(values)}
    size = np.array([op_facts.size_bytes(body.avals[value]) for value in values], dtype=np.float64)
    cost = np.array([op.time_s for op in graph.ops], dtype=np.float64) * length
    scale = max(1.0, float(size.max(initial=0.0))) * length
    again = np.array([sum(graph.tensors[v].size_bytes for v in i.outputs) for i in body.instructions], dtype=np.float64)
    kept_bytes, again_bytes = length * size / scale, again / scale
    may_repeat = [
        all(
            op_facts.may_repeat(equation.eqn) and once.isdisjoint(equation.outputs)
            for equation in instruction.equations
        )
        for instruction in body.instructions
    ]
    everything = sum(length * size[column[value]] for value in wanted)

    def best(keep_cost: FloatArray, again_cost: FloatArray, room: float) -> tuple[BoolArray, BoolArray] | None:
        made_by = [producer.get(value) for value in values]
        model = KeepModel(keep_cost.tolist(), again_cost.tolist(), made_by, may_repeat)
        for value in wanted:
            model.require(column[value])
        for number, instruction in enumerate(body.instructions):
            for value in instruction.reads:
                if value not in free:
                    model.require_read(number, column[value])
        model.limit(enumerate(kept_bytes.tolist()), enumerate(again_bytes.tolist()), room)
        return model.solve(time_limit_s=_TIME_LIMIT_S, gap=_GAP)

    seconds = _LITTLE * size / scale, cost / max(float(cost.max(initial=0.0)), _SMALLEST_TIME_S)
    found = best(*seconds, share * everything / scale)
    if found is None:
        least = best(kept_bytes + _LITTLE * seconds[0], again_bytes + _LITTLE * seconds[1], np.inf)
        if least is None:
            return frozenset(wanted)
        smallest = float(kept_bytes @ least[0] + again_bytes @ least[1])
        found = best(*seconds, smallest * (1 + _LITTLE)) or least
    return frozenset(value for value, is_kept in zip(values, found[0], strict=True) if is_kept)


class _PlannedBodies:
    """Plans the body of a backward loop as a step of its own.

    Args:
        share: of the bytes that the body needs as it is, without what it is given.
        profile: for the predicted times.

    Attributes:
        peak_bytes: the sum over all bodies planned so far.
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
    return program_of_equations(body, alive(pair.first_equations, outputs), pair.first_inputs, outputs)


def _rewritten(
    flattener: Flattener,
    equations: Sequence[Equation],
    inputs: Sequence[int],
    outputs: Sequence[Atom],
    choices: Mapping[int, frozenset[int]],
    pairs: Sequence[Pair],
    planned: Callable[[Body, Any, Any], Body],
) -> Any:
    starts = {pair.forward: pair for pair in pairs}
    ends = {pair.backward: pair for pair in pairs}
    broadcasts = {equation.outputs[0]: equation for equation in equations if _inflates(equation, flattener.avals)}

    def run(*arguments: Any) -> list[Any]:
        values: dict[int, Any] = {**dict(zip(inputs, arguments, strict=True)), **flattener.constants}
        kept: dict[int, dict[int, Any]] = {}
        for number, equation in enumerate(equations):
            if number in starts:
                made, kept[number] = run_first(starts[number], choices[number], values, broadcasts)
            elif number in ends:
                pair = ends[number]
                made = run_second(pair, kept.pop(pair.forward), values, broadcasts, planned)
            else:
                read = [values[atom] if isinstance(atom, int) else atom.val for atom in equation.inputs]
                made = dict(zip(equation.outputs, _private.evaluate(equation.eqn, read), strict=True))
            values.update(made)
        return [values[atom] if isinstance(atom, int) else atom.val for atom in outputs]

    return run


def _inflates(equation: Equation, avals: Sequence[Any]) -> bool:
    if equation.eqn.primitive.name not in ("broadcast_in_dim", "iota"):
        return False
    made, read = (
        sum(op_facts.size_bytes(avals[value]) for value in values) for values in (equation.outputs, equation.reads)
    )
    return made >= op_facts.INFLATION * read
