"""Which blocks of memory a run of a step asks its allocator for, and gives back, one after the other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from remat.core.graph import Graph, Tensor
from remat.core.simulator import storage_lifetimes

_MOVES: Final = "AssignVariableOp"
"""The operation whose variable takes over the block of what it is assigned; others write into the variable's own."""


class BlockEvent(NamedTuple):
    """Blocks of ``size_bytes`` each are asked for, or, where that is 0, those of ``block`` are given back.

    Where ``moves_to`` is given, a block becomes that of this pinned input, whose own is given back in its place.
    """

    block: int
    size_bytes: int = 0
    pieces: int = 0
    moves_to: int | None = None


class _Made(NamedTuple):
    """A storage, and the event of its blocks, which come where none of ``lenders`` gives its own."""

    storage: int
    comes: BlockEvent
    lenders: tuple[int, ...]


@dataclass(frozen=True)
class StepBlocks:
    """The blocks of a schedule, in whatever order its operations run.

    Attributes:
        made: by position, what the operation makes.
        used: by position, the storages that it reads or makes; those that live on to the end are left out.
        workspace_bytes: by position, what it works with.
        assigned: by position, of operations that assign: the storage, and the variable whose it becomes when it would
            be given back.
        sizes: by storage.
        uses: by storage, how many operations read or make it.
    """

    made: Sequence[Sequence[_Made]]
    used: Sequence[Sequence[int]]
    workspace_bytes: Sequence[int]
    assigned: dict[int, tuple[int, int]]
    sizes: Sequence[int]
    uses: Sequence[int]

    @classmethod
    def of(cls, graph: Graph, schedule: Sequence[int]) -> StepBlocks:
        """The blocks of a schedule; pinned inputs have come before it."""
        lives = storage_lifetimes(graph, schedule)
        tensors, sizes, kept = lives.tensor.tolist(), lives.size_bytes.tolist(), lives.kept.tolist()
        lenders: defaultdict[int, list[int]] = defaultdict(list)
        for source, target in zip(lives.lender.tolist(), lives.borrower.tolist(), strict=True):
            lenders[target].append(source)
        made: list[list[_Made]] = [[] for _ in schedule]
        used: list[set[int]] = [set() for _ in schedule]
        for number, (birth, tensor) in enumerate(zip(lives.birth.tolist(), tensors, strict=True)):
            used[birth].add(number)
            if sizes[number]:
                pieces = _pieces(graph.tensors[tensor])
                comes = BlockEvent(number, sizes[number] // pieces, pieces)
                made[birth].append(_Made(number, comes, tuple(lenders[number])))
        for number, position in zip(lives.read.tolist(), lives.reader.tolist(), strict=True):
            used[position].add(number)
        newest: dict[int, int] = {}  # tensor -> its newest storage
        assigned = {}
        for position, index in enumerate(schedule):
            newest.update((tensors[one.storage], one.storage) for one in made[position])
            if graph.ops[index].kind == _MOVES and (pair := _taken_over_by_variable(graph, index)):
                variable, value = pair
                if value in newest:
                    assigned[position] = newest[value], variable
        uses = Counter(number for numbers in used for number in numbers)
        return cls(
            made,
            [sorted(number for number in numbers if sizes[number] and not kept[number]) for numbers in used],
            [graph.ops[index].workspace_bytes for index in schedule],
            assigned,
            sizes,
            [uses[number] for number in range(len(sizes))],
        )

    @cached_property
    def _goes(self) -> list[BlockEvent]:
        """By storage, the event of its blocks being given back."""
        return [BlockEvent(number) for number in range(len(self.sizes))]

    def events(self, run: Iterable[int]) -> Iterator[BlockEvent]:
        """Blocks coming and going, in the order of a run (:data:`remat.tensorflow.peak.executor.Run`).

        What an operation makes and works with comes as it begins, and goes as the last operation that reads it ends.
        What it may write in place takes over its input's block, unless another operation is still to read that.
        """
        made, used, workspace_bytes, assigned = self.made, self.used, self.workspace_bytes, self.assigned
        uses = list(self.uses)
        becomes: dict[int, int] = {}  # storage -> the variable whose it becomes when it would be given back
        owner: dict[int, int] = {}  # storage -> the storage whose block it has taken over
        goes = self._goes
        for event in run:
            if event < 0:
                position = ~event
                if workspace_bytes[position]:
                    yield BlockEvent(event)
                for number in used[position]:
                    uses[number] -= 1
                    if not uses[number] and number in owner:
                        block = owner.pop(number)
                        yield BlockEvent(block, moves_to=becomes[number]) if number in becomes else goes[block]
                continue
            for number, comes, lenders in made[event]:
                block = number
                for source in lenders:
                    if uses[source] == 1 and source in owner:
                        if self.sizes[source] == self.sizes[number]:
                            block = owner.pop(source)
                        else:  # A list shrinks while another one grows.
                            yield BlockEvent(owner.pop(source))
                        break
                owner[number] = block
                if block == number:
                    yield comes
            if event in assigned:
                value, variable = assigned[event]
                becomes[value] = variable
            if workspace_bytes[event]:
                yield BlockEvent(~event, workspace_bytes[event], 1)
        for number, block in owner.items():
            yield BlockEvent(block, moves_to=becomes.get(number))


def moved_variables(graph: Graph) -> Iterator[int]:
    """The variables that take over the block of what they are assigned, by the tensors that own their storages."""
    for index, op in enumerate(graph.ops):
        if op.kind == _MOVES and (pair := _taken_over_by_variable(graph, index)):
            yield pair[0]


def _taken_over_by_variable(graph: Graph, assignment: int) -> tuple[int, int] | None:
    """The variable and what it is assigned, if it takes over the block; by the tensors that own the storages."""
    variable, value = (graph.roots[tensor] for tensor in graph.ops[assignment].inputs[:2])
    return (variable, value) if graph.tensors[value].size_bytes == graph.tensors[variable].size_bytes else None


def _pieces(tensor: Tensor) -> int:
    """A list of tensors is as many blocks as it has items; everything else is one."""
    return max(1, tensor.shape[0]) if tensor.dtype == "variant" and tensor.shape else 1
