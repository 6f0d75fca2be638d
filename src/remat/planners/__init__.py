"""Planners: methods that turn a graph and a byte budget into a schedule, one file per method."""

from __future__ import annotations

from remat.planners import auto
from remat.planners.linear.bounds import LowerBound, overhead_lower_bound
from remat.planners.methods import (
    block_chain,
    dtr,
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
from remat.planners.registry import Planner, get_planner, planner_names, register

__all__ = [
    "LowerBound",
    "Planner",
    "auto",
    "block_chain",
    "dtr",
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
    "window_milp",
]
