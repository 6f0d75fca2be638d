"""Planners: methods that turn a graph and a byte budget into a schedule.

``methods`` holds one strategy a file, ``auto`` runs several of them; importing this package registers them all. What
they are made of stands in folders, each of which uses only those named before it: ``view`` (what a planner sees of a
graph), ``replay`` (from decisions to a schedule), ``walk`` (annealing), ``linear`` (models for HiGHS), ``chain``
(blocks).
"""

from __future__ import annotations

from remat.planners import auto
from remat.planners.linear.bounds import LowerBound, overhead_lower_bound
from remat.planners.methods import (
    block_chain,
    dtr,
    exact_windows,
    gap_lp,
    keep_milp,
    lower_set,
    milp,
    peak_greedy,
    simulated_annealing,
    sqrt_n,
    store_all,
    window_milp,
)
from remat.planners.registry import Planner, get_planner, planner_names, register, strategy

__all__ = [
    "LowerBound",
    "Planner",
    "auto",
    "block_chain",
    "dtr",
    "exact_windows",
    "gap_lp",
    "get_planner",
    "keep_milp",
    "lower_set",
    "milp",
    "overhead_lower_bound",
    "peak_greedy",
    "planner_names",
    "register",
    "simulated_annealing",
    "sqrt_n",
    "store_all",
    "strategy",
    "window_milp",
]
