"""Finds a schedule within a budget. How far it may be from the best is another question: see ``prove``."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from remat.core.budget import format_bytes, parse_budget
from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.planners.registry import get_planner

_LARGEST_SHOWN: Final = 3
"""Tensors in an error message; a judgement: more are rarely what binds, and one line must hold them."""


def find(
    graph: Graph,
    budget: int | str = "60%",
    planner: str = "auto",
    time_limit_s: float | None = None,
    **options: Any,
) -> Plan:
    """Find the cheapest schedule whose peak stays within a budget, and prove nothing about it.

    Where the plain step fits, the plan is the plain step. Every other schedule is replayed by the independent
    validator before it is handed out.

    Args:
        graph: the training step.
        budget: peak device bytes of the step, everything counted: an int, ``"4GiB"``, or ``"60%"`` of the plain peak.
        planner: a name from ``remat.planners.planner_names()``.
        time_limit_s: wall seconds that an anytime planner may use; 0 leaves what it has without searching.
        options: passed on to the planner.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: if the planner finds nothing within the budget; ``minimum_bytes`` is what it can reach.
        ValueError: if no planner has that name.
    """
    search: Any = get_planner(planner)

    def searched(budget_bytes: int) -> Schedule:
        return tuple(search(graph, budget_bytes, time_limit_s=time_limit_s, **options))

    return _found(graph, budget, planner, searched)


def find_again(
    graph: Graph,
    budget: int | str,
    planner: str = "auto",
    time_limit_s: float | None = None,
    **options: Any,
) -> Plan:
    """The plan of :func:`find`; what a search without a time limit has found for an equal step is remembered.

    For a budget that is planned round after round: after a refusal, the smallest budget that it names is asked for, and
    most of its rounds are those that the refusal has seen.

    Args:
        graph: as in ``find``.
        budget: likewise.
        planner: likewise.
        time_limit_s: likewise; with one nothing is remembered, since the next search may find more.
        options: likewise.

    Raises:
        InvalidBudget, InfeasibleBudget, ValueError: likewise.
    """
    if time_limit_s is not None:
        return find(graph, budget, planner, time_limit_s, **options)
    search: Any = get_planner(planner)
    times = hash(tuple(op.time_s for op in graph.ops))
    step = (
        graph.fingerprint,
        graph.turning_point,
        times,
        planner,
        tuple(sorted((name, repr(value)) for name, value in options.items())),
    )

    def searched(budget_bytes: int) -> Schedule:
        key = (*step, budget_bytes)
        if key not in _schedules:
            _schedules[key] = array("L", search(graph, budget_bytes, time_limit_s=None, **options))
        _schedules.move_to_end(key)
        while len(_schedules) > _MOST_SCHEDULES:
            _schedules.popitem(last=False)
        return tuple(_schedules[key])

    return _found(graph, budget, planner, searched)


_schedules: OrderedDict[tuple[Any, ...], array[int]] = OrderedDict()

_MOST_SCHEDULES: Final = 64
"""A judgement: some ten for each budget. A schedule of 10,000 ops takes 80 KB so."""


def _found(graph: Graph, budget: int | str, planner: str, searched: Callable[[int], Schedule]) -> Plan:
    started = time.perf_counter()
    plain_peak_bytes = simulate(graph, graph.plain_schedule).peak_bytes
    budget_bytes = parse_budget(budget, plain_peak_bytes)
    schedule = graph.plain_schedule if plain_peak_bytes <= budget_bytes else searched(budget_bytes)
    found = plan_for_schedule(graph, schedule, planner=planner, budget_bytes=budget_bytes, started=started)
    if found.peak_bytes > budget_bytes:
        raise _infeasible(graph, found)
    return found


def _infeasible(graph: Graph, found: Plan) -> InfeasibleBudget:
    binding = _describe_peak(graph, found.schedule)
    minimum = found.peak_bytes
    return InfeasibleBudget(
        f"no schedule within {_exact(found.budget_bytes)} was found: the smallest peak that planner "
        f"{found.planner!r} reached is {_exact(minimum)}. What binds there is {binding}. Ask for at least {minimum} "
        "bytes, make the batch smaller, or try another planner",
        minimum_bytes=minimum,
        budget_bytes=found.budget_bytes,
        binding_op=binding,
    )


def _describe_peak(graph: Graph, schedule: Schedule) -> str:
    timeline = simulate(graph, schedule)
    pinned = f"{format_bytes(graph.pinned_bytes)} of inputs resident for the whole step"
    if timeline.peak_step is None:
        return pinned
    op = schedule[timeline.peak_step]
    parts = [_describe_tensor(graph, tensor) for tensor in timeline.live_at_peak[:_LARGEST_SHOWN]]
    if workspace := graph.ops[op].workspace_bytes:
        parts.append(f"{format_bytes(workspace)} of workspace")
    if graph.pinned_bytes:
        parts.append(pinned)
    return graph.describe_op(op) + (f", with {'; '.join(parts)}" if parts else "")


def _describe_tensor(graph: Graph, tensor: int) -> str:
    of = graph.tensors[tensor]
    shape = "unknown shape" if of.shape is None else f"shape {of.shape}"
    return f"tensor {tensor} {of.name!r} ({format_bytes(of.size_bytes)}, {shape}{f', {of.dtype}' if of.dtype else ''})"


def _exact(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({format_bytes(size_bytes)})"
