"""Keep or make again: which values to keep until they are wanted, and which ops to run again for the others.

For each value v a variable y_v keeps it, for each op i a variable r_i runs it again. A value that is wanted is kept or
made again, and so is each value that an op reads when it runs again. The caller adds the limits on bytes: the planner
``keep_milp`` adds one for each sampled step of the backward part, the JAX front end one for the stacks of a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from remat.planners.linear.highs import ModelBuilder, solve
from remat.planners.view.problem import BoolArray


class KeepModel:
    """The MILP as it grows.

    Args:
        keep_cost: for each value, what keeping it costs.
        again_cost: for each op, what running it again costs.
        made_by: for each value, the op that makes it, None where none can.
        may_repeat: for each op, whether it may run again; None means that all may.
    """

    def __init__(
        self,
        keep_cost: Sequence[float],
        again_cost: Sequence[float],
        made_by: Sequence[int | None],
        may_repeat: Sequence[bool] | None = None,
    ) -> None:
        self._made_by = made_by
        self._builder = ModelBuilder()
        self._kept = [self._builder.add_column(cost, is_integer=True) for cost in keep_cost]
        self._again = [
            self._builder.add_column(cost, high=float(may_repeat is None or may_repeat[op]), is_integer=True)
            for op, cost in enumerate(again_cost)
        ]

    def _there(self, value: int, sign: float) -> list[tuple[int, float]]:
        """What makes a value be there: it is kept, or its op runs again."""
        op = self._made_by[value]
        return [(self._kept[value], sign), *([] if op is None else [(self._again[op], sign)])]

    def require(self, value: int) -> None:
        """The value is wanted."""
        self._builder.add_row(self._there(value, 1.0), low=1.0)

    def require_read(self, op: int, value: int) -> None:
        """Where the op runs again, it reads the value."""
        self._builder.add_row([(self._again[op], 1.0), *self._there(value, -1.0)], high=0.0)

    def limit(self, kept: Iterable[tuple[int, float]], again: Iterable[tuple[int, float]], room: float) -> None:
        """The (value, bytes) that are kept and the (op, bytes) that run again share so much room."""
        entries = [(self._kept[value], size) for value, size in kept]
        entries += [(self._again[op], size) for op, size in again]
        self._builder.add_row(entries, high=room)

    def solve(
        self, *, time_limit_s: float, gap: float, most_nodes: int | None = None
    ) -> tuple[BoolArray, BoolArray] | None:
        """For each value whether it is kept, for each op whether it runs again; None where none is found in time."""
        solution = solve(self._builder.build(), time_limit_s=time_limit_s, gap=gap, most_nodes=most_nodes)
        if solution is None:
            return None
        chosen = np.greater(solution.values, 0.5)
        return chosen[: len(self._kept)], chosen[len(self._kept) :]
