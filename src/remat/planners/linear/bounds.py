"""A proven lower bound on what a budget costs, so that a plan can say how far from the best it may be."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

from remat.core.graph import Graph
from remat.planners.linear.binding_steps import binding_steps
from remat.planners.linear.gap import build_gap_model, solve_gap_model
from remat.planners.linear.highs import interior_point, proven_minimum
from remat.planners.linear.window import WindowModel
from remat.planners.view.problem import FloatArray, Problem

SAMPLES: Final = (1, 4, 16)
"""How many samples to try, one after another: each gives a tighter bound and takes longer."""

# Judgements, not measured. All of them only decide how good the bound is; it holds in any case.
_MOST_ENTRIES: Final = 100_000
"""Of a model: a larger one would take longer than planning does."""
_MOST_ENTRIES_OF_FIRST: Final = 1_000_000
"""Of the model with one sample, which has one window. With 300,000, of a step of 100,000 ops, it takes 2 s, and saves
all methods behind the first that comes near."""
_NEAR: Final = 0.98
"""Of what a schedule costs: a bound so near is good enough."""
_FAR: Final = 0.015
"""Of the plain step: where the bound is so much below a schedule, the samples are chosen anew. A judgement; lower, and
plans that are near enough take seconds longer."""
_CHOICES: Final = 2
"""How often they are chosen. On the graphs of ``benchmarks`` two times more bring .2 points at most, for 1 to 4 s."""
_FIRST_CHOICE: Final = SAMPLES[1]
"""The samples of the model whose solution the first choice rests on: a small one, since the model of the chosen samples
has a window between every two of them."""
_MOST_ENTRIES_OF_CHOSEN: Final = 150_000
"""Of a model of chosen samples. A ResNet50 at a quarter of its peak has 87,000 and 136,000: they take 9 s, and prove .8
points more than 16 samples do in 2 s. EfficientNetB0 at a fifth has 36,000, which prove 1.1 points in 2 s."""
_GAINED: Final = 1e-3
"""Of the plain step: where chosen samples prove so much more than four do, those of ``SAMPLES`` are not tried. For
EfficientNetB0 at a fifth of its peak, 16 took 5 s, more than all others together, and proved nothing."""
_LIMIT_S: Final = 60.0
"""For both bounds together, where the caller gives no limit."""


@dataclass(frozen=True)
class LowerBound:
    """The least extra time of any schedule within a budget.

    Attributes:
        time_s: seconds beyond the plain step; infinite where no schedule can fit.
        meaning: what the bound rests on.
    """

    time_s: float
    meaning: str


def overhead_lower_bound(
    graph: Graph,
    budget_bytes: int,
    time_limit_s: float | None = None,
    reached_s: float = math.inf,
    *,
    most_samples: int = SAMPLES[-1],
) -> LowerBound:
    """A lower bound on the extra seconds of every schedule within a budget: the better of two LPs'.

    The *gap LP*: where a storage lies idle between two uses a and b in program order, either it is alive at
    every first run between them, or the op that makes it runs again after a and up to b. The gaps of
    one storage do not overlap, so each dropped gap has a run of its own. Exact where recomputed ops read
    pinned tensors only; loose where a recomputation pulls a chain of others.

    The *chain LP* (:mod:`remat.planners.linear.bounds`) knows that what a recomputation reads must be there,
    too, but looks at few steps.

    Args:
        graph: the training step.
        budget_bytes: peak bytes of the step.
        time_limit_s: seconds for both, 60 if None; when they run out the bound is what is proved by then, 0 at first.
        reached_s: extra seconds of a schedule; a bound near it is not made better.
        most_samples: of the chain LP; it is left out with more of them.
    """
    deadline_s = time.monotonic() + (_LIMIT_S if time_limit_s is None else time_limit_s)
    problem = Problem.of(graph)
    order = (
        "for schedules that keep first runs in program order; this graph allows others, which may cost less"
        if graph.free_order
        else "for every legal schedule"
    )
    if problem.plain.peak_bytes <= budget_bytes:
        return LowerBound(0.0, "exact: the plain schedule fits the budget")
    model = build_gap_model(problem, budget_bytes)
    if (model.capacity < 0).any():
        return LowerBound(math.inf, f"some step alone exceeds the budget; holds {order}")
    solution = solve_gap_model(model, time_limit_s=deadline_s - time.monotonic())
    gap_s = 0.0 if solution is None else solution.bound_s
    chain_s = 0.0
    if gap_s < reached_s:
        left_s = deadline_s - time.monotonic()
        chain_s = chain_lower_bound_s(problem, budget_bytes, reached_s, left_s, most_samples=most_samples)
    if chain_s > gap_s:
        return LowerBound(chain_s, f"chain LP, proven {order}")
    if solution is None:
        return LowerBound(0.0, "trivial: the gap LP did not finish in time")
    return LowerBound(gap_s, f"gap LP, proven {order}")


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
        time_limit_s: for the LPs together; None for no end. Models with more than 100,000 entries are left out, those
            of one sample with more than a million.
        most_samples: models with more are left out, too. With all of them, a bound of four samples that is far below
            ``reached_s`` is made better with samples where its own solution needs too much
            (:mod:`remat.planners.linear.binding_steps`), and more samples are tried where that brought nothing.

    Complexity: LPs with O(reads samples) entries, O(reads samples^2) where samples are chosen, by interior point.
    """
    deadline_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    plain_s = problem.graph.time_s
    best_s = 0.0
    for samples in SAMPLES:
        if samples > most_samples or best_s >= _NEAR * reached_s:
            break
        model = WindowModel(problem, budget_bytes, samples)
        solved = _solved(model, deadline_s, _MOST_ENTRIES_OF_FIRST if samples == SAMPLES[0] else _MOST_ENTRIES)
        if solved is None:
            break
        best_s = max(best_s, solved.bound_s)
        if samples == _FIRST_CHOICE and most_samples >= SAMPLES[-1]:
            before_s, enough_s = best_s, reached_s - _FAR * plain_s
            best_s = _with_chosen_samples(model, solved, best_s, enough_s, deadline_s)
            if best_s > before_s + _GAINED * plain_s:
                break
    return best_s


def _with_chosen_samples(
    model: WindowModel, solved: _Solved, best_s: float, enough_s: float, deadline_s: float
) -> float:
    """The best bound of models whose samples are chosen by the solution of the model before; at least ``best_s``."""
    chosen: tuple[int, ...] = ()
    for _ in range(_CHOICES):
        before, chosen = chosen, binding_steps(model, solved.values, solved.multipliers)
        if best_s >= enough_s or chosen in ((), before):
            break
        model = WindowModel(model.problem, model.budget_bytes, len(chosen), chosen=chosen, follows_gradients=True)
        found = _solved(model, deadline_s, _MOST_ENTRIES_OF_CHOSEN)
        if found is None:
            break
        best_s, solved = max(best_s, found.bound_s), found
    return best_s


@dataclass(frozen=True, eq=False)
class _Solved:
    """What a model's LP proves, with the values of its columns and the multipliers of its rows."""

    bound_s: float
    values: FloatArray
    multipliers: FloatArray


def _solved(model: WindowModel, deadline_s: float, most_entries: int = _MOST_ENTRIES) -> _Solved | None:
    """The solution of a model; None where it is empty or too large, or the time ends first."""
    linear = model.linear
    left_s = min(_LIMIT_S, deadline_s - time.monotonic())
    if left_s <= 0 or not len(linear.cost) or len(linear.values) > most_entries:
        return None
    found = interior_point(linear, time_limit_s=left_s)
    if found is None:
        return None
    values, multipliers = found
    return _Solved(proven_minimum(linear, multipliers) * model.time_unit_s, values, multipliers)
