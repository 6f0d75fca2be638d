"""Stage MILP: exact in program order for small graphs, the oracle that other planners are measured against."""

from __future__ import annotations

import time
from typing import Final

from remat.core.graph import Graph
from remat.planners.linear.stage import StageModel
from remat.planners.methods.peak_greedy import drop_greedily
from remat.planners.registry import register
from remat.planners.search import Search, smallest_peak_schedules
from remat.planners.view.problem import Problem
from remat.planners.walk.board import expand

_MOST_OPS: Final = 400
_MOST_OPS_UNLIMITED: Final = 60
_ROUNDS: Final = 60
_LIMIT_S: Final = 60.0


@register("milp")
def milp(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    """Solve the stage MILP with HiGHS; memory rows inside a stage are added only where a solution breaks them.

    Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (arXiv:1910.02653).
    Stage t ends with the first run of op t; before it, earlier ops may run again, each once and in program order.
    What a stage keeps for the next one is a variable, and what lives during a recomputation follows from it. Optimal
    where it ends in time, among schedules of this form, views counted with their storages and outputs never taking
    over an input's storage. Where the time ends first, above 400 ops, and above 60 where no time is given, what
    peak-greedy reaches is returned. Complexity: exponential at worst; O(ops^2) variables, fewer where tensors die
    early.
    """
    deadline_s = time.monotonic() + (_LIMIT_S if time_limit_s is None else time_limit_s)
    search = Search(Problem.of(graph), budget_bytes)
    search.offer(graph.plain_schedule)
    most_ops = _MOST_OPS_UNLIMITED if time_limit_s is None else _MOST_OPS
    if search.best is None and budget_bytes >= search.problem.largest_step_bytes:
        found = solve_stages(search.problem, budget_bytes, deadline_s) if len(graph.ops) <= most_ops else None
        if found is not None:
            search.offer(found)
        if search.best is None:
            drop_greedily(search)
    return search.result(smallest_peak_schedules(search.problem) if search.best is None else ())


def solve_stages(problem: Problem, budget_bytes: int, deadline_s: float) -> tuple[int, ...] | None:
    """The optimum of the stage MILP as a schedule; None where there is none, or the time ends first."""
    model = StageModel(problem, budget_bytes)
    if not model.again and not model.kept:
        return problem.graph.plain_schedule if problem.plain.peak_bytes <= budget_bytes else None
    runs = solve_rows(model, deadline_s)
    return None if runs is None else expand(model.board, runs)


def solve_rows(model: StageModel, deadline_s: float, most_nodes: int | None = None) -> list[int] | None:
    """The runs of a stage model's optimum, the memory rows inside stages added as they are broken; None as above."""
    for _ in range(_ROUNDS):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        values = model.solve(left_s, most_nodes)
        if values is None:
            return None
        if not model.add_broken_rows(values):
            return model.order(values)
    return None
