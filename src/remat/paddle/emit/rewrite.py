"""A schedule -> the program, rewritten in place: an op that runs again becomes a copy, and readers follow the newest.

The executor runs a block in its order, as long as it is told to (``remat.paddle.sequential``). So the place of a copy
in the block is all that holds a recomputation back; no edge or barrier is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from remat.paddle import _private
from remat.paddle.emit.fences import Fences
from remat.paddle.trace import op_facts
from remat.paddle.trace.program import COMBINE, How, TracedProgram, Unit, all_operands

MARK: Final = "remat_recomputed"
"""The attribute that marks an operator as a copy, for whoever reads the program."""


def rewrite(traced: TracedProgram, schedule: Sequence[int]) -> int:
    """Rewrite a program so that it runs its ops in the order of a schedule.

    Args:
        traced: the program and its graph; the program must be as it was when it was traced.
        schedule: a valid schedule of the graph, first runs in the order of the program.

    Returns:
        How many ops were copied.
    """
    with _private.insertion_point_kept():
        return _Rewriter(traced).run(schedule)


class _Rewriter:
    def __init__(self, traced: TracedProgram) -> None:
        self._traced = traced
        self._newest: dict[str, Any] = {}
        self._lists: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._replaced_lists: dict[str, Any] = {}
        self._places = {_private.op_id(op): n for n, op in enumerate(traced.program.global_block().ops)}

    def run(self, schedule: Sequence[int]) -> int:
        units = self._traced.units
        order, starts = self._order_of(schedule)
        has_copies = len(order) > len(units)
        fences: dict[int, _private.PythonOp] = {}
        if has_copies and not _private.is_on_gpu():
            first_runs = {index: position for position, index in reversed(list(enumerate(order)))}
            # A dropout is one operator, and what stands between two halves runs in none of them.
            closed = [
                first_runs[index]
                for index, unit in enumerate(units)
                if unit.how is How.APPLY or self._is_between(self._places[_private.op_id(unit.op)])
            ]
            fences = Fences(self._traced, order, starts, closed).before
        started: set[int] = set()
        pending: list[int] = []
        for position, index in enumerate(order):
            pending.append(position)
            if index in started:
                continue  # A copy is inserted before the next operator of the program.
            started.add(index)
            unit = units[index]
            if unit.how is How.APPLY:
                pending.pop()  # The dropout's own first run, with what it drew.
                continue
            _private.insert_before(unit.op)
            for waiting in pending:
                if (fence := fences.get(waiting)) is not None:
                    fence.insert()
                if waiting != position:
                    self._copy(units[order[waiting]])
            pending.clear()
            self._redirect(unit.op)
        for value in self._replaced_lists.values():
            if value.use_empty():
                value.get_defining_op().erase()
        return len(order) - len(units)

    def _is_between(self, place: int) -> bool:
        """Does an operator stand between the halves of the program?"""
        cut = self._traced.cut
        return cut is not None and cut.forward_end <= place < cut.backward_start

    def _order_of(self, schedule: Sequence[int]) -> tuple[list[int], list[int]]:
        """The order in which the program will run, and the positions at which its halves start.

        What stands between two halves is cut out, so no copy may stand there: it moves behind.
        """
        cut = self._traced.cut
        if cut is None:
            return list(schedule), [0]
        order: list[int] = []
        moved: list[int] = []
        start = 0
        started: set[int] = set()
        for index in schedule:
            place = self._places[_private.op_id(self._traced.units[index].op)]
            if index in started:
                moved.append(index)
                continue
            started.add(index)
            if place < cut.forward_end:
                order += moved
                moved = []
            elif place >= cut.backward_start:
                start = start or len(order)
                order += moved
                moved = []
            order.append(index)
        return order + moved, [0, start] if start else [0]

    def _redirect(self, op: Any) -> None:
        """Let an operator that runs for the first time read the newest instances."""
        for operand in all_operands(op):
            value = operand.source()
            newest = self._value(value)
            if newest.id != value.id:
                operand.set_source(newest)

    def _value(self, value: Any, is_copied: bool = False) -> Any:
        """The newest instance of a value; a list of which a part is newer is made again.

        A list for a copy is made again wherever the program will be cut: Paddle hands tensors from one half to the
        other, and crashes over a list.
        """
        if (found := self._newest.get(value.id)) is not None:
            return found
        op = value.get_defining_op()
        if op is None or op.name() != COMBINE:
            return value
        parts = list(op.operands_source())
        newest = [self._value(part) for part in parts]
        is_cut = is_copied and self._traced.cut is not None
        if not is_cut and all(new.id == old.id for new, old in zip(newest, parts, strict=True)):
            return value
        key = value.id, tuple(new.id for new in newest)
        if key not in self._lists:
            copy = _private.copy(op, zip(parts, newest, strict=True))
            self._lists[key] = copy.results()[0]
            self._replaced_lists[value.id] = value
        return self._lists[key]

    def _copy(self, unit: Unit) -> None:
        """Run a unit again, at the place where operators are inserted."""
        op = unit.op
        if unit.how is How.APPLY:
            drawn_from, mask = op.operands_source()[0], op.results()[1]
            rate = op.operands_source()[2]
            made = _private.dropout_by_mask(mask, self._value(drawn_from), self._value(rate), op.attrs())
            made.get_defining_op().set_bool_attr(MARK, True)
            self._newest[op.results()[0].id] = made
            return
        kept: frozenset[int] = frozenset()
        places: tuple[int, ...] = ()
        if unit.how is How.NORMALISE:
            kept = frozenset(op_facts.STATISTICS_RESULTS)
            places = op_facts.STATISTICS_OPERANDS
        reads = [
            (value, _private.copy_of_value(value) if place in places else self._value(value, is_copied=True))
            for place, value in enumerate(op.operands_source())
            if value.initialized()
        ]
        self._clone(op, reads, kept)
        for follower in unit.taken_apart:
            sources = [(value, self._newest.get(value.id, value)) for value in follower.operands_source()]
            self._clone(follower, sources)

    def _clone(self, op: Any, reads: Iterable[tuple[Any, Any]], kept: Collection[int] = ()) -> None:
        copy = _private.copy(op, reads)
        copy.set_bool_attr(MARK, True)
        for place, (old, new) in enumerate(zip(op.results(), copy.results(), strict=True)):
            if old.initialized() and place not in kept:
                self._newest[old.id] = new
