"""A training step as a chain of blocks: pieces of the forward part, each with the backward ops that need it.

A *cut* lies behind a forward op where little crosses to later forward ops: between two residual blocks or two layers of
a Transformer. What crosses is the block's *checkpoint*: from it alone every later block can be computed again. Each
block is a small graph of its own, so that blocks of one structure are planned once, however often they stand in the
network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.core.graph import Graph, Op, Tensor
from remat.core.simulator import bytes_alive
from remat.planners.view.board import Board
from remat.planners.view.problem import BoolArray, FloatArray, IntArray

MOST_BLOCKS: Final = 56
"""Cuts beyond this number are merged away, the widest first: the programme is cubic in the blocks. A judgement: the
49 blocks of BERT-large are below it. With fewer, budgets near the smallest cost more."""

# Judgements, not measured, the rest.
_MOST_CUTS: Final = 600
"""Places for cuts that are looked at; merging them is quadratic."""
_WORTH: Final = 0.6
"""A cut stays where what crosses it is at most this share of what the smaller block beside it stores. Higher: blocks of
which the checkpoint is nearly all that they could drop; lower: blocks so large that their menus are poor."""
_LONG: Final = 0.1
"""Of the backward part: a gradient that waits longer belongs to no block, but passes by all."""
_GRAINS: Final = 2000
"""Bytes beside a block are rounded up to the plain peak's share of 1/2000, so that equal layers come out as equal."""


@dataclass(frozen=True, eq=False)
class Block:
    """One block of the chain.

    Attributes:
        forward: its forward ops, in program order.
        backward: its backward ops, in program order.
        graph: both, with an op between them that stands for all later blocks; it makes what comes in from them.
        turn: the index of that op.
        ops: for each op of ``graph``, the op of the step; -1 for the one between.
        storages: for each tensor of ``graph``, the storage of the step.
        checkpoint: storages that cross the cut behind the block.
        stubborn: storages of its forward part that must not be made twice, and that its backward ops or recomputations
            read.
        fixed_forward_bytes: bytes beside the block that are in memory all the while it runs forward, whatever is
            planned for it. Bytes that come and go meanwhile count as workspace of the graph's ops.
        fixed_backward_bytes: the same while it runs backward.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    graph: Graph
    turn: int
    ops: tuple[int, ...]
    storages: tuple[int, ...]
    checkpoint: frozenset[int]
    stubborn: frozenset[int]
    fixed_forward_bytes: int
    fixed_backward_bytes: int

    @property
    def structure(self) -> tuple[object, ...]:
        """Equal for blocks that have the same plans: ops, edges, bytes and seconds."""
        graph = self.graph
        local = {s: t for t, s in enumerate(self.storages)}
        return (
            tuple(
                (op.inputs, op.outputs, round(op.time_s, 12), op.recomputable, op.in_place, op.workspace_bytes)
                for op in graph.ops
            ),
            tuple(tensor.size_bytes for tensor in graph.tensors),
            graph.inputs,
            graph.outputs,
            tuple(sorted(local[s] for s in self.checkpoint if s in local)),
        )


def find_blocks(board: Board) -> list[Block]:
    """The chain of blocks of a step; empty where it does not fall into three or more."""
    chain = _Chain(board)
    # Beside the skip connections of a U-Net gradients wait at every cut; then cuts are chosen as if there were none.
    cuts = chain.cuts(with_gradients=True)
    if len(cuts) < 2:
        cuts = chain.cuts(with_gradients=False)
    blocks = chain.blocks(cuts) if len(cuts) >= 2 else []
    # Where nothing that matters runs backward, as in graphs that are no training step, there is nothing to plan.
    return blocks if all(block.forward and block.backward for block in blocks) else []


def _thinned(cuts: list[int], crossing: IntArray, most: int) -> list[int]:
    """At most so many cuts, of each stretch the narrowest."""
    if len(cuts) <= most:
        return cuts
    return [int(part[np.argmin(crossing[part])]) for part in np.array_split(np.array(cuts), most)]


class _Chain:
    def __init__(self, board: Board) -> None:
        self.board = board
        self.problem = problem = board.problem
        self.turn = problem.turning_point
        self.counted = [op for op in range(problem.count) if board.counts[op]]
        self.followed = [s for s in problem.storages if board.takes_part[s]]
        self.made = np.array([problem.made_by[s] for s in self.followed], dtype=np.int64)
        self.size = np.array([problem.size[s] for s in self.followed], dtype=np.int64)
        self.may_drop = np.array([board.repeatable[problem.made_by[s]] for s in self.followed], dtype=np.bool_)
        self.workspace = np.array([op.workspace_bytes for op in problem.graph.ops], dtype=np.int64)
        uses = [problem.uses[s] for s in self.followed]
        self.last = np.array([row[-1] for row in uses], dtype=np.int64)
        self.last_forward = np.array([max(u for u in row if u <= max(self.turn, row[0])) for row in uses], np.int64)
        self.first_backward = np.array([next((u for u in row[1:] if u > self.turn), -1) for row in uses], np.int64)

    def cuts(self, *, with_gradients: bool) -> list[int]:
        """The ops behind which to cut, rising; the last block ends at the turning point."""
        forward = self.made <= self.turn
        until = np.minimum(self.last_forward, self.turn)
        crossing = bytes_alive(self.made[forward], until[forward], self.size[forward], self.problem.count + 1)
        stored = np.zeros(self.problem.count + 2, dtype=np.int64)
        waits = forward & (self.first_backward >= 0)
        np.add.at(stored, self.made[waits], self.size[waits])
        stored = np.cumsum(stored)
        places = [op for op in self.counted if op < self.turn]
        cuts = [
            p
            for before, p, after in zip(places, places[1:], places[2:], strict=False)
            if (crossing[p] < crossing[before] and crossing[p] <= crossing[after])
            or crossing[p] == crossing[before] == crossing[after]
        ]
        cuts = _thinned(cuts, crossing, _MOST_CUTS)
        arriving = self._arriving(cuts) if with_gradients else dict.fromkeys(cuts, 0.0)
        ends = [-1, *cuts, self.turn]
        while len(ends) > 2:
            # A cut is worth it where the bytes that cross are few beside those that the blocks around it store.
            # Storages that cross the cut before it, too, do not count: that checkpoint holds them already.
            further = np.array([*ends, self.problem.count])
            nearest = np.searchsorted(ends, self.made[forward])
            crosses = until[forward] > further[nearest]
            inside = np.diff(np.array([stored[max(e, 0)] if e >= 0 else 0 for e in ends], dtype=np.float64))
            worth = self._worth(ends, nearest, crosses, inside, arriving)
            if worth.max() <= _WORTH:
                if len(ends) - 1 <= MOST_BLOCKS:
                    break
                # What crosses the next cut as well is saved by neither. A mask that all layers read would otherwise
                # have the first cut go again and again, until most layers are one block.
                crosses &= until[forward] <= further[nearest + 1]
                worth = self._worth(ends, nearest, crosses, inside, arriving)
            # Of equal cuts the one between the smallest blocks goes, so that a uniform chain gets equal blocks.
            worst = int(np.lexsort((inside[:-1] + inside[1:], -np.round(worth, 9)))[0])
            del ends[worst + 1]
        return ends[1:-1]

    def _worth(
        self, ends: list[int], nearest: IntArray, crosses: BoolArray, inside: FloatArray, arriving: dict[int, float]
    ) -> FloatArray:
        """For each cut, the bytes of its checkpoint as a share of what the smaller block beside it stores.

        Args:
            ends: the last op of each block, behind one in front of all.
            nearest: for each storage of the forward part, the number of the end behind it.
            crosses: for each of them, does it count as crossing that end?
            inside: bytes that each block stores.
            arriving: for each cut, bytes of gradients that wait there.
        """
        size = self.size[self.made <= self.turn]
        width = np.bincount(nearest[crosses], size[crosses], len(ends))[1:-1]
        width = np.maximum(width, [arriving[cut] for cut in ends[1:-1]])
        worth: FloatArray = width / np.maximum(np.minimum(inside[:-1], inside[1:]), 1.0)
        return worth

    def _arriving(self, cuts: Sequence[int]) -> dict[int, float]:
        """For each cut, bytes of gradients that wait where the backward part of the block before it begins."""
        # A gradient that waits long, or to the end, belongs to no block: it is one of a skip connection or of a weight.
        long = _LONG * (self.problem.count - self.turn)
        wait = (self.made > self.turn) & (self.last - self.made < long) & (self.last < self.problem.count)
        waiting = bytes_alive(self.made[wait] + 1, self.last[wait] + 1, self.size[wait], self.problem.count + 1)
        return {cut: float(waiting[self._begin(cut)]) for cut in cuts}

    def _begin(self, end: int) -> int:
        """The first backward op that reads something which was made up to the given op."""
        inside = (self.made <= end) & (self.last_forward <= end) & self.may_drop & (self.first_backward >= 0)
        return int(self.first_backward[inside].min()) if inside.any() else self.problem.count

    def blocks(self, cuts: Sequence[int]) -> list[Block]:
        ends = [*cuts, self.turn]
        begins = [self._begin(end) for end in ends]
        begins[-1] = self.turn + 1
        for i in reversed(range(len(begins) - 1)):
            begins[i] = max(begins[i], begins[i + 1])
        kept = [i for i in range(len(ends)) if (begins[i] < (begins[i - 1] if i else self.problem.count))]
        result = []
        start = 0
        for number, i in enumerate(kept):
            stop = self.problem.count if number == 0 else begins[kept[number - 1]]
            upper = ends[kept[number + 1] - 1] if number + 1 < len(kept) else self.turn
            result.append(self._block(start, upper, begins[i], stop))
            start = upper + 1
        return result

    def _block(self, start: int, end: int, begin: int, stop: int) -> Block:
        """The block of forward ops from start to end and backward ops from begin up to stop."""
        board, problem = self.board, self.problem
        forward = [op for op in range(start, end + 1) if board.counts[op]]
        backward = [op for op in range(begin, stop) if board.counts[op]]
        own = {s for op in (*forward, *backward) for s in board.makes[op]}
        touched = dict.fromkeys(s for op in (*forward, *backward) for s in (*board.reads[op], *board.makes[op]))
        coming = [s for s in touched if s not in own and problem.made_by[s] > end]
        pinned = [s for s in touched if s not in own and problem.made_by[s] <= end]
        counted = own | set(coming)
        forward_bytes, beside_forward = self._fixed(start, end + 1, counted)
        backward_bytes, beside_backward = self._fixed(begin, stop, counted)
        beside = beside_forward | beside_backward
        number = {s: t for t, s in enumerate(touched)}
        zero = set(pinned)
        tensors = tuple(Tensor(0 if s in zero else problem.size[s]) for s in touched)

        def local(op: int) -> Op:
            pairs = [pair for pair in problem.takeovers[op] if pair.source in number and pair.target in own]
            return Op(
                inputs=tuple(number[s] for s in board.reads[op]),
                outputs=tuple(number[s] for s in board.makes[op]),
                time_s=board.repeat_time_s[op],
                recomputable=board.repeatable[op],
                workspace_bytes=beside[op],
                in_place=tuple((number[pair.source], number[pair.target]) for pair in pairs),
            )

        between = Op(outputs=tuple(number[s] for s in coming), recomputable=False)
        ops = (*(local(op) for op in forward), between, *(local(op) for op in backward))
        outputs = tuple(sorted(number[s] for s in own if problem.uses[s][-1] >= stop))
        graph = Graph(ops, tensors, tuple(number[s] for s in pinned), outputs, free_order=False)
        crosses = (self.made <= end) & (self.last_forward > end)
        stubborn = [s for op in forward if not board.repeatable[op] for s in board.makes[op]]
        again = {s for op in forward if board.repeatable[op] for s in board.reads[op]}
        again |= {s for op in backward for s in board.reads[op]}
        return Block(
            tuple(forward),
            tuple(backward),
            graph,
            len(forward),
            (*forward, -1, *backward),
            tuple(touched),
            frozenset(self.followed[k] for k in np.flatnonzero(crosses)),
            frozenset(stubborn) & again,
            forward_bytes,
            backward_bytes,
        )

    def _fixed(self, start: int, stop: int, counted: set[int]) -> tuple[int, dict[int, int]]:
        """The bytes beside a block that are in memory all the time, and for each of its ops how many more there are.

        They are the gradients that pass by the block, the storages that the board leaves out, and workspace. In a
        reduced step small storages count as workspace; they add up from layer to layer, so equal layers would differ
        if all of it were the ops' own.
        """
        ops = np.array([op for op in range(start, stop) if self.board.counts[op]], dtype=np.int64)
        if not len(ops):
            return 0, {}
        beside = np.array([s not in counted for s in self.followed], dtype=np.bool_)
        alive = (self.made > self.turn) & beside & (self.made < stop) & (self.last >= start)
        born = np.maximum(self.made[alive], start) - start
        gone = np.minimum(self.last[alive], stop - 1) + 1 - start
        passing = bytes_alive(born, gone, self.size[alive], stop - start)
        level = passing[ops - start] + self.board.base_bytes[ops] + self.workspace[ops]
        grain = max(1, self.problem.plain.peak_bytes // _GRAINS)
        least = int(level.min())
        more = -(-(level - least) // grain) * grain
        return least, dict(zip(ops.tolist(), more.tolist(), strict=True))
