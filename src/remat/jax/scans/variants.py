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
from remat.core.graph import Graph
from remat.core.simulator import simulate
from remat.fit.loop_menu import Option, best_of, merged
from remat.jax import _private
from remat.jax._private import ClosedJaxpr
from remat.jax.context import Tie
from remat.jax.emit.evaluate import emit
from remat.jax.scans.light_loops import with_light_loops_inside
from remat.jax.scans.loops import Body, Choice, Way
from remat.jax.scans.menu import LoopBody
from remat.jax.scans.nested import Row, forward_program, menu_of, rows_of, thinned
from remat.jax.scans.pairs import Pair, find_pairs
from remat.jax.scans.rewritten import Rewritten
from remat.jax.scans.steps import LEAST_SHARE, StepLoops, VariantsOfBody
from remat.jax.trace import op_facts
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import Equation, Flattener, Program, alive, program_of, program_of_equations
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
"""So many at most: a saved plan is for one of them, which must be found again."""

_BODY_SHARES: Final = (0.85, 0.7, 0.55, 0.4)
"""The shares of what the body of a backward loop needs that become variants. Judgements, not measured."""

_SHARES_OVER_DEVICES: Final = (0.7, 0.4, 0.0)
_MOST_OVER_DEVICES: Final = 6
"""The shares of all that a loop could stack, over several devices, and how many variants there are of them. Few, since
there a variant may take two compilations, which show what one device holds."""

_MOST_OF_STEPS: Final = 33
"""Variants of loops over steps: as fine as the menus of pairs of loops. Each is planned once it is asked for."""

_BODY_PLANNER: Final = "peak_greedy"
"""Plans the bodies. It needs no time limit, so the variants come out the same each time: a saved plan is for one."""


@dataclass(frozen=True)
class ScanVariants:
    """A function with pairs of loops that leave less and less behind.

    Attributes:
        makers: trace the variants, in this order.
        checkpointed: number of the one whose loops make everything again in each iteration, as with ``jax.checkpoint``
            around their bodies; None where there is none.
        aside: trace further ones, which users would write by hand.
        is_sorted: does each variant take longer than those before it?
    """

    makers: Sequence[Maker]
    checkpointed: int | None = None
    aside: Sequence[Maker] = ()
    is_sorted: bool = False


def scan_variants(
    closed: ClosedJaxpr,
    profile: DeviceProfile,
    find_received: FindReceived | None = None,
    trace_body: TraceBody | None = None,
    *,
    variants_of: VariantsOfBody,
    tie: Tie,
    maps: bool = False,
) -> ScanVariants:
    """The function with loops that hold less and less; no variant where it has no such loop.

    Pairs of loops leave less to one another, and loops over whole steps (``remat.jax.scans.steps``) need less for each.

    Args:
        closed: the function.
        profile: for the predicted times.
        find_received: over several devices, finds the values of the bodies that come from other devices, which are
            then kept. Bodies of pairs are not planned there, since it is not known what the backward one receives.
        trace_body: where the function is the body of a ``shard_map``, traces one that takes its place. Loops with
            collectives are written again, too: what comes from other devices is stacked, so that each collective runs
            once. Bodies of backward loops are not planned there either.
        variants_of: the ways to write the body of a loop over whole steps.
        tie: how recomputations in bodies are held back.
        maps: are calls of ``shard_map`` taken apart, whose loops are then written again in the same way?

    Raises:
        UnsupportedStep: where a shape is unknown.
    """
    flattener = Flattener(takes_maps_apart=maps)
    inputs = tuple(flattener.value(var.aval) for var in closed.jaxpr.invars)
    outputs = flattener.add(closed, inputs)
    equations = alive(flattener.equations, outputs)
    if trace_body is None and find_received is None:
        equations = alive(with_light_loops_inside(equations, flattener.avals), outputs)
    pairs = find_pairs(equations, outputs, op_facts.may_repeat if trace_body is None else op_facts.may_be_stacked)
    # An array that a mapped body captures would become one more argument of it.
    pairs = [pair for pair in pairs if not (pair.constants and equations[pair.forward].mapped)]
    paired = {place for pair in pairs for place in (pair.forward, pair.backward)}

    def fused() -> tuple[Program, Graph]:
        program = program_of_equations(flattener, equations, inputs, outputs)
        return program, graph_of_program(program, profile)

    steps = StepLoops.of(equations, paired, fused, variants_of, tie)
    if not pairs and not steps:
        return ScanVariants(())
    if trace_body is not None and (flattener.constants or any(pair.constants for pair in pairs)):
        return ScanVariants(())
    rewritten = Rewritten(flattener, equations, inputs, outputs)

    def traced(
        ways: Sequence[Way], share: float | None = None, write: Callable[[], Sequence[Equation]] | None = None
    ) -> ClosedJaxpr:
        planned = _as_it_is if share is None else partial(_planned_body, share, profile, tie)

        def run(*arguments: Any) -> list[Any]:
            # Bodies are traced where they run: inside of a ``shard_map`` their values vary over its axes.
            of = rewritten if write is None else Rewritten(flattener, write(), inputs, outputs)
            return of.in_ways(ways, planned)(*arguments)

        if trace_body is not None:
            return trace_body(run)
        made: ClosedJaxpr = jax.make_jaxpr(run)(*(_private.shape_of_aval(flattener.avals[value]) for value in inputs))
        return made

    if find_received is not None and steps:
        # Pairs of loops beside them stay as they are.
        makers = [partial(traced, [], write=write) for write in steps.written(_MOST_OVER_DEVICES)]
        return ScanVariants(makers, is_sorted=True)
    if find_received is not None:
        everything = [Way(pair, Choice(frozenset(pair.needed) - pair.free)) for pair in pairs]
        around = [equations[pair.forward].map for pair in pairs]
        # What a body sends it says itself there.
        is_known = all(of is not None and of.is_over_all_devices for of in around)
        received = {} if is_known else find_received(rewritten.in_ways(everything, _as_it_is))
        sparse = [_sparse_menu(pair, profile, received.get(pair.forward, frozenset())) for pair in pairs]
        return ScanVariants([partial(traced, row) for row in thinned(merged(sparse), _MOST_OVER_DEVICES)])
    menus = [menu_of(pair, profile, nested=trace_body is None) for pair in pairs]
    rows, checkpointed = rows_of(menus, _MOST_VARIANTS)
    if steps:
        written = steps.written(_MOST_OF_STEPS)
        stacked_bytes = sum(op_facts.size_bytes(flattener.avals[one]) for pair in pairs for one in pair.first.stacks)
        beside = _rows_beside(rows, len(written), stacked_bytes, LEAST_SHARE * steps.peak_bytes)
        makers = [
            partial(traced, [option.way for option in row], write=write)
            for row, write in zip(beside, written, strict=True)
        ]
        aside = [partial(traced, [option.way for option in beside[-1]], write=write) for write in steps.by_hand()]
        return ScanVariants(makers, aside=aside, is_sorted=not any(beside))
    makers = [partial(traced, [option.way for option in row]) for row in rows]
    if trace_body is None:
        makers += [partial(traced, [option.way for option in rows[-1]], share) for share in _BODY_SHARES]
    return ScanVariants(makers, checkpointed)


def _sparse_menu(pair: Pair, profile: DeviceProfile, received: frozenset[int]) -> list[Option[Way]]:
    """A few ways to run a pair over devices, whose values from other devices are kept."""
    body = forward_program(pair)
    loop = LoopBody(pair, body, graph_of_program(body, profile), received)
    menu = best_of([loop.cheapest(share) for share in _SHARES_OVER_DEVICES])
    return [Option(Way(pair, one.way), one.held_bytes, one.again_s) for one in menu]


def _rows_beside(rows: Sequence[Row], count: int, stacked_bytes: int, least_bytes: float) -> Sequence[Row]:
    """A row of options of pairs for each of so many ways to write the steps beside them: both get smaller together.

    Args:
        rows: most bytes first.
        count: how many ways there are.
        stacked_bytes: what the forward loops stack as they are.
        least_bytes: where the pairs cannot hold less than that by so much, they stay as they are.
    """
    held_bytes = sum(option.held_bytes for option in rows[-1])
    if stacked_bytes - held_bytes < least_bytes:
        return [()] * count
    return [rows[number * (len(rows) - 1) // (count - 1)] for number in range(count)]


def _as_it_is(body: Body, carry: Any, stacked: Any) -> Body:
    return body


def _planned_body(share: float, profile: DeviceProfile, tie: Tie, body: Body, carry: Any, stacked: Any) -> Body:
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
    run = emit(program, plan.schedule, Problem.of(graph).turning_point, tie)
    captured = tuple(program.constants.values())

    def planned(carry: Any, each: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(shapes), run(jax.tree.leaves((carry, each)), captured))

    return planned
