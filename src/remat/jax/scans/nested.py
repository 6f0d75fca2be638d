"""Loops in the bodies of loops: all ways to run a pair, those of the pairs in its bodies included.

Both bodies of a pair together are a step of their own, in which an inner loop and its backward loop are a pair again.
Written again by a choice, the inner forward loop leaves less, so that there is less for the outer loop to stack; or,
where the outer backward loop runs the inner forward loop anew, less that lies there for one iteration of it. So a pair
has a menu for each of some choices inside of it, and all its menus together are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

import jax

from remat.fit.loop_menu import Option, best_of, merged
from remat.jax import _private
from remat.jax.scans.light_loops import with_light_loops_inside
from remat.jax.scans.loops import Body, Choice, Left, LoopPair, Way, read
from remat.jax.scans.menu import LoopBody
from remat.jax.scans.pairs import Pair, find_pairs
from remat.jax.scans.rewritten import Run, broadcasts_of
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import Atom, Equation, Flattener, Program, alive, program_of_equations
from remat.running.cost_model import DeviceProfile

_MOST_INSIDE: Final = 10
"""For so many choices inside of a pair it has a menu. A judgement: each takes a trace of its bodies, some 10 ms."""

_Row = TypeVar("_Row")

Row: TypeAlias = tuple[Option[Way], ...]
"""One way for each of several pairs."""


@dataclass(frozen=True)
class Menu:
    """The ways to run a pair.

    Attributes:
        options: most bytes first; each costs more seconds than those before it.
        checkpointed: each iteration makes everything again, and so do those of the loops inside, as with
            ``jax.checkpoint`` around all bodies. It need not be among the options.
    """

    options: Sequence[Option[Way]]
    checkpointed: Option[Way]


def menu_of(pair: Pair, profile: DeviceProfile, *, nested: bool = True) -> Menu:
    """The ways to run a pair, those of the pairs in its bodies included.

    Args:
        pair: the loops.
        profile: for the predicted times.
        nested: may the loops in its bodies be written again, too?
    """
    pair = _with_light_loops_inside(pair) if nested else pair
    pairs = _pairs_inside(pair) if nested else []
    rows, checkpointed = rows_of([menu_of(one, profile) for one in pairs], _MOST_INSIDE)
    loops: list[tuple[Pair, LoopBody]] = []
    for row in rows:
        written = _written(pair, [option.way for option in row]) if row else pair
        body = forward_program(written)
        loops.append((written, LoopBody(written, body, graph_of_program(body, profile))))
    options = [
        _with_inner(pair, written, option, row)
        for (written, loop), row in zip(loops, rows, strict=True)
        for option in loop.options()
    ]
    written, loop = loops[checkpointed]
    return Menu(best_of(options), _with_inner(pair, written, loop.checkpointed(), rows[checkpointed]))


def rows_of(menus: Sequence[Menu], most: int) -> tuple[list[Row], int]:
    """The menus of several pairs as one, most bytes first, and the number of the row in which all are checkpointed.

    Args:
        menus: of the pairs; without any there is one empty row.
        most: how many rows there may be beside that one; others are left out evenly.
    """
    if not menus:
        return [()], 0
    own = tuple(menu.checkpointed for menu in menus)
    rows = thinned(merged([[Option(one, one.held_bytes, one.again_s) for one in menu.options] for menu in menus]), most)
    if own in rows:
        return rows, rows.index(own)
    held = sum(option.held_bytes for option in own)
    place = next((n for n, row in enumerate(rows) if sum(one.held_bytes for one in row) <= held), len(rows))
    return [*rows[:place], own, *rows[place:]], place


def thinned(rows: Sequence[_Row], most: int) -> list[_Row]:
    """So many rows at most, those between left out evenly."""
    if len(rows) <= most:
        return list(rows)
    return list(dict.fromkeys(rows[number * (len(rows) - 1) // (most - 1)] for number in range(most)))


def _with_inner(pair: Pair, written: Pair, option: Option[Choice], row: Row) -> Option[Way]:
    """An option of a pair whose inner loops are written again, with the bytes and seconds of these."""
    # The bodies of two inner pairs do not run at the same time.
    extra_bytes = max((_own_bytes(pair, inner) for inner in row), default=0.0)
    extra_s = int(pair.first.eqn.params["length"]) * sum(inner.again_s for inner in row)
    way = Way(written, option.way, tuple(inner.way for inner in row))
    return Option(way, option.held_bytes + extra_bytes, option.again_s + extra_s)


def forward_program(pair: Pair) -> Program:
    """The forward body of a pair."""
    body = Flattener()
    body.avals, body.constants = list(pair.avals), dict(pair.constants)
    outputs: list[Atom] = [*pair.first_outputs, *pair.needed]
    return program_of_equations(body, alive(pair.first_equations, outputs), pair.first_inputs, outputs)


def _pairs_inside(pair: Pair) -> list[Pair]:
    return find_pairs(_equations(pair), [*pair.first_outputs, *pair.second_outputs])


def _with_light_loops_inside(pair: Pair) -> Pair:
    count, outputs = len(pair.first_equations), pair.second_outputs
    equations = with_light_loops_inside(_equations(pair), pair.avals)
    if all(one is other for one, other in zip(equations, _equations(pair), strict=True)):
        return pair
    second = tuple(alive(equations[count:], outputs))
    first = tuple(equations[:count])
    needed = _needed(first, pair.first_inputs, second, outputs)
    return replace(pair, first_equations=first, second_equations=second, needed=needed)


def _needed(
    first: Sequence[Equation], inputs: Sequence[int], second: Sequence[Equation], outputs: Sequence[Atom]
) -> tuple[int, ...]:
    """What the backward body reads of the forward one."""
    made = {value for equation in first for value in equation.outputs} | set(inputs)
    read_later = [value for equation in second for value in equation.reads]
    read_later += [atom for atom in outputs if isinstance(atom, int)]
    return tuple(value for value in dict.fromkeys(read_later) if value in made)


def _equations(pair: Pair) -> tuple[Equation, ...]:
    return (*pair.first_equations, *pair.second_equations)


def _crosses(inner: Pair, outer: Pair) -> bool:
    """Does an inner loop lie in the forward body of the outer pair, and its backward loop in the backward one?"""
    return inner.forward < len(outer.first_equations) <= inner.backward


def _own_bytes(pair: Pair, option: Option[Way]) -> float:
    """What the loops of an inner pair hold beside what is left by one to the other in another body, which stacks it."""
    left = option.way.left_bytes if _crosses(option.way.pair, pair) else 0
    return max(0.0, option.held_bytes - left)


def _as_it_is(body: Body, carry: Any, stacked: Any) -> Body:
    return body


def _written(pair: Pair, ways: Sequence[Way]) -> Pair:
    """The pair with the loops in its bodies run in these ways."""
    bodies = _Bodies(pair, ways)
    flattener = Flattener()
    first_inputs = tuple(flattener.value(pair.avals[value]) for value in pair.first_inputs)
    closed, (_, _, left) = jax.make_jaxpr(bodies.first, return_shape=True)(*bodies.shapes(pair.first_inputs))
    made = flattener.add(closed, first_inputs)
    count = len(flattener.equations)
    results, rest = made[: len(pair.first_outputs)], made[len(pair.first_outputs) :]
    own = [value for value in pair.second_inputs if value is not None]
    own_inputs = [flattener.value(pair.avals[value]) for value in own]
    closed = jax.make_jaxpr(bodies.second)(bodies.shapes(own), bodies.shapes(bodies.needed), left)
    second_outputs = flattener.add(closed, [*own_inputs, *rest])
    second = tuple(alive(flattener.equations[count:], second_outputs))
    first = tuple(flattener.equations[:count])
    numbers = iter(own_inputs)
    return replace(
        pair,
        avals=tuple(flattener.avals),
        constants=flattener.constants,
        first_equations=first,
        second_equations=second,
        first_inputs=first_inputs,
        second_inputs=tuple(None if value is None else next(numbers) for value in pair.second_inputs),
        first_outputs=tuple(results),
        second_outputs=tuple(second_outputs),
        needed=_needed(first, first_inputs, second, second_outputs),
    )


class _Bodies:
    """The bodies of a pair as functions that run the loops in them in some ways.

    Args:
        pair: the outer loops.
        ways: of the loops in its bodies.

    Attributes:
        needed: what the backward body reads of the forward one, beside what inner loops leave.
    """

    def __init__(self, pair: Pair, ways: Sequence[Way]) -> None:
        self._pair = pair
        equations = _equations(pair)
        broadcasts = broadcasts_of(equations, pair.avals)
        loops = [LoopPair(way, broadcasts, _as_it_is) for way in ways]
        self._run = Run(equations, loops, (*pair.first_outputs, *pair.second_outputs))
        self._handed = [loop for loop in loops if _crosses(loop.pair, pair)]
        count = len(pair.first_equations)
        self._parts = range(count), range(count, len(equations))
        made = {value for number in self._parts[0] for value in equations[number].outputs} | set(pair.first_inputs)
        reads = [value for number in self._parts[1] for value in self._run.reads(number)]
        reads += [atom for atom in pair.second_outputs if isinstance(atom, int)]
        self.needed = [value for value in dict.fromkeys(reads) if value in made]

    def shapes(self, values: Sequence[int]) -> list[Any]:
        """Of values of the bodies."""
        return [_private.shape_of_aval(self._pair.avals[value]) for value in values]

    def first(self, *inputs: Any) -> tuple[list[Any], list[Any], list[Left]]:
        """The forward body: what it returns, what the other one needs, and what inner loops leave."""
        pair = self._pair
        values: dict[int, Any] = {**pair.constants, **dict(zip(pair.first_inputs, inputs, strict=True))}
        self._run.evaluate(self._parts[0], values)
        results = [read(values, atom) for atom in pair.first_outputs]
        return results, [values[value] for value in self.needed], [loop.left for loop in self._handed]

    def second(self, own: Sequence[Any], needed: Sequence[Any], left: Sequence[Left]) -> list[Any]:
        """The backward body."""
        pair = self._pair
        inputs = [value for value in pair.second_inputs if value is not None]
        values: dict[int, Any] = {**pair.constants, **dict(zip(inputs, own, strict=True))}
        values.update(zip(self.needed, needed, strict=True))
        for loop, one in zip(self._handed, left, strict=True):
            loop.left = one
        self._run.evaluate(self._parts[1], values)
        return [read(values, atom) for atom in pair.second_outputs]
