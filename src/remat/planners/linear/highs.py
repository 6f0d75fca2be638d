"""A thin way to hand sparse arrays to HiGHS; no modelling layer stands between."""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from remat.planners.linear.model import LinearModel
from remat.planners.view.problem import FloatArray


@dataclass(frozen=True, eq=False)
class Solution:
    """Column values, reduced costs where the model was an LP that was solved to the end, and whether it was."""

    values: FloatArray
    reduced_costs: FloatArray | None
    optimal: bool


def solve(
    model: LinearModel, *, time_limit_s: float, gap: float = 0.0, most_nodes: int | None = None
) -> Solution | None:
    """The solution that HiGHS finds within the limits, or None if it finds none. One thread, fixed seed."""
    solver = _solver(model, time_limit_s)
    solver.setOptionValue("mip_rel_gap", gap)
    if most_nodes is not None:
        solver.setOptionValue("mip_max_nodes", most_nodes)
    solver.run()
    solution = solver.getSolution()
    if not solution.value_valid or solver.getInfo().primal_solution_status != 2:
        return None
    duals = np.array(solution.col_dual) if model.is_integer is None and solution.dual_valid else None
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Solution(np.array(solution.col_value), duals, optimal)


def row_multipliers(model: LinearModel, *, time_limit_s: float) -> FloatArray | None:
    """What an LP's rows are worth, by interior point and therefore not exactly; None where the time ends first."""
    solver = _solver(model, time_limit_s)
    solver.setOptionValue("solver", "ipm")
    solver.setOptionValue("run_crossover", "off")
    solver.run()
    solution = solver.getSolution()
    return np.array(solution.row_dual) if solution.dual_valid else None


def _solver(model: LinearModel, time_limit_s: float) -> highspy.Highs:
    order = np.lexsort((model.rows, model.columns))
    lp = highspy.HighsLp()
    lp.num_col_ = len(model.cost)
    lp.num_row_ = len(model.row_low)
    lp.col_cost_ = model.cost
    lp.col_lower_ = model.low
    lp.col_upper_ = model.high
    lp.row_lower_ = model.row_low
    lp.row_upper_ = model.row_high
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    starts = np.zeros(len(model.cost) + 1, dtype=np.int64)
    np.cumsum(np.bincount(model.columns, minlength=len(model.cost)), out=starts[1:])
    lp.a_matrix_.start_ = starts.astype(np.int32)
    lp.a_matrix_.index_ = model.rows[order].astype(np.int32)
    lp.a_matrix_.value_ = model.values[order]
    if model.is_integer is not None:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[int(flag)] for flag in model.is_integer]
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("time_limit", max(time_limit_s, 0.01))
    solver.passModel(lp)
    return solver
