"""A static program of Paddle -> a graph: which operators it runs, what they read, and what may run again.

One op of the graph is a ``Unit``: an operator of the program, with the grammar around it (``builtin.combine`` names
tensors as a list, ``builtin.split`` takes a list apart). A dropout is two units: what it draws, which happens once, and
what it makes of the mask, which may happen again.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from remat.core.graph import Graph, Op, Tensor
from remat.core.simulator import StorageLifetimes, simulate, storage_lifetimes
from remat.paddle import _private
from remat.paddle.trace import op_facts
from remat.paddle.trace.scratch import workspace_bytes
from remat.paddle.trace.sizes import Sizes
from remat.running.cost_model import DeviceProfile, op_time_s

COMBINE: Final = "builtin.combine"
_TAKE_APART: Final = frozenset({"builtin.split", "builtin.slice"})
_KEPT_TO_THE_END: Final = frozenset({"builtin.shadow_output", "builtin.set_parameter", "pd_op.fetch"})
_PINNED: Final = {
    "builtin.parameter": "parameter",
    "builtin.constant": "state",
    "pd_op.data": "batch",
    "pd_op.feed": "batch",
}

UPDATES: Final = frozenset(
    {
        "adadelta_",
        "adagrad_",
        "adam_",
        "adamax_",
        "adamw_",
        "asgd_",
        "decayed_adagrad",
        "dgc_momentum",
        "fused_adam_",
        "lamb_",
        "lars_momentum_",
        "merged_adam_",
        "merged_momentum_",
        "momentum_",
        "nadam_",
        "radam_",
        "rmsprop_",
        "rprop_",
        "sgd_",
    }
)
"""Operators that change parameters by their gradients, as Paddle 3.3 has them. For people: the phase of an op."""


class How(enum.Enum):
    """How a unit runs again."""

    WHOLE = enum.auto()  # a copy of the operator
    DRAW = enum.auto()  # never: it draws the mask of a dropout
    APPLY = enum.auto()  # dropout by the mask that was drawn
    NORMALISE = enum.auto()  # a copy of a batch normalisation, whose running statistics are copies too


@dataclass(frozen=True)
class Unit:
    """An op of the graph, as the program has it.

    Attributes:
        op: the operator.
        how: how it runs again.
        taken_apart: the operators that take its lists of results apart; they are copied with it.
    """

    op: Any
    how: How
    taken_apart: tuple[Any, ...] = ()


@dataclass(frozen=True)
class TracedProgram:
    """A program and its graph.

    Attributes:
        program: the program, as it was traced.
        graph: the ops of its main block.
        units: what each op of the graph is in the program.
        tensors: for each value of the program, by its id, the tensors that it names: one, or those of a list.
        cut: where the program will be cut in two; None for one that runs as a whole.
    """

    program: Any
    graph: Graph
    units: tuple[Unit, ...]
    tensors: dict[str, tuple[int, ...]] = field(repr=False)
    cut: Cut | None = None

    def tensor_of(self, value: Any) -> int | None:
        """The tensor of a value; None where the program does not make it, or it is a list."""
        found = self.tensors.get(value.id, ())
        return found[0] if len(found) == 1 else None

    def lifetimes(self, order: Sequence[int]) -> StorageLifetimes:
        """When each storage of an order is born and dies, as the executor will have it."""
        lives = storage_lifetimes(self.graph, order)
        return replace(lives, taken_over=np.where(self._is_copied_dropout(order, lives), -1, lives.taken_over))

    def alive_bytes(self, order: Sequence[int]) -> Any:
        """Bytes at each position of an order, as the executor will have them."""
        alive = np.array(simulate(self.graph, order).bytes, dtype=np.int64)
        lives = storage_lifetimes(self.graph, order)
        is_copied = self._is_copied_dropout(order, lives) & (lives.taken_over >= 0)
        np.add.at(alive, lives.birth[is_copied], lives.size_bytes[is_copied])
        return alive

    def _is_copied_dropout(self, order: Sequence[int], lives: StorageLifetimes) -> Any:
        """For each storage, was it made by a dropout that runs again? Only the first run writes into what it reads."""
        runs: set[int] = set()
        copies = np.zeros(len(order), dtype=np.bool_)
        for position, index in enumerate(order):
            copies[position] = index in runs and self.units[index].how is How.APPLY
            runs.add(index)
        return copies[lives.birth]


@dataclass(frozen=True)
class Cut:
    """Where a program is cut in two halves that run one after the other.

    Attributes:
        forward_end: how many operators are the forward half.
        backward_start: how many come before the backward half; what stands between is left out.
    """

    forward_end: int
    backward_start: int


def trace_program(
    program: Any,
    profile: DeviceProfile,
    sizes: Sizes,
    *,
    kept: Collection[Any] = (),
    cut: Cut | None = None,
) -> TracedProgram:
    """The graph of a program's main block; nothing of the program changes.

    Args:
        program: a program with forward and backward operators, and the update if it has one.
        profile: the device, for the predicted times.
        sizes: the shapes of its values.
        kept: values that live to the end of the step, because they are fetched or returned.
        cut: where the program will be cut in two; None for one that runs as a whole.
    """
    return _Builder(program, profile, sizes, kept, cut).build()


def all_operands(op: Any) -> Iterator[Any]:
    """The operands of an operator and of those in its blocks, absent ones left out."""
    yield from (operand for operand in op.operands() if operand.source().initialized())
    for block in op.blocks():
        for inner in block.ops:
            yield from all_operands(inner)


class _Builder:
    def __init__(
        self, program: Any, profile: DeviceProfile, sizes: Sizes, kept: Collection[Any], cut: Cut | None
    ) -> None:
        self._program = program
        self._pir_ops = list(program.global_block().ops)
        self._profile = profile
        self._sizes = sizes
        self._kept = [value.id for value in kept]
        self._cut = cut
        self._values: dict[str, tuple[int, ...]] = {}
        self._tensors: list[Tensor] = []
        self._ops: list[Op] = []
        self._units: list[Unit] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._first_of_backward = 0

    def build(self) -> TracedProgram:
        taken_apart = self._what_takes_apart()
        gradients = (n for n, op in enumerate(self._pir_ops) if op_facts.is_gradient(op))
        first_gradient = next(gradients, len(self._pir_ops)) if self._cut is None else self._cut.forward_end
        updates = False
        for position, op in enumerate(self._pir_ops):
            if self._cut is not None and position == self._cut.backward_start:
                self._first_of_backward = len(self._tensors)
            name = str(op.name())
            updates = updates or op_facts.kind(op) in UPDATES
            phase = "update" if updates else ("backward" if position >= first_gradient else "forward")
            if role := _PINNED.get(name):
                self._add_pinned(op, role)
            elif name == COMBINE:
                parts = (self._values.get(v.id, ()) for v in op.operands_source() if v.initialized())
                self._values[op.results()[0].id] = tuple(part for of_one in parts for part in of_one)
            elif name in _TAKE_APART:
                pass  # With the operator whose list it takes apart.
            else:
                self._add_units(position, op, taken_apart.get(position, ()), phase)
                if name in _KEPT_TO_THE_END:
                    self._outputs += [t for v in op.operands_source() for t in self._values.get(v.id, ())]
        kept = [tensor for key in self._kept for tensor in self._values.get(key, ())]
        self._outputs += kept
        # A program that runs as a whole fetches the newest of what it fetches itself.
        held = frozenset(kept if self._cut is None else self._outputs)
        ops = _making_once(_without_late_reads(self._ops, self._tensors), held)
        graph = Graph(
            tuple(ops),
            tuple(self._tensors),
            tuple(dict.fromkeys(self._inputs)),
            tuple(dict.fromkeys(self._outputs)),
            free_order=False,
        )
        return TracedProgram(self._program, graph, tuple(self._units), self._values, self._cut)

    def _what_takes_apart(self) -> dict[int, tuple[Any, ...]]:
        """For each operator with a list of results, by its position, what takes the list apart."""
        made_at = {v.id: n for n, op in enumerate(self._pir_ops) for v in op.results() if v.initialized()}
        found: dict[int, list[Any]] = {}
        for op in self._pir_ops:
            if op.name() in _TAKE_APART:
                found.setdefault(made_at[op.operands_source()[0].id], []).append(op)
        return {position: tuple(ops) for position, ops in found.items()}

    def _add_pinned(self, op: Any, role: str) -> None:
        for value in op.results():
            if not value.initialized():
                continue
            attributes = op.attrs()
            name = str(attributes.get("parameter_name") or attributes.get("name") or value.id)
            if role == "batch" and _private.persists(op):
                role = "optimizer_state"
            self._values[value.id] = (len(self._tensors),)
            self._inputs.append(len(self._tensors))
            self._tensors.append(self._tensor(value, name, role=role))

    def _tensor(self, value: Any, name: str, *, alias_of: int | None = None, role: str = "") -> Tensor:
        shape = self._sizes.shape_of(value)
        return Tensor(self._sizes.bytes_of(value), name, shape, self._sizes.dtype_of(value), alias_of, role)

    def _add_units(self, position: int, op: Any, taken_apart: Sequence[Any], phase: str) -> None:
        name = op_facts.kind(op)
        operands = list(op.operands_source())
        reads = self._reads_of(op)
        results = [value if value.initialized() else None for value in op.results()]
        shapes = [
            [self._sizes.shape_of(v) if v is not None and v.initialized() else None for v in group]
            for group in (operands, results)
        ]
        flops = op_facts.flops(op, *shapes)
        dtype = next(
            (self._sizes.dtype_of(v) for v in (*results, *operands) if v is not None and v.initialized()), None
        )
        moved_bytes = sum(self._sizes.bytes_of(v) for v in (*operands, *results) if v is not None and v.initialized())
        time_s = op_time_s(self._profile, flops, moved_bytes, dtype or "float32") if op_facts.is_own(op) else 0.0
        scratch_bytes = workspace_bytes(op, shapes[0], shapes[1], self._sizes.bytes_of)
        label = f"{name}:{position}"
        source = _private.source_of(op)
        # What stands between the halves stands for gradients that the caller gives, which nobody can make again.
        is_given = self._cut is not None and self._cut.forward_end <= position < self._cut.backward_start

        def add(
            how: How,
            inputs: Sequence[int],
            outputs: Sequence[int],
            recomputable: bool,
            seconds: float,
            workspace: int = 0,
            in_place: tuple[tuple[int, int], ...] = (),
        ) -> None:
            self._units.append(Unit(op, how, tuple(taken_apart)))
            self._ops.append(
                Op(
                    label,
                    name,
                    tuple(dict.fromkeys(inputs)),
                    tuple(outputs),
                    seconds,
                    recomputable and not is_given,
                    workspace,
                    in_place=in_place,
                    phase=phase,
                    source=source,
                )
            )

        if name == op_facts.DROPOUT and not op_facts.is_test(op) and len(results) > 1 and results[1] is not None:
            assert results[0] is not None
            mask = self._new(results[1], f"{label} mask")
            add(How.DRAW, reads, [mask], False, time_s)
            out = self._new(results[0], label)
            in_place = self._in_place_pairs(position, op)
            add(How.APPLY, [*reads, mask], [out], True, op_time_s(self._profile, 0.0, moved_bytes), 0, in_place)
            return
        if name in op_facts.BATCH_NORM:
            own = self._values_of_operands(op, op_facts.STATISTICS_OPERANDS)
            outputs = self._results_of(op, results, label)
            inputs = [*reads, *own]
            add(How.NORMALISE, inputs, outputs, True, time_s, scratch_bytes)
            return
        outputs = self._results_of(op, results, label)
        self._name_parts(taken_apart)
        in_place = self._in_place_pairs(position, op)
        add(How.WHOLE, reads, outputs, op_facts.may_repeat(op), time_s, scratch_bytes, in_place)

    def _reads_of(self, op: Any) -> list[int]:
        """The tensors whose bytes an operator needs."""
        found: list[int] = []
        for operand in all_operands(op):
            value = operand.source()
            if not _private.needs_no_bytes(op, value):
                found += self._values.get(value.id, ())
        return found

    def _values_of_operands(self, op: Any, places: Collection[int]) -> list[int]:
        operands = op.operands_source()
        return [t for n in places if n < len(operands) for t in self._values.get(operands[n].id, ())]

    def _new(self, value: Any, name: str, alias_of: int | None = None) -> int:
        self._values[value.id] = (len(self._tensors),)
        self._tensors.append(self._tensor(value, name, alias_of=alias_of))
        return len(self._tensors) - 1

    def _results_of(self, op: Any, results: Sequence[Any], label: str) -> list[int]:
        """New tensors for the results of an operator; those that it writes in place are views of what it was given."""
        shared = _private.in_place_results(op)
        operands = op.operands_source()
        made: list[int] = []
        for place, value in enumerate(results):
            if value is None:
                continue
            given = self._values.get(operands[shared[place]].id, ()) if place in shared else ()
            if (elements := self._sizes.elements_of(value)) is not None:
                first = len(self._tensors)
                lends = given if len(given) == len(elements) else [None] * len(elements)
                for number, (size, lent) in enumerate(zip(elements, lends, strict=True)):
                    self._tensors.append(Tensor(size, f"{label}[{number}]", alias_of=lent))
                self._values[value.id] = tuple(range(first, len(self._tensors)))
                made += self._values[value.id]
            else:
                made.append(self._new(value, label, given[0] if len(given) == 1 else None))
        return made

    def _name_parts(self, taken_apart: Sequence[Any]) -> None:
        """The results of what takes a list apart are the tensors of the list."""
        for op in taken_apart:
            tensors = self._values[op.operands_source()[0].id]
            results = op.results()
            if op.name() == "builtin.slice":
                self._values[results[0].id] = (tensors[int(op.attrs()["index"])],)
            else:
                for tensor, value in zip(tensors, results, strict=True):
                    self._values[value.id] = (tensor,)

    def _in_place_pairs(self, position: int, op: Any) -> tuple[tuple[int, int], ...]:
        """Which result takes over the bytes of which operand, where nothing reads those bytes any more.

        As Paddle's pass decides it: somebody who reads only the shape of the operand later does not count.
        """
        pairs = []
        operands, results = op.operands_source(), op.results()
        for result, operand in op_facts.takeovers(op).items():
            if operand >= len(operands) or result >= len(results):
                return ()
            given, made = operands[operand], results[result]
            if not given.initialized() or not made.initialized():
                return ()
            source, target = self._values.get(given.id, ()), self._values.get(made.id, ())
            if (
                len(source) != 1
                or len(target) != 1
                or self._tensors[source[0]].size_bytes != self._tensors[target[0]].size_bytes
            ):
                return ()
            if source[0] in self._inputs or self._sizes.dtype_of(given) != self._sizes.dtype_of(made):
                return ()
            if self._is_across_the_cut(position, source[0]):
                return ()
            pairs.append((source[0], target[0]))
        return tuple(pairs)

    def _is_across_the_cut(self, position: int, tensor: int) -> bool:
        """Does an operator of the backward half read a tensor of the forward half? Such bytes are never taken over."""
        if self._cut is None or position < self._cut.backward_start:
            return False
        return tensor < self._first_of_backward


def _making_once(ops: Sequence[Op], held: frozenset[int]) -> list[Op]:
    """The ops, those marked as not recomputable that make what somebody outside of the program holds.

    A layer's results, the gradients of its parameters, what a step fetches: whoever gets them gets what the first run
    made, so that another run would free nothing.
    """
    return [replace(op, recomputable=False) if not held.isdisjoint(op.outputs) else op for op in ops]


def _without_late_reads(ops: Sequence[Op], tensors: Sequence[Tensor]) -> list[Op]:
    """The ops, those marked as not recomputable that might read a storage after the program has written to it.

    A parameter may be read until the update writes it. An op that reads it may run again as long as nobody can need the
    result of that after the write. The update reads gradients: where the gradient of a bias could be made again after
    the weight beside it was written, neither the products with that weight nor what is made of them could run again. So
    what makes a gradient that the update reads runs once.
    """
    first_update = next((index for index, op in enumerate(ops) if op.phase == "update"), len(ops))
    root = list(range(len(tensors)))
    for number, tensor in enumerate(tensors):
        root[number] = number if tensor.alias_of is None else root[tensor.alias_of]
    written: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for output in op.outputs:
            if tensors[output].alias_of is not None:
                written.setdefault(root[output], []).append(index)
    needed_until: dict[int, int] = {}
    found = list(ops)
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        until = max((needed_until.get(output, index) for output in op.outputs), default=index)
        moves = _moves_statistics(op)
        is_last_gradient = op.phase == "backward" and op_facts.is_gradient_kind(op.kind) and until >= first_update
        is_overwritten = not moves and any(
            index <= write and (write == index or write < until)
            for read in op.inputs
            for write in written.get(root[read], ())
        )
        recomputable = op.recomputable and not is_overwritten and not is_last_gradient
        if op.recomputable and not recomputable:
            found[index] = replace(op, recomputable=False)
        for read in op.inputs:
            needed_until[read] = max(needed_until.get(read, 0), until if recomputable else index)
    return found


def _moves_statistics(op: Op) -> bool:
    return op.kind in op_facts.BATCH_NORM
