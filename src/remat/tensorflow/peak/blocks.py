"""Which blocks of memory a run of a step asks its allocator for, and gives back, one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from remat.core.graph import Graph, Tensor
from remat.core.simulator import StorageLifetimes, storage_lifetimes
from remat.tensorflow.peak.executor import Run

_MOVES: Final = "AssignVariableOp"
"""The operation whose variable takes over the block of what it is assigned; others write into the variable's own."""


@dataclass(frozen=True)
class BlockEvent:
    """``count`` blocks of ``size_bytes`` each are asked for, or, where that is 0, those of ``block`` are given back.

    Where ``moves_to`` is given, a block becomes that of this pinned input, whose own is given back in its place.
    """

    block: int
    size_bytes: int = 0
    count: int = 0
    moves_to: int | None = None


def block_events(graph: Graph, run: Run) -> Iterator[BlockEvent]:
    """Blocks coming and going, in the order of a run.

    What an operation makes and works with comes as it begins, and goes as the last operation that reads it ends. What
    it may write in place takes over its input's block, unless another operation that runs at the same time reads that.

    Args:
        graph: the step; its pinned inputs have come before it.
        run: of a schedule of it.
    """
    lives = storage_lifetimes(graph, run.order)
    sizes, tensors, kept = lives.size_bytes.tolist(), lives.tensor.tolist(), lives.kept.tolist()
    taken_over = lives.taken_over.tolist()
    births: defaultdict[int, list[int]] = defaultdict(list)
    for number, birth in enumerate(lives.birth.tolist()):
        births[birth].append(number)
    used = _used(run.order, lives)
    users = [0] * len(sizes)
    for numbers in used:
        for number in numbers:
            users[number] += 1
    newest: dict[int, int] = {}  # tensor -> its newest storage
    assigned: dict[int, int] = {}  # storage -> the variable whose it becomes when it would be freed
    owner: dict[int, int] = {}  # storage -> the storage whose block it has taken over
    for event in run.events:
        position = max(event, ~event)
        op = graph.ops[run.order[position]]
        if event < 0:
            if op.workspace_bytes:
                yield BlockEvent(event)
            for number in used[position]:
                users[number] -= 1
                if not users[number] and number in owner and not kept[number]:
                    yield BlockEvent(owner.pop(number), moves_to=assigned.get(number))
            continue
        for number in births.get(position, ()):
            if not sizes[number]:
                continue
            source = taken_over[number]
            owner[number] = number
            if source in owner and users[source] == 1:
                if sizes[source] == sizes[number]:
                    owner[number] = owner.pop(source)
                else:  # A list shrinks while another one grows.
                    yield BlockEvent(owner.pop(source))
            if owner[number] == number:
                pieces = _pieces(graph.tensors[tensors[number]])
                yield BlockEvent(number, sizes[number] // pieces, pieces)
            newest[tensors[number]] = number
        if op.kind == _MOVES and (pair := _taken_over_by_variable(graph, run.order[position])):
            variable, value = pair
            if value in newest:
                assigned[newest[value]] = variable
        if op.workspace_bytes:
            yield BlockEvent(~position, op.workspace_bytes, 1)
    for number, block in owner.items():
        yield BlockEvent(block, moves_to=assigned.get(number))


def _used(order: Sequence[int], lives: StorageLifetimes) -> list[list[int]]:
    """For each position, the storages that its operation reads or makes; pinned ones are left out."""
    used: list[set[int]] = [set() for _ in order]
    for number, birth in enumerate(lives.birth.tolist()):
        used[birth].add(number)
    for number, position in zip(lives.read.tolist(), lives.reader.tolist(), strict=True):
        used[position].add(number)
    return [sorted(numbers) for numbers in used]


def moved_variables(graph: Graph, schedule: Sequence[int]) -> set[int]:
    """The variables, by the tensor that owns the storage, whose block changes in a run of a schedule."""
    pinned = {graph.roots[tensor] for tensor in graph.inputs}
    pairs = [_taken_over_by_variable(graph, index) for index in set(schedule) if graph.ops[index].kind == _MOVES]
    return {variable for variable, value in filter(None, pairs) if value not in pinned}


def _taken_over_by_variable(graph: Graph, assignment: int) -> tuple[int, int] | None:
    """The variable and what it is assigned, if it takes over the block; by the tensors that own the storages."""
    variable, value = (graph.roots[tensor] for tensor in graph.ops[assignment].inputs[:2])
    return (variable, value) if graph.tensors[value].size_bytes == graph.tensors[variable].size_bytes else None


def _pieces(tensor: Tensor) -> int:
    """A list of tensors is as many blocks as it has items; everything else is one."""
    return max(1, tensor.shape[0]) if tensor.dtype == "variant" and tensor.shape else 1
