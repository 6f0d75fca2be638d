"""Random layered graphs, on which schedulers of the literature are compared."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

from remat.core.graph import Graph, Op, Tensor


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
