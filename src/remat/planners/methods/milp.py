"""Stage MILP: exact in program order for small graphs, the oracle that other planners are measured against."""

from __future__ import annotations

import time
from typing import Final

from remat.planners.linear.stage import StageModel
from remat.planners.methods.peak_greedy import peak_greedy
from remat.planners.registry import strategy
from remat.planners.search import Search
from remat.planners.view.board import expand
from remat.planners.view.problem import Problem

# Judgements, not measured: the model has O(ops^2) columns.
_MOST_OPS: Final = 400
_MOST_OPS_UNLIMITED: Final = 60
_LIMIT_S: Final = 60.0
"""Ops above which the model is not built: where the caller gives a time limit, and where 60 s are the limit."""


@strategy("milp")
def milp(search: Search) -> None:
    """Solve the stage MILP with HiGHS; memory rows inside a stage are added only where a solution breaks them.

    Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (arXiv:1910.02653).
    Stage t ends with the first run of op t; before it, earlier ops may run again, each once and in program order.
    What a stage keeps for the next one is a variable, and what lives during a recomputation follows from it. Optimal
    where it ends in time, among schedules of this form, views counted with their storages and outputs never taking
    over an input's storage. Where the time ends first, above 400 ops, and above 60 where no time is given, what
    peak-greedy reaches is returned. Complexity: exponential at worst; O(ops^2) variables, fewer where tensors die
    early.
    """
    most_ops, deadline_s = _MOST_OPS, search.deadline_s
    if deadline_s is None:
        most_ops, deadline_s = _MOST_OPS_UNLIMITED, time.monotonic() + _LIMIT_S
    if search.problem.count <= most_ops and not search.expired:
        found = solve_stages(search.problem, search.budget_bytes, deadline_s)
        if found is not None:
            search.offer(found)
    if search.best is None:
        # What the MILP left undone the greedy does, however late it is.
        search.deadline_s = None
        peak_greedy(search)


def solve_stages(problem: Problem, budget_bytes: int, deadline_s: float) -> tuple[int, ...] | None:
    """The optimum of the stage MILP as a schedule; None where there is none, or the time ends first."""
    model = StageModel(problem, budget_bytes)
    if not model.again and not model.kept:
        return problem.graph.plain_schedule if problem.plain.peak_bytes <= budget_bytes else None
    runs = model.optimum(deadline_s)
    return None if runs is None else expand(model.board, runs)
