"""Linear models as sparse arrays: how they are written down, and what their multipliers prove."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from remat.planners.view.problem import FloatArray, IntArray

_ROUNDING: Final = float(np.finfo(np.float64).eps)


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
    """A linear model as it grows, column by column and row by row. Every column lies between 0 and 1."""

    cost: list[float] = field(default_factory=list)
    is_integer: list[int] = field(default_factory=list)
    row_low: list[float] = field(default_factory=list)
    row_high: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add_column(self, cost: float = 0.0, *, is_integer: bool = False) -> int:
        """A new column; its number."""
        self.cost.append(cost)
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
            high=np.ones(len(self.cost)),
            row_low=np.array(self.row_low),
            row_high=np.array(self.row_high),
            rows=np.array(self.rows, dtype=np.int64),
            columns=np.array(self.columns, dtype=np.int64),
            values=np.array(self.values, dtype=np.float64),
            is_integer=np.array(self.is_integer, dtype=np.int64) if any(self.is_integer) else None,
        )


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
