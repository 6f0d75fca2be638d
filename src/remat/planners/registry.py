"""The registry of planners: the one place that maps a name to a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from remat.core.graph import Graph


class Planner(Protocol):
    """What every planner is: a function from a graph and a budget to a schedule.

    A planner returns its cheapest schedule whose peak fits ``budget_bytes``. Where it finds none it
    returns the schedule with the smallest peak that it can reach for *any* budget, so that planning
    again with that peak as the budget succeeds.
    """

    def __call__(self, graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
        """Return a legal schedule for ``graph``; ``time_limit_s`` is a wish in seconds, None the planner's own."""
        ...


_PLANNERS: dict[str, Planner] = {}


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
