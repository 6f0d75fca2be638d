"""What a loop needs in memory while it runs: its body's values, and its lists, which grow and shrink meanwhile.

In the graph a loop is one op: it holds its inputs, its outputs and its workspace at once. In truth lists grow item by
item, and a backward loop gives back each item once it has read it. So the most bytes are held in the first iterations,
where the lists that come in are full, or in the last one, where those that go out are. The workspace is what is
missing from inputs and outputs then.

The figures hold for iterations that run one after the other. TensorFlow runs up to 32 of them side by side where their
operations do not wait for one another: the products that sum up to the gradients of weights lie around meanwhile.
A rewritten function runs them one by one (``emit``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remat.core.graph import Graph
from remat.core.simulator import bytes_alive, storage_lifetimes
from remat.tensorflow.trace.sizes import Loop


@dataclass(frozen=True)
class LoopMemory:
    """The bytes and seconds of one loop.

    Attributes:
        workspace_bytes: what it needs beside its inputs and outputs.
        time_s: of one iteration, as predicted.
        takes_over: pairs (number of an input, number of an output): lists that shrink, and lists that grow meanwhile.
    """

    workspace_bytes: int
    time_s: float
    takes_over: tuple[tuple[int, int], ...]


def loop_memory(loop: Loop, body: Graph, names: Mapping[str, int]) -> LoopMemory:
    """The bytes of a loop beside its inputs and outputs.

    Args:
        loop: the loop.
        body: the graph of its body, in which each carried value is made by an op.
        names: the tensors of ``body`` by their names.
    """
    numbers = range(len(loop.body.outputs))
    added = [loop.added_bytes(n) for n in numbers]
    given_back = [loop.given_back_bytes(n) for n in numbers]
    carried = loop.carried
    iteration = _Iteration(
        body,
        carried={names[name] for name in carried if name in names},
        read={names[name] for name in loop.items_read() if name in names},
        kept={names[item.name] for n in numbers for item in loop.appended(n) if item.name in names},
    )
    iterations = loop.iterations()
    grows = sum(added) - sum(given_back)
    first, later = iteration.peaks()
    held = [first] + ([later + grows, later + (iterations - 1) * grows] if iterations > 1 else [])
    pairs = _taken_over(given_back, added)
    outputs = sum(loop.sizes.bytes(t) or 0 for t in loop.body.inputs if t.name in carried)
    outputs += sum(loop.grown_bytes(n) for n in numbers) - iterations * sum(added[target] for _, target in pairs)
    return LoopMemory(max(0, max(held) - outputs), body.time_s, pairs)


def _taken_over(given_back: list[int], added: list[int]) -> tuple[tuple[int, int], ...]:
    """For each list that grows one that shrinks at least as fast, the closest in size."""
    pairs = []
    free = {number for number, size in enumerate(given_back) if size}
    for target in sorted(range(len(added)), key=lambda n: -added[n]):
        fitting = [number for number in free if given_back[number] >= added[target] > 0]
        if fitting:
            source = min(fitting, key=lambda n: (given_back[n], n))
            free.remove(source)
            pairs.append((source, target))
    return tuple(pairs)


class _Iteration:
    """Bytes of one iteration at each of its operations.

    Args:
        body: the graph of the body.
        carried: tensors that the iteration before has made.
        read: tensors that lie in a list when the iteration begins.
        kept: tensors that lie in a list when it ends.
    """

    def __init__(self, body: Graph, carried: Collection[int], read: Collection[int], kept: Collection[int]) -> None:
        self._body = body
        self._carried, self._read, self._kept = ({body.roots[t] for t in group} for group in (carried, read, kept))

    def peaks(self) -> tuple[int, int]:
        """The most bytes in the first iteration, and in a later one, beyond what the loop holds as each begins.

        What the iteration before has made counts in a later one: it is no input of the loop any more. Nothing holds the
        operations of a body in their order, and some may run as soon as what they read is there.
        """
        orders = [self._peaks(order) for order in (self._body.plain_schedule, _as_soon_as_possible(self._body))]
        return max(first for first, _ in orders), max(later for _, later in orders)

    def _peaks(self, order: Sequence[int]) -> tuple[int, int]:
        body = self._body
        end = len(body.ops)
        if not end:
            return 0, 0
        lives = storage_lifetimes(body, order)
        roots = lives.tensor.tolist()
        carried, read, kept = (
            np.array([root in group for root in roots], dtype=bool) for group in (self._carried, self._read, self._kept)
        )
        birth = np.where(carried | read, 0, lives.birth)
        gone = np.where(kept | lives.kept, end, lives.last + 1)
        # Of a block that is taken over one of the two counts at a time.
        taken = np.flatnonzero(lives.taken_over >= 0)
        birth[taken] += 1
        gone[taken] = np.maximum(birth[taken], gone[taken])
        workspace = np.array([body.ops[index].workspace_bytes for index in order], dtype=np.int64)
        first = ~carried  # The first iteration is given inputs of the loop.
        there = int(lives.size_bytes[read].sum())
        in_first = bytes_alive(birth[first], gone[first], lives.size_bytes[first], end) + workspace
        in_later = bytes_alive(birth, gone, lives.size_bytes, end) + workspace
        return int(in_first.max()) - there, int(in_later.max()) - there


def _as_soon_as_possible(body: Graph) -> list[int]:
    """The ops by how many others have to run before them, one after the other."""
    level = [0] * len(body.ops)
    for number, op in enumerate(body.ops):
        before = [*op.after, *(made for t in op.inputs if (made := body.producer[t]) is not None)]
        level[number] = 1 + max((level[one] for one in before), default=0)
    return sorted(range(len(body.ops)), key=lambda number: level[number])
