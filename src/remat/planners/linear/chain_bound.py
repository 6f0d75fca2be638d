"""A lower bound that knows chains: what a recomputation reads must itself be there, or be made again."""

from __future__ import annotations

import math
import time
from typing import Final

from remat.planners.linear.highs import row_multipliers
from remat.planners.linear.model import proven_minimum
from remat.planners.linear.window import WindowModel
from remat.planners.view.problem import Problem

SAMPLES: Final = (1, 4, 16)
"""How many samples to try, one after another: each gives a tighter bound and takes longer."""

_MOST_ENTRIES: Final = 100_000
_NEAR: Final = 0.98
_LIMIT_S: Final = 60.0


def chain_lower_bound_s(
    problem: Problem,
    budget_bytes: int,
    reached_s: float = math.inf,
    time_limit_s: float | None = None,
    *,
    most_samples: int = SAMPLES[-1],
) -> float:
    """Least extra seconds of every schedule within a budget that keeps first runs in program order.

    Args:
        problem: the graph.
        budget_bytes: peak bytes of the step.
        reached_s: extra seconds of a schedule; once the bound is near it, no more samples are tried.
        time_limit_s: for the LPs together; None for no end. Models with more than 100,000 entries are left out.

        most_samples: models with more are left out, too.

    Complexity: LPs with O(reads samples) entries, by interior point.
    """
    deadline_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    best_s = 0.0
    for samples in SAMPLES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or samples > most_samples or best_s >= _NEAR * reached_s:
            break
        model = WindowModel(problem, budget_bytes, samples)
        linear = model.linear
        if not len(linear.cost) or len(linear.values) > _MOST_ENTRIES:
            break
        multipliers = row_multipliers(linear, time_limit_s=min(left_s, _LIMIT_S))
        if multipliers is None:
            break
        best_s = max(best_s, proven_minimum(linear, multipliers) * model.time_unit_s)
    return best_s
