"""The two loops of one ``lax.scan``, written again so that they keep less.

The forward loop stacks what the backward loop reads. Written again, it stacks fewer values, and each iteration of the
backward loop computes what is missing right before it is read. A long loop need not even stack what it carries: its
first iterations run in chunks, of which only the start is kept. The backward loop runs each chunk forward again, which
then stacks for the length of one chunk only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from remat.jax import _private
from remat.jax.scans.pairs import Pair
from remat.jax.trace import op_facts
from remat.jax.trace.program import Atom, Equation, alive

BODY_NAME: Final = "remat_body_"
"""What the scopes in a body that is written again begin with; the compiler keeps the names of scopes in its text."""

Body: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""The body of a loop: (carry, slices) -> (carry, what is stacked)."""

Left: TypeAlias = list[Any]
"""What the forward loop leaves to the backward one, piece by piece: stacks by value, or the starts of its chunks."""

_Of = TypeVar("_Of")


@dataclass(frozen=True)
class Choice:
    """What the forward loop of a pair leaves to the backward one.

    Attributes:
        stacked: ids of the values of the body that the iterations stack, those in chunks left out.
        chunked: how many of the first iterations run in chunks; a multiple of the first chunk's length.
        chunks: the length of a chunk, then that of the chunks that it is cut into when it runs again, and so on.
        again: ids of the values that a chunk stacks when it runs again.
    """

    stacked: frozenset[int]
    chunked: int = 0
    chunks: tuple[int, ...] = ()
    again: frozenset[int] = frozenset()

    def pieces(self, length: int) -> list[_Piece]:
        """The iterations in the order in which the forward loop runs them."""
        pieces = [_Piece(0, self.chunked, length, self.chunks), _Piece(self.chunked, length, length, ())]
        return [piece for piece in pieces if piece.stop > piece.start]


@dataclass(frozen=True)
class Way:
    """A way to run a pair of loops.

    Attributes:
        pair: the loops; those in their bodies as they were, or written again.
        choice: what the forward loop leaves to the backward one.
        inside: the ways of the pairs in the bodies that are written again.
    """

    pair: Pair
    choice: Choice
    inside: tuple[Way, ...] = ()

    @property
    def left_bytes(self) -> int:
        """What the forward loop leaves to the backward one."""
        pair, total = self.pair, 0
        for piece in self.choice.pieces(int(pair.first.eqn.params["length"])):
            count = piece.length // piece.chunks[0] if piece.chunks else piece.length
            values = pair.first_carries if piece.chunks else self.choice.stacked
            total += count * sum(op_facts.size_bytes(pair.avals[value]) for value in values)
        return total


@dataclass(frozen=True)
class _Piece:
    """Some iterations of a loop, from ``start`` to ``stop`` in its order."""

    start: int
    stop: int
    whole: int
    chunks: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.stop - self.start

    def of(self, array: Any, is_reverse: bool) -> Any:
        """The slices of a stacked array that belong to these iterations."""
        if self.length == self.whole:
            return array
        return array[self.whole - self.stop : self.whole - self.start] if is_reverse else array[self.start : self.stop]


def _joined(pieces: Sequence[Any], is_reverse: bool) -> Any:
    """Stacks of pieces, in the loop's order, as one."""
    if len(pieces) == 1:
        return pieces[0]
    ordered = list(pieces)[::-1] if is_reverse else list(pieces)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *ordered)


def _cut(arrays: Any, length: int) -> Any:
    """Stacked arrays as stacks of chunks."""
    return jax.tree.map(lambda array: array.reshape(-1, length, *array.shape[1:]), arrays)


def _uncut(arrays: Any) -> Any:
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), arrays)


def _scan(body: Body, carry: Any, stacked: Any, params: Any, length: int, unroll: int = 1) -> tuple[Any, Any]:
    run: Any = lax.scan
    carry, stacks = run(body, carry, stacked, length=length, reverse=params["reverse"], unroll=min(length, unroll))
    return carry, stacks


def read(values: Mapping[int, Any], atom: Atom) -> Any:
    """A value, or a scalar that stands in the program itself."""
    return values[atom] if isinstance(atom, int) else atom.val


def _execute(equations: Sequence[Equation], values: dict[int, Any], loop: int) -> None:
    for equation in equations:
        # By this name the compiler's text tells which of these values come from other devices.
        with jax.named_scope(f"{BODY_NAME}{loop}_{min(equation.outputs, default=0)}"):
            made = _private.evaluate(equation.eqn, [read(values, atom) for atom in equation.inputs])
        values.update(zip(equation.outputs, made, strict=True))


class LoopPair:
    """A pair of loops, run in a way.

    Args:
        way: which loops, and what the forward one leaves to the backward one.
        broadcasts: by value id, the equations of the flat program that the bodies repeat instead of reading their
            results.
        planned: makes another body of the backward loop's body, its carry and the stacked arrays: one that keeps a
            plan.

    Attributes:
        pair: the loops.
        left: what the forward loop has left to the backward one, which takes it.
    """

    def __init__(
        self,
        way: Way,
        broadcasts: Mapping[int, Equation],
        planned: Callable[[Body, Any, Any], Body],
    ) -> None:
        self.pair = way.pair
        self._choice = way.choice
        self._broadcasts = broadcasts
        self._planned = planned
        self._params = self.pair.first.eqn.params
        self._length = int(self._params["length"])
        self.left: Left = []

    @property
    def read_by_first(self) -> frozenset[int]:
        """What the forward loop reads, by the ids of the flat program."""
        inputs = self.pair.first.inputs
        return _ids((*inputs, *self._sources(inputs)))

    @property
    def read_by_second(self) -> frozenset[int]:
        """What the backward loop reads: of the forward loop's stacks only those that others read, too."""
        pair, loop = self.pair, self.pair.second
        stacked = zip(loop.stacked, pair.second_inputs[len(loop.inputs) - len(loop.stacked) :], strict=True)
        constants = (*loop.constants, *pair.first.constants)
        own = (atom for atom, value in stacked if value is not None)
        starts = (start for _, start in pair.shifted.values())
        around = (*loop.carry, *constants, *self._sources(constants), *pair.first.stacked, *pair.shared)
        return _ids((*around, *own, *starts))

    def _sources(self, atoms: Sequence[Atom]) -> list[Atom]:
        """What a body reads in the place of what is broadcast."""
        found = (self._broadcasts.get(atom) for atom in atoms if isinstance(atom, int))
        return [source for equation in found if equation is not None for source in equation.inputs]

    @property
    def made_by_first(self) -> tuple[int, ...]:
        """What the forward loop makes: what it carries to its end, and the stacks that others read, too."""
        loop = self.pair.first
        return (*loop.outputs[: loop.counts[1]], *(loop.stacks[number] for number in self.pair.kept_stacks))

    def left_of(self, of: Callable[[Any], _Of]) -> list[_Of]:
        """Something of the type of each value whose stack is left, in the order of the leaves of ``left``."""
        pair = self.pair
        found: list[_Of] = []
        for piece in self._choice.pieces(self._length):
            values = pair.first_carries if piece.chunks else sorted(self._choice.stacked)
            found += [of(pair.avals[value]) for value in values]
        return found

    def run_first(self, outer: Mapping[int, Any]) -> dict[int, Any]:
        """Run the forward loop. Returns its outputs by the ids of the flat program; what it leaves stays here.

        Args:
            outer: values of the flat program.
        """
        loop, is_reverse = self.pair.first, bool(self._params["reverse"])
        carry = [read(outer, atom) for atom in loop.carry]
        stacked = [read(outer, atom) for atom in loop.stacked]
        wanted: list[Any] = []
        self.left = []
        for piece in self._choice.pieces(self._length):
            own = [piece.of(array, is_reverse) for array in stacked]
            if piece.chunks:
                carry, stacks, left = self._forward_in_chunks(outer, carry, own, piece, is_wanted=True)
            else:
                carry, stacks, left = self._forward(
                    outer, carry, own, self._choice.stacked, piece.length, is_wanted=True
                )
            wanted.append(stacks)
            self.left.append(left)
        made = dict(zip(loop.outputs[: loop.counts[1]], carry, strict=True))
        stacks = _joined(wanted, is_reverse)
        return made | {loop.stacks[number]: stack for number, stack in zip(self.pair.kept_stacks, stacks, strict=True)}

    def run_second(self, outer: Mapping[int, Any]) -> dict[int, Any]:
        """Run the backward loop, which makes again what was not stacked. Returns its outputs, as ``run_first`` does."""
        pair, loop = self.pair, self.pair.second
        is_reverse, turns = bool(self._params["reverse"]), loop.eqn.params["reverse"] != self._params["reverse"]
        start = self._length - 1 if loop.eqn.params["reverse"] else 0
        carry: Any = [read(outer, atom) for atom in loop.carry], jnp.int32(start) if pair.shifted else None
        stacked = (
            [
                read(outer, atom)
                for atom, value in zip(
                    loop.stacked, pair.second_inputs[len(loop.inputs) - len(loop.stacked) :], strict=True
                )
                if value is not None
            ],
            [read(outer, atom) for atom in pair.first.stacked],
            {value: outer[stack] for stack, value in pair.shared.items()},
        )
        pieces = list(zip(self._choice.pieces(self._length), self.left, strict=True))
        self.left = []
        made: list[Any] = []
        for piece, left in pieces[::-1] if turns else pieces:
            own = jax.tree.map(lambda array, piece=piece: piece.of(array, is_reverse), stacked)
            if piece.chunks:
                carry, stacks = self._backward_in_chunks(outer, carry, own, left, piece)
            else:
                carry, stacks = self._backward(outer, carry, own, left, piece.length)
            made.append(stacks)
        stacks = _joined(made[::-1] if turns else made, is_reverse)
        return dict(zip(loop.outputs, (*carry[0], *stacks), strict=True))

    def _forward(
        self,
        outer: Mapping[int, Any],
        carry: Any,
        stacked: Any,
        kept: frozenset[int],
        length: int,
        *,
        is_wanted: bool,
    ) -> tuple[Any, Any, dict[int, Any]]:
        """Some iterations of the forward loop: the carry, what others read, and the stacks of ``kept`` values."""
        pair, count = self.pair, self.pair.first.counts[1]
        order = sorted(kept)
        wanted = pair.first_outputs[count:] if is_wanted else ()
        equations = alive(pair.first_equations, [*pair.first_outputs[:count], *wanted, *order])

        def body(carry: Any, each: Any) -> Any:
            constants = [self._read_inside(outer, atom) for atom in pair.first.constants]
            values: dict[int, Any] = dict(zip(pair.first_inputs, (*constants, *carry, *each), strict=True))
            values.update(pair.constants)
            _execute(equations, values, pair.forward)
            new_carry = [read(values, atom) for atom in pair.first_outputs[:count]]
            return new_carry, ([read(values, atom) for atom in wanted], [values[value] for value in order])

        carry, (stacks, made) = _scan(body, carry, stacked, self._params, length, self._params["unroll"])
        return carry, stacks, dict(zip(order, made, strict=True))

    def _forward_in_chunks(
        self, outer: Mapping[int, Any], carry: Any, stacked: Any, piece: _Piece, *, is_wanted: bool
    ) -> tuple[Any, Any, Any]:
        """The forward loop in chunks: the carry, what others read, and the carry at the start of each chunk."""
        length = piece.chunks[0]

        def body(carry: Any, each: Any) -> Any:
            last, wanted, _ = self._forward(outer, carry, each, frozenset(), length, is_wanted=is_wanted)
            return last, (wanted, carry)

        cut, count = _cut(stacked, length), piece.length // length
        carry, (wanted, starts) = _scan(body, carry, cut, self._params, count)
        return carry, _uncut(wanted), starts

    def _backward(
        self, outer: Mapping[int, Any], carry: Any, stacked: Any, kept: Mapping[int, Any], length: int
    ) -> tuple[Any, Any]:
        """Some iterations of the backward loop, which read the stacks of ``kept`` values.

        With what it carries goes the place of the iteration, where it is asked for: a stack of places would take bytes.
        """
        pair = self.pair
        given, carried = pair.first.counts
        equations = _lazily(pair, frozenset(kept))
        step = -1 if pair.second.eqn.params["reverse"] else 1

        def body(carry_and_place: Any, each: Any) -> Any:
            carry, place = carry_and_place
            own, first_stacked, shared, again = each
            constants = [self._read_inside(outer, atom) for atom in pair.second.constants]
            first_constants = [self._read_inside(outer, atom) for atom in pair.first.constants]
            values: dict[int, Any] = {**pair.constants, **shared, **again, **self._carried_in(outer, place)}
            values.update(zip(pair.first_inputs[:given], first_constants, strict=True))
            values.update(zip(pair.first_inputs[given + carried :], first_stacked, strict=True))
            rest = iter(own)
            for number, value in enumerate(pair.second_inputs):
                if value is None:
                    continue
                if number < len(constants):
                    values[value] = constants[number]
                elif number < len(constants) + len(carry):
                    values[value] = carry[number - len(constants)]
                else:
                    values[value] = next(rest)
            _execute(equations, values, pair.forward)
            results = [read(values, atom) for atom in pair.second_outputs]
            next_place = None if place is None else place + step
            return (results[: len(carry)], next_place), results[len(carry) :]

        everything = (*stacked, dict(kept))
        params = pair.second.eqn.params
        return _scan(self._planned(body, carry, everything), carry, everything, params, length, params["unroll"])

    def _backward_in_chunks(
        self, outer: Mapping[int, Any], carry: Any, stacked: Any, starts: Any, piece: _Piece
    ) -> tuple[Any, Any]:
        """The backward loop in chunks, each of which runs forward again from its start."""
        length = piece.chunks[0]
        chunk = _Piece(0, length, length, piece.chunks[1:])

        def body(carry: Any, each: Any) -> Any:
            own, start = each
            if chunk.chunks:
                _, _, left = self._forward_in_chunks(outer, start, own[1], chunk, is_wanted=False)
                return self._backward_in_chunks(outer, carry, own, left, chunk)
            _, _, left = self._forward(outer, start, own[1], self._choice.again, length, is_wanted=False)
            return self._backward(outer, carry, own, left, length)

        cut, count = (_cut(stacked, length), starts), piece.length // length
        carry, stacks = _scan(body, carry, cut, self.pair.second.eqn.params, count)
        return carry, _uncut(stacks)

    def _carried_in(self, outer: Mapping[int, Any], place: Any) -> dict[int, Any]:
        """What the forward loop carried into an iteration, read from stacks that are there anyway."""
        is_reverse, found = bool(self._params["reverse"]), {}
        for value, (stack, start) in self.pair.shifted.items():
            before = place + 1 if is_reverse else place - 1
            is_first = place == (self._length - 1 if is_reverse else 0)
            slice_before = lax.dynamic_index_in_dim(outer[stack], before, keepdims=False)
            found[value] = jnp.where(is_first, read(outer, start), slice_before)
        return found

    def _read_inside(self, outer: Mapping[int, Any], atom: Atom) -> Any:
        """A constant of a loop, for its body; made there where it is much larger than what it is broadcast from."""
        equation = self._broadcasts.get(atom) if isinstance(atom, int) else None
        if equation is None:
            return read(outer, atom)
        (made,) = _private.evaluate(equation.eqn, [read(outer, source) for source in equation.inputs])
        return made


def _ids(atoms: Iterable[Atom]) -> frozenset[int]:
    return frozenset(atom for atom in atoms if isinstance(atom, int))


def _lazily(pair: Pair, kept: frozenset[int]) -> list[Equation]:
    """The backward body, each equation behind those of the forward body that make again what it reads."""
    maker = {value: equation for equation in pair.first_equations for value in equation.outputs}
    there = set(kept) | pair.free
    ordered: list[Equation] = []

    def need(value: int) -> None:
        pending = [value]
        while pending:
            top = pending[-1]
            if top in there or top not in maker:
                pending.pop()
                continue
            missing = [v for v in maker[top].reads if v not in there and v in maker]
            if missing:
                pending += missing
                continue
            ordered.append(maker[top])
            there.update(maker[top].outputs)
            pending.pop()

    for equation in pair.second_equations:
        for value in equation.reads:
            need(value)
        ordered.append(equation)
    for atom in pair.second_outputs:
        if isinstance(atom, int):
            need(atom)
    return ordered
