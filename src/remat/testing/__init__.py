"""Graphs and schedules for tests of planners and front ends, of your own ones too.

``random_graph`` covers what planners trip over: views, ops that must not repeat, workspaces, several outputs, outputs
nobody reads, pinned inputs, ``after`` edges, in-place pairs. ``graphs`` is the same as a Hypothesis strategy, which
shrinks; it needs ``hypothesis`` installed.
"""

from __future__ import annotations

from remat.testing.layered_graphs import layered
from remat.testing.random_graphs import random_graph, random_schedule
from remat.testing.references import exhaustive, revolve, revolve_runs
from remat.testing.regular_graphs import chain, fan, residual_blocks
from remat.testing.strategies import graphs, graphs_with_schedules

__all__ = [
    "chain",
    "exhaustive",
    "fan",
    "graphs",
    "graphs_with_schedules",
    "layered",
    "random_graph",
    "random_schedule",
    "residual_blocks",
    "revolve",
    "revolve_runs",
]
