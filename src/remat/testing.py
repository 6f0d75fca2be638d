"""Graphs and schedules for tests of planners and front ends, of your own ones too.

``random_graph`` covers what planners trip over: views, ops that must not repeat, workspaces, several outputs, outputs
nobody reads, pinned inputs, ``after`` edges, in-place pairs. ``graphs`` is the same as a Hypothesis strategy, which
shrinks; it needs ``hypothesis`` installed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING

from remat.graph import Graph, Op, Tensor
from remat.schedule import Schedule

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def chain(n: int, *, size_bytes: int = 1, time_s: float = 1.0, free_order: bool = True) -> Graph:
    """A training step over a chain of ``n`` layers: ``n`` forward ops, then ``n`` backward ops.

    Forward op i reads activation i - 1 and makes activation i; activation 0 is the pinned batch. The backward op of
    layer i reads the gradient of activation i (for the last layer the activation itself, as a loss would) and
    activation i - 1, and makes the gradient of activation i - 1, of which the last is the graph's output.

    Args:
        n: number of layers, 0 or more.
        size_bytes: of each activation and each gradient.
        time_s: of each op.
        free_order: whether a plan may move first computations.
    """
    batch = 0
    tensors = [Tensor(size_bytes, "batch")]
    ops: list[Op] = []
    for layer in range(1, n + 1):
        tensors.append(Tensor(size_bytes, f"activation{layer}"))
        ops.append(Op(f"forward{layer}", "Forward", (layer - 1,), (layer,), time_s))
    gradient = n
    for layer in range(n, 0, -1):
        tensors.append(Tensor(size_bytes, f"gradient{layer - 1}"))
        ops.append(Op(f"backward{layer}", "Backward", (gradient, layer - 1), (len(tensors) - 1,), time_s))
        gradient = len(tensors) - 1
    outputs = (gradient,) if n else ()
    return Graph(tuple(ops), tuple(tensors), (batch,), outputs, free_order)


def layered(n_ops: int, seed: int, *, free_order: bool = True) -> Graph:
    """A random layered graph, on which schedulers of the literature are compared.

    The number of layers, their sizes and the edges follow Gagrani et al. 2022, "Neural Topological Ordering for
    Computation Graphs" (arXiv:2207.05899), with one source and one sink, each tensor made by one op. Sizes have
    mean 2000 and quartiles 700, 1500 and 3100; durations are whole seconds from 0 to 1000.

    Args:
        n_ops: number of ops, 2 or more.
        seed: equal seeds give equal graphs.
        free_order: as in ``Graph``.
    """
    rng = random.Random(seed)
    width = rng.uniform(0.25, 0.5)
    count = math.ceil(math.sqrt(n_ops * (1 / width - 1)))
    layers = _layer_sizes(rng, n_ops - 2, count)
    members: list[list[int]] = [[0]]
    for size in layers:
        start = members[-1][-1] + 1
        members.append(list(range(start, start + size)))
    members.append([members[-1][-1] + 1])
    edges: set[tuple[int, int]] = set()
    for upper, lower in pairwise(members):
        edges |= _edges_between(upper, lower)
    # As in the published instances nothing skips to the sink or from the source: they are alone in their layers, where
    # hundreds of edges would meet.
    last = len(members) - 2
    for _ in range(math.ceil(len(edges) * 0.14 / 0.86) if last >= 3 else 0):
        first = rng.randrange(1, last - 1)
        second = rng.randrange(first + 2, last + 1)
        place = rng.randrange(len(members[first]))
        share = (place + 0.5) / len(members[first]) + 0.2 * rng.random()
        target = min(len(members[second]) - 1, int(share * len(members[second])))
        edges.add((members[first][place], members[second][target]))
    reads: list[list[int]] = [[] for _ in range(n_ops)]
    for source, target in sorted(edges):
        reads[target].append(source)
    tensors = tuple(Tensor(_layered_size(rng), f"t{i}") for i in range(n_ops))
    ops = tuple(Op(f"op{i}", "Layered", tuple(reads[i]), (i,), float(rng.randint(0, 1000))) for i in range(n_ops))
    return Graph(ops, tensors, (), (), free_order)


def fan(branches: int, depth: int, *, free_order: bool = True) -> Graph:
    """Chains from one source, one step of each in turn: what evicts by recency recomputes whole chains.

    After the adversary of Kirisame et al. 2021, "Dynamic Tensor Rematerialization" (arXiv:2006.09616). In program order
    every chain's end is alive all the time; one chain after another needs three tensors.

    Args:
        branches: number of chains.
        depth: ops of each chain.
        free_order: as in ``Graph``.
    """
    ops = [Op("source", "Fan", (), (0,), 1.0)]
    ends = [0] * branches
    for level in range(depth):
        for branch in range(branches):
            made = len(ops)
            ops.append(Op(f"branch{branch}.{level}", "Fan", (ends[branch],), (made,), 1.0))
            ends[branch] = made
    return Graph(tuple(ops), tuple(Tensor(1, f"t{i}") for i in range(len(ops))), (), (), free_order)


def residual_blocks(blocks: int, width: int = 3, *, draws: bool = False) -> Graph:
    """A training step of equal blocks with a sum around each, in a fixed order: a graph that repeats itself.

    Args:
        blocks: number of blocks.
        width: ops of each, beside the sum.
        draws: whether every second block draws a mask, which may run once only.
    """
    tensors, ops = [Tensor(0, "batch"), Tensor(10, "stem")], [Op("stem", "Conv", (0,), (1,), 1.0)]
    tape: list[list[int]] = []

    def add(kind: str, inputs: tuple[int, ...], *, size: int = 10, recomputable: bool = True) -> int:
        tensors.append(Tensor(size))
        ops.append(Op(f"{kind}{len(ops)}", kind, inputs, (len(tensors) - 1,), 1.0, recomputable))
        return len(tensors) - 1

    x = 1
    for block in range(blocks):
        inner = [x]
        for _ in range(width):
            inner.append(add("Conv", (inner[-1],), size=20))
        if draws and block % 2:
            mask = add("Draw", (inner[-1],), recomputable=False)
            inner.append(add("Mul", (inner[-1], mask), size=20))
        tape.append(inner)
        x = add("Add", (x, inner[-1]))
    gradient = add("Loss", (x,))
    for inner in reversed(tape):
        inside = gradient
        for value in reversed(inner[:-1]):
            inside = add("ConvGrad", (inside, value), size=20)
        gradient = add("Sum", (gradient, inside))
    return Graph(tuple(ops), tuple(tensors), (0,), (gradient,), free_order=False)


def _layer_sizes(rng: random.Random, n_ops: int, count: int) -> list[int]:
    """Random sizes around the mean that add up to ``n_ops``."""
    mean = n_ops / count
    sizes: list[int] = []
    while (left := n_ops - sum(sizes)) > 0:
        sizes.append(min(left, rng.randint(max(1, math.ceil(0.25 * mean)), max(1, math.floor(1.75 * mean)))))
    return sizes


def _edges_between(upper: Sequence[int], lower: Sequence[int]) -> set[tuple[int, int]]:
    """Edges spread evenly over the larger of two layers, each of its ops tied to neighbours beside each other."""
    larger, smaller = (upper, lower) if len(upper) >= len(lower) else (lower, upper)
    total = math.floor(0.2 * len(upper) * len(lower) + 0.8 * len(larger))
    found = set()
    for place, one in enumerate(larger):
        degree = (place + 1) * total // len(larger) - place * total // len(larger)
        degree = min(len(smaller), max(1, degree))
        middle = (place + 0.5) / len(larger) * len(smaller)
        start = min(len(smaller) - degree, max(0, round(middle - degree / 2)))
        found |= {(one, other) for other in smaller[start : start + degree]}
    return found if larger is upper else {(other, one) for one, other in found}


def _layered_size(rng: random.Random) -> int:
    low, high = rng.choice(((50, 700), (700, 1500), (1500, 3100), (3100, 5350)))
    return rng.randint(low, high)


def random_graph(
    rng: random.Random | int,
    n_ops: int = 8,
    *,
    max_size_bytes: int = 64,
    free_order: bool | None = None,
) -> Graph:
    """A random valid graph with every feature of the memory model in it now and then.

    Args:
        rng: a source of randomness, or a seed; equal seeds give equal graphs.
        n_ops: number of ops, 0 or more.
        max_size_bytes: of a tensor; some have 0.
        free_order: as in ``Graph``; None draws it.
    """
    source = random.Random(rng) if isinstance(rng, int) else rng
    draft = _Draft(source, max_size_bytes)
    inputs = tuple(draft.add_tensor() for _ in range(source.randint(0, 2)))
    draft.ops.extend(draft.next_op(index) for index in range(n_ops))
    outputs = tuple(tensor for tensor in range(len(draft.tensors)) if draft.chance(0.15))
    order = draft.chance(0.5) if free_order is None else free_order
    return Graph(tuple(draft.ops), tuple(draft.tensors), inputs, outputs, order)


@dataclass
class _Draft:
    rng: random.Random
    max_size_bytes: int
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def add_tensor(self, alias_of: int | None = None) -> int:
        size_bytes = 0 if self.chance(0.1) else self.rng.randint(1, self.max_size_bytes)
        self.tensors.append(Tensor(size_bytes, f"t{len(self.tensors)}", alias_of=alias_of))
        return len(self.tensors) - 1

    def next_op(self, index: int) -> Op:
        reads = tuple(self._pick_read() for _ in range(self.rng.randint(0, 3))) if self.tensors else ()
        outputs: list[int] = []
        for _ in range(self.rng.randint(0, 2)):
            # A view of what the op reads, of one of its bases, or of what the same op makes.
            bases = [*(base for tensor in reads for base in self._bases(tensor)), *outputs]
            view = self.rng.choice(bases) if bases and self.chance(0.3) else None
            outputs.append(self.add_tensor(view))
        return Op(
            name=f"op{index}",
            kind="Random",
            inputs=reads,
            outputs=tuple(outputs),
            time_s=float(self.rng.randint(0, 9)),
            recomputable=self.chance(0.8),
            workspace_bytes=self.rng.randint(1, self.max_size_bytes) if self.chance(0.2) else 0,
            after=(self.rng.randrange(index),) if index and self.chance(0.15) else (),
            in_place=tuple((read, made) for read in dict.fromkeys(reads) for made in outputs if self.chance(0.4)),
        )

    def _pick_read(self) -> int:
        # Mostly recent tensors, as in real steps, and now and then one from far back.
        if self.chance(0.3):
            return self.rng.randrange(len(self.tensors))
        return self.rng.randint(max(0, len(self.tensors) - 4), len(self.tensors) - 1)

    def _bases(self, tensor: int) -> list[int]:
        found = [tensor]
        while (base := self.tensors[found[-1]].alias_of) is not None:
            found.append(base)
        return found


def random_schedule(graph: Graph, rng: random.Random | int, *, recompute: float = 0.3) -> Schedule:
    """A random legal schedule, with recomputation wherever it is legal, useful or not.

    Args:
        graph: the training step.
        rng: a source of randomness, or a seed.
        recompute: the chance that an op which ran before runs again at a step, below 1.
    """
    source = random.Random(rng) if isinstance(rng, int) else rng
    schedule: list[int] = []
    done: set[int] = set()
    while len(done) < len(graph.ops):
        repeatable = sorted(op for op in done if graph.ops[op].recomputable)
        if repeatable and source.random() < recompute:
            schedule.append(source.choice(repeatable))
            continue
        op = source.choice(_ready(graph, done)) if graph.free_order else len(done)
        schedule.append(op)
        done.add(op)
    return tuple(schedule)


def _ready(graph: Graph, done: set[int]) -> list[int]:
    return [
        index
        for index, op in enumerate(graph.ops)
        if index not in done
        and done.issuperset(op.after)
        and all(graph.producer[tensor] is None or graph.producer[tensor] in done for tensor in op.inputs)
    ]


def graphs(
    min_ops: int = 0, max_ops: int = 8, *, max_size_bytes: int = 64, free_order: bool | None = None
) -> SearchStrategy[Graph]:
    """A Hypothesis strategy of ``random_graph``; counterexamples shrink."""
    from hypothesis import strategies as st

    return st.builds(
        random_graph,
        st.randoms(use_true_random=False),
        st.integers(min_ops, max_ops),
        max_size_bytes=st.just(max_size_bytes),
        free_order=st.just(free_order),
    )


def graphs_with_schedules(
    min_ops: int = 0, max_ops: int = 8, *, free_order: bool | None = None
) -> SearchStrategy[tuple[Graph, Schedule]]:
    """A Hypothesis strategy of a random graph and a random legal schedule of it."""
    from hypothesis import strategies as st

    def with_schedule(graph: Graph, rng: random.Random) -> tuple[Graph, Schedule]:
        return graph, random_schedule(graph, rng)

    return st.builds(with_schedule, graphs(min_ops, max_ops, free_order=free_order), st.randoms(use_true_random=False))


def exhaustive(graph: Graph, budget_bytes: int) -> Schedule | None:
    """The cheapest of all legal schedules within a budget, by search over every state of memory; None if none fits.

    Order moves are among them where the graph leaves the order free. Dijkstra over pairs of what has run and what is
    in memory: 2^(ops + tensors) states at worst.

    Raises:
        ValueError: for more than nine ops, views, or in-place pairs.
    """
    if len(graph.ops) > 9:
        raise ValueError(f"the graph has {len(graph.ops)} ops; an exhaustive search ends in time for 9 at most")
    if any(t.alias_of is not None for t in graph.tensors) or any(op.in_place for op in graph.ops):
        raise ValueError("the graph has views or in-place pairs, which the exhaustive search does not know")
    pinned = set(graph.inputs)
    reads = [frozenset(t for t in op.inputs if t not in pinned) for op in graph.ops]
    wanted = frozenset(t for t in graph.outputs if t not in pinned)
    everything = frozenset(range(len(graph.ops)))
    start: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    cost = {start: 0.0}
    came: dict[object, tuple[object, int]] = {}
    queue: list[tuple[float, int, tuple[frozenset[int], frozenset[int]]]] = [(0.0, 0, start)]
    count = 0
    while queue:
        time_s, _, state = heappop(queue)
        if time_s > cost[state]:
            continue
        ran, live = state
        if ran == everything and wanted <= live:
            return _path(came, state)
        following: list[tuple[float, tuple[frozenset[int], frozenset[int]], int]] = [
            (time_s, (ran, live - {t}), -1) for t in live
        ]
        for index, op in enumerate(graph.ops):
            first = index not in ran
            legal = not reads[index] - live and (
                (ran.issuperset(op.after) and (graph.free_order or index == len(ran))) if first else op.recomputable
            )
            after = live | frozenset(op.outputs)
            size_bytes = sum(graph.tensors[t].size_bytes for t in after) + graph.pinned_bytes + op.workspace_bytes
            if legal and size_bytes <= budget_bytes:
                following.append((time_s + op.time_s, (ran | {index}, after), index))
        for total_s, state_after, index in following:
            if total_s < cost.get(state_after, math.inf):
                cost[state_after] = total_s
                came[state_after] = (state, index)
                count += 1
                heappush(queue, (total_s, count, state_after))
    return None


def _path(came: dict[object, tuple[object, int]], state: object) -> Schedule:
    runs = []
    while state in came:
        state, op = came[state]
        if op >= 0:
            runs.append(op)
    return tuple(reversed(runs))


def revolve(n: int, slots: int) -> Schedule:
    """The schedule for ``chain(n)`` that keeps at most so many activations beside the batch, with fewest forward runs.

    Griewank and Walther 2000, "Algorithm 799: revolve" (doi:10.1145/347837.347846). Optimal; the number of forward
    runs is ``revolve_runs(n, slots)``.
    """
    fewest = _fewest_forward_runs
    result: list[int] = []

    def backward(layer: int) -> None:
        if layer == n:
            result.append(n - 1)
        result.append(2 * n - layer)

    def reverse(low: int, high: int, left: int) -> None:
        if high - low == 1:
            backward(high)
        elif left == 0:
            for layer in range(high, low, -1):
                result.extend(range(low, layer - 1))
                backward(layer)
        else:
            length = high - low
            ahead = min(range(1, length), key=lambda m: m + fewest(length - m, left - 1) + fewest(m, left))
            result.extend(range(low, low + ahead))
            reverse(low + ahead, high, left - 1)
            reverse(low, low + ahead, left)

    if n:
        reverse(0, n, slots)
    return tuple(result)


def revolve_runs(n: int, slots: int) -> int:
    """The fewest forward runs that reverse a chain of ``n`` steps: the closed form of Griewank and Walther.

    ``r n - C(s + r, s + 1)`` with s = slots + 1 (the batch is one) and the least r for which C(s + r, s) >= n; and one
    for the last layer, whose activation stands for the loss.
    """
    if n == 0:
        return 0
    s = slots + 1
    r = next(r for r in range(n + 1) if math.comb(s + r, s) >= n)
    return r * n - math.comb(s + r, s + 1) + 1


@cache
def _fewest_forward_runs(length: int, slots: int) -> int:
    if length == 1:
        return 0
    if slots == 0:
        return length * (length - 1) // 2
    return min(
        m + _fewest_forward_runs(length - m, slots - 1) + _fewest_forward_runs(m, slots) for m in range(1, length)
    )
