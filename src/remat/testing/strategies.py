"""Hypothesis strategies of random graphs and schedules; they need ``hypothesis`` installed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from remat.core.graph import Graph
from remat.core.schedule import Schedule
from remat.testing.random_graphs import random_graph, random_schedule

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


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
