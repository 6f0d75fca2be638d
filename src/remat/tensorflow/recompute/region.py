"""A region of a graph: operations whose results are dropped after the forward pass, what they read, and its pieces.

For a function that is a whole network, a region of one piece would save nothing: in its backward pass it has all that
it dropped again at once. In pieces it also keeps what crosses from one piece to the next, and each piece is made again
only when the gradients of the next one are there. This is checkpointing of a general graph in program order (T. Chen
et al., "Training deep nets with sublinear memory cost", 2016, arXiv:1604.06174): n equal operations in a row take about
2 sqrt(n) results instead of n, and each still runs twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import tensorflow as tf

from remat.tensorflow.trace import op_facts

# A copy of one of these would need the gradient of a function that TensorFlow attached to the original.
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})


@dataclass(frozen=True, eq=False)
class Region:
    """What the backward pass of one call needs.

    Attributes:
        graph: where the forward pass runs.
        operations: the repeatable operations that the outputs need, in program order.
        outputs: the tensors that the gate takes in, differentiable.
        boundary: what the operations read from outside of them, differentiable or not.
        differentiable: the tensors of ``boundary`` that the gate takes in after the outputs.
        ties: for tensors that ``operations`` read tied, by name, what was tied; such operations are copies themselves.
        segmented: recompute it in pieces (``pieces_of``) rather than as one.
    """

    graph: tf.Graph
    operations: tuple[tf.Operation, ...]
    outputs: tuple[tf.Tensor, ...]
    boundary: tuple[tf.Tensor, ...]
    differentiable: tuple[tf.Tensor, ...]
    ties: Mapping[str, tf.Tensor] = field(default_factory=dict)
    segmented: bool = False

    def read_by(self, op: tf.Operation) -> list[tf.Tensor]:
        """The inputs of one of the operations, those that were tied in their first form."""
        return [self.ties.get(t.name, t) for t in op.inputs]

    def in_graph(self, graph: tf.Graph) -> Region:
        """The same region in another copy of its graph, as TensorFlow makes one of a loop's body."""

        def same(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
            return tuple(graph.get_tensor_by_name(t.name) for t in tensors)

        operations = tuple(graph.get_operation_by_name(op.name) for op in self.operations)
        ties = {name: graph.get_tensor_by_name(t.name) for name, t in self.ties.items()}
        outputs, boundary, differentiable = same(self.outputs), same(self.boundary), same(self.differentiable)
        return Region(graph, operations, outputs, boundary, differentiable, ties, self.segmented)


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Can ``tensor`` carry a gradient?"""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def may_repeat(op: tf.Operation) -> bool:
    """May ``op`` run again in a backward pass, perhaps in another graph?"""
    return op.type == "Const" or (op_facts.may_repeat(op) and op.type not in _CALLS)


def needed_for(
    outputs: Iterable[tf.Tensor],
    members: Collection[tf.Operation],
    read_by: Callable[[tf.Operation], Iterable[tf.Tensor]],
) -> set[tf.Operation]:
    """The members that lead to ``outputs`` through members alone."""
    needed: set[tf.Operation] = set()
    stack = [t.op for t in outputs]
    while stack:
        op = stack.pop()
        if op in members and op not in needed:
            needed.add(op)
            stack += [t.op for t in read_by(op)]
    return needed


def region_of(
    graph: tf.Graph, made: Sequence[tf.Operation], outputs: Sequence[tf.Tensor], segmented: bool = False
) -> Region:
    """The region behind ``outputs`` among the operations that a call made."""
    # Small tensors from outside come in as constants; they are inputs all the same, and gradients leave through them.
    inputs = {t.op for t in getattr(graph, "inputs", ()) if tf.is_symbolic_tensor(t)}
    members = {op for op in made if may_repeat(op) and op not in inputs}
    needed = needed_for(outputs, members, lambda op: op.inputs)
    operations = tuple(op for op in made if op in needed)
    read = {t.name: t for op in operations for t in op.inputs if t.op not in needed}
    read |= {t.name: t for t in outputs if t.op not in needed}
    boundary = tuple(read.values())
    differentiable = tuple(t for t in boundary if is_differentiable(t))
    return Region(graph, operations, tuple(outputs), boundary, differentiable, segmented=segmented)


_MOST_PIECES: Final = 64
"""The most pieces that are tried. A judgement: 64 pieces are the best for about 4000 equal operations in a row.

Fewer, longer networks keep more than they must; more, cutting takes longer, since every number is tried.
"""


def pieces_of(region: Region, groups: Iterable[Sequence[str]] = ()) -> list[Region]:
    """The region as regions that follow one another; what a later one reads is an output of an earlier one.

    Args:
        region: what is cut. Constants belong to every piece that reads them.
        groups: names of operations that must stay in one piece.
    """
    operations = [op for op in region.operations if op.type != "Const"]
    constants = [op for op in region.operations if op.type == "Const"]
    if not operations:
        return [region]
    cuts = _cuts(region, operations, groups)
    outputs = {t.name: t for t in region.outputs}
    pieces: list[Region] = []
    for start, end in reversed(list(itertools.pairwise([0, *cuts, len(operations)]))):
        own = {op.name for op in operations[start:end]}
        inside = own | {op.name for op in constants}
        made = [t for op in operations[start:end] for t in op.outputs if t.name in outputs]
        read = {t.name: t for op in operations[start:end] for t in region.read_by(op) if t.op.name not in inside}
        members = tuple(op for op in region.operations if op.name in inside)
        boundary = tuple(read.values())
        differentiable = tuple(t for t in boundary if is_differentiable(t))
        pieces.append(Region(region.graph, members, tuple(made), boundary, differentiable, region.ties))
        outputs |= {t.name: t for t in differentiable}
    return pieces[::-1]


def _cuts(region: Region, operations: Sequence[tf.Operation], groups: Iterable[Sequence[str]]) -> list[int]:
    """Before which operations a piece begins, so that what is kept and the largest piece take least together."""
    place = {op.name: number for number, op in enumerate(operations)}
    sizes = [sum(_size(t) for t in op.outputs) for op in operations]
    until = list(range(len(operations)))
    for op in operations:
        for tensor in region.read_by(op):
            if tensor.op.name in place:
                until[place[tensor.op.name]] = max(until[place[tensor.op.name]], place[op.name])
    # What crosses the border before each operation; nothing may be cut inside a group.
    steps = [0] * (len(operations) + 1)
    for number, last in enumerate(until):
        steps[number + 1] += sizes[number]
        steps[last + 1] -= sizes[number]
    crossing = [float(size) for size in itertools.accumulate(steps)][: len(operations)]
    for group in groups:
        inside = [place[name] for name in group if name in place]
        for number in range(min(inside, default=0) + 1, max(inside, default=0) + 1):
            crossing[number] = math.inf
    before = [0, *itertools.accumulate(sizes)]
    candidates = [_greedy_cuts(crossing, before, before[-1] / count) for count in range(1, _MOST_PIECES + 1)]

    def together(cuts: list[int]) -> float:
        largest = max(before[end] - before[start] for start, end in itertools.pairwise([0, *cuts, len(operations)]))
        return largest + sum(crossing[cut] for cut in cuts)

    return min(candidates, key=together)


def _greedy_cuts(crossing: Sequence[float], before: Sequence[int], most: float) -> list[int]:
    """Each piece ends where least crosses, among the ends that its size allows and that use at least half of it."""
    cuts: list[int] = []
    start, last = 0, len(crossing)
    while start + 1 < last and before[last] - before[start] > most:
        ends = [n for n in range(start + 1, last) if before[n] - before[start] <= most] or [start + 1]
        wide = [n for n in ends if before[n] - before[start] >= most / 2] or ends[-1:]
        end = min(wide, key=lambda n: (crossing[n], -n))
        while end < last and crossing[end] == math.inf:  # A group that is larger than a piece may be.
            end += 1
        if end == last:
            break
        cuts.append(end)
        start = end
    return cuts


def _size(tensor: tf.Tensor) -> int:
    """Bytes, an unknown dimension counting as one: it is the batch's, the same for all."""
    if tensor.shape.rank is None:
        return 0
    elements: int = math.prod(n or 1 for n in tensor.shape.as_list())
    return elements * int(tensor.dtype.size)
