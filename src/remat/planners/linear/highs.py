"""Linear models as sparse arrays: how they are written down, solved by HiGHS, and what their multipliers prove.

No modelling layer stands between: a planner's models are built in milliseconds and solved thousands of times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import highspy
import numpy as np

from remat.planners.view.problem import FloatArray, IntArray

_ROUNDING: Final = float(np.finfo(np.float64).eps)
"""The relative error of one operation in 64-bit floating point."""

_FEW_COLUMNS: Final = 1000
"""Up to so many, HiGHS looks for a first solution without its feasibility jump, which takes 4 ms and then half of the
time of a model of 30 to 110 columns. The menus of four scanned models of JAX's zoo, 114 models, came out at the same
cost (.09 % more in one) in .75 s in place of 1.29, and the quick plans of twelve of its steps were the same."""


@dataclass(frozen=True, eq=False)
class LinearModel:
    """Minimise ``cost @ x`` subject to ``row_low <= A x <= row_high`` and ``low <= x <= high``.

    A is given as triplets, of which each (row, column) pair stands once. ``is_integer`` marks the columns
    that are whole numbers; None makes the model an LP.
    """

    cost: FloatArray
    low: FloatArray
    high: FloatArray
    row_low: FloatArray
    row_high: FloatArray
    rows: IntArray
    columns: IntArray
    values: FloatArray
    is_integer: IntArray | None = None


@dataclass(eq=False)
class ModelBuilder:
    """A linear model as it grows, column by column and row by row. Columns begin at 0."""

    cost: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    is_integer: list[int] = field(default_factory=list)
    row_low: list[float] = field(default_factory=list)
    row_high: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add_column(self, cost: float = 0.0, *, high: float = 1.0, is_integer: bool = False) -> int:
        """A new column from 0 to ``high``; its number."""
        self.cost.append(cost)
        self.high.append(high)
        self.is_integer.append(int(is_integer))
        return len(self.cost) - 1

    def add_row(self, entries: Iterable[tuple[int, float]], low: float = -np.inf, high: float = np.inf) -> None:
        """A new row of (column, value) pairs; values of one column are added up."""
        merged: dict[int, float] = {}
        for column, value in entries:
            merged[column] = merged.get(column, 0.0) + value
        number = len(self.row_low)
        for column, value in merged.items():
            self.rows.append(number)
            self.columns.append(column)
            self.values.append(value)
        self.row_low.append(low)
        self.row_high.append(high)

    def build(self) -> LinearModel:
        """The model as arrays; an LP where no column is a whole number."""
        return LinearModel(
            cost=np.array(self.cost),
            low=np.zeros(len(self.cost)),
            high=np.array(self.high),
            row_low=np.array(self.row_low),
            row_high=np.array(self.row_high),
            rows=np.array(self.rows, dtype=np.int64),
            columns=np.array(self.columns, dtype=np.int64),
            values=np.array(self.values, dtype=np.float64),
            is_integer=np.array(self.is_integer, dtype=np.int64) if any(self.is_integer) else None,
        )


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
    if time_limit_s <= 0:
        return None
    solver = _solver(model, time_limit_s)
    solver.setOptionValue("mip_rel_gap", gap)
    if len(model.cost) <= _FEW_COLUMNS:
        solver.setOptionValue("mip_heuristic_run_feasibility_jump", False)
    if most_nodes is not None:
        solver.setOptionValue("mip_max_nodes", most_nodes)
    solver.run()
    solution = solver.getSolution()
    if not solution.value_valid or solver.getInfo().primal_solution_status != 2:
        return None
    duals = np.array(solution.col_dual) if model.is_integer is None and solution.dual_valid else None
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Solution(np.array(solution.col_value), duals, optimal)


def interior_point(model: LinearModel, *, time_limit_s: float) -> tuple[FloatArray, FloatArray] | None:
    """An LP's column values and what its rows are worth, neither of them exact; None where the time ends first."""
    if time_limit_s <= 0:
        return None
    solver = _solver(model, time_limit_s)
    solver.setOptionValue("solver", "ipm")
    solver.setOptionValue("run_crossover", "off")
    solver.run()
    solution = solver.getSolution()
    return (np.array(solution.col_value), np.array(solution.row_dual)) if solution.dual_valid else None


def row_multipliers(model: LinearModel, *, time_limit_s: float) -> FloatArray | None:
    """What an LP's rows are worth, see :func:`interior_point`."""
    found = interior_point(model, time_limit_s=time_limit_s)
    return None if found is None else found[1]


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
    solver.setOptionValue("time_limit", time_limit_s)
    solver.passModel(lp)
    return solver


def proven_minimum(model: LinearModel, multipliers: FloatArray) -> float:
    """A value that the minimum of an LP is not below, whatever the multipliers are.

    Weak duality: for any multipliers y of the right sign ``cost @ x >= y @ b + (cost - A' y) @ x``, and the last term
    is least where each column stands at one of its bounds. So a solver's tolerance, or its early end, makes the value
    smaller but not wrong. What rounding in the sums below can add is taken off.

    Args:
        model: an LP with finite column bounds.
        multipliers: one per row; the part of a wrong sign, which only an infinite side allows for, is left out.
    """
    low = np.where(np.isfinite(model.row_low), np.maximum(multipliers, 0.0), 0.0)
    high = np.where(np.isfinite(model.row_high), np.minimum(multipliers, 0.0), 0.0)
    y = low + high
    sides = low * np.where(low > 0, model.row_low, 0.0) + high * np.where(high < 0, model.row_high, 0.0)
    count = len(model.cost)
    terms = model.values * y[model.rows]
    reduced = model.cost - np.bincount(model.columns, terms, minlength=count)
    ends = np.minimum(reduced * model.low, reduced * model.high)
    # |fl(sum) - sum| <= (terms - 1) eps sum |terms|; twice that also covers the products.
    reach = np.maximum(np.abs(model.low), np.abs(model.high))
    size = np.abs(model.cost) + np.bincount(model.columns, np.abs(terms), minlength=count)
    total = float(np.abs(sides).sum() + (size * reach).sum())
    slack = 2 * _ROUNDING * (len(terms) + len(sides) + 2 * count) * total
    return float(sides.sum() + ends.sum()) - slack
