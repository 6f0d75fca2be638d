"""The registry of planners: the one place that maps a name to a method, and makes a planner of a strategy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from remat.core.collecting import collecting_rarely
from remat.core.graph import Graph
from remat.planners.search import Search
from remat.planners.smallest_peak import is_asked_in_part, smallest_peak_schedules
from remat.planners.view.problem import Problem


class Planner(Protocol):
    """What every planner is: a function from a graph and a budget to a schedule.

    A planner returns its cheapest schedule whose peak fits ``budget_bytes``. Where it finds none it
    returns the schedule with the smallest peak that it can reach for *any* budget, so that planning
    again with that peak as the budget succeeds.
    """

    def __call__(self, graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
        """Return a legal schedule for ``graph``.

        Args:
            graph: the training step.
            budget_bytes: what its peak should stay within.
            time_limit_s: wall seconds to search in, which the answer may exceed a little; None leaves the time to the
                planner. With 0 it does not search, and returns the best of what it has: the plain step where that
                fits, else what its smallest peak comes to.
        """
        ...


Strategy = Callable[[Search], None]
"""A method: offers schedules to a search, and begins nothing new once the search has expired."""

_PLANNERS: dict[str, Planner] = {}
_STRATEGIES: dict[str, Strategy] = {}

_FOR_THE_SMALLEST_PEAK: Final = ("peak_greedy", "dtr", "keep_milp", "gap_lp", "simulated_annealing")
"""The strategies that are asked for the smallest peak of a very small graph, the quickest first."""
_FOR_THE_SMALLEST_PEAK_IN_PART: Final = ("peak_greedy", "simulated_annealing")
"""The same where they are asked only until a peak is small enough. On four steps of 135 to 187 ops the others found
nothing at any budget, and took a third of the time."""
_QUICKEST: Final = ("peak_greedy", "window_milp", "dtr")
"""What is asked then for slightly smaller peaks: each takes some .07 s for a step of 100 ops."""


def register(name: str) -> Callable[[Planner], Planner]:
    """Make a planner known under ``name``; used as a decorator.

    Raises:
        ValueError: if the name is taken.
    """

    def add(planner: Planner) -> Planner:
        if name in _PLANNERS:
            raise ValueError(f"a planner named {name!r} is registered already; choose another name")
        _PLANNERS[name] = planner
        return planner

    return add


def strategy(
    name: str, *, default_limit_s: float | None = None, has_fallbacks: bool = False
) -> Callable[[Strategy], Strategy]:
    """Make a planner of a strategy and register it under ``name``; used as a decorator.

    The planner offers the plain step first and runs the strategy where that does not fit. Where the strategy finds
    nothing either, the planner answers with the smallest peak that is known (:mod:`remat.planners.smallest_peak`). Its
    description is the strategy's docstring.

    Args:
        name: of the planner.
        default_limit_s: seconds to search in where the caller names none; None for a strategy whose work is bounded.
        has_fallbacks: for a strategy that answers with a smallest peak of its own. It adds schedules that do not depend
            on the budget to ``Search.fallbacks``, and is run even under a budget below the largest op.

    Raises:
        ValueError: if the name is taken.
    """

    def add(method: Strategy) -> Strategy:
        @collecting_rarely()
        def planner(
            graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None, thorough: bool = True
        ) -> tuple[int, ...]:
            limit_s = default_limit_s if time_limit_s is None else time_limit_s
            problem = Problem.of(graph)
            deadline_s = None if limit_s is None else time.monotonic() + limit_s
            search = Search(problem, budget_bytes, deadline_s, thorough=thorough)
            fits = search.offer(graph.plain_schedule) <= budget_bytes
            if not fits and (has_fallbacks or budget_bytes >= problem.largest_step_bytes):
                method(search)
            if search.best is not None or has_fallbacks:
                return search.result(search.fallbacks)
            names = _FOR_THE_SMALLEST_PEAK_IN_PART if is_asked_in_part(problem) else _FOR_THE_SMALLEST_PEAK
            asked, quickest = ([_STRATEGIES[one] for one in group] for group in (names, _QUICKEST))
            return search.result(smallest_peak_schedules(problem, asked, budget_bytes, quickest))

        planner.__name__ = planner.__qualname__ = name
        planner.__doc__ = method.__doc__
        register(name)(planner)
        _STRATEGIES[name] = method
        return method

    return add


def get_planner(name: str) -> Planner:
    """The planner registered under ``name``.

    Raises:
        ValueError: if there is none; the message lists the names.
    """
    try:
        return _PLANNERS[name]
    except KeyError:
        raise ValueError(f"there is no planner {name!r}; choose one of {', '.join(planner_names())}") from None


def planner_names() -> tuple[str, ...]:
    """The names of all planners, sorted."""
    return tuple(sorted(_PLANNERS))
