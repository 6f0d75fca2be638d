"""A plan: a schedule with everything that was predicted and proved about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat.core.budget import format_bytes, parse_budget
from remat.core.errors import InfeasibleBudget, PlanMismatch
from remat.core.graph import Graph
from remat.core.schedule import Schedule, keeps_program_order, recomputed_ops
from remat.core.simulator import Timeline, simulate
from remat.core.validator import validate

_LARGEST_SHOWN = 3
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Plan:
    """A schedule for one graph under one budget.

    Attributes:
        schedule: op indices; an op that occurs again is recomputed.
        fingerprint: of the graph that it was made for.
        peak_bytes: predicted peak of the schedule, pinned bytes included.
        baseline_peak_bytes: predicted peak of the plain step.
        time_s: predicted seconds of the schedule.
        baseline_time_s: predicted seconds of the plain step.
        overhead: extra time as a fraction of the plain step's (0.05 is 5 %).
        overhead_lower_bound: proved: no schedule in the meaning below is cheaper than this fraction.
        lower_bound_meaning: what the bound assumes.
        planner: name of the planner.
        budget_bytes: what the peak had to stay within.
        plan_seconds: wall time that planning took.
        traced_peak_bytes: the peak of the traced step, where ``peak_bytes`` is what the compiler says of the program
            made of it; None where the two are one.
    """

    schedule: Schedule
    fingerprint: str
    peak_bytes: int
    baseline_peak_bytes: int
    time_s: float
    baseline_time_s: float
    overhead: float
    overhead_lower_bound: float
    lower_bound_meaning: str
    planner: str
    budget_bytes: int
    plan_seconds: float
    traced_peak_bytes: int | None = None

    @property
    def recomputed(self) -> int:
        """Number of extra runs: how often the schedule runs an op that had run before."""
        return sum(recomputed_ops(self.schedule).values())

    def check_graph(self, graph: Graph) -> None:
        """Make sure that this plan was made for ``graph``; names and times may differ.

        Raises:
            PlanMismatch: if the plan is for another graph.
        """
        if graph.fingerprint != self.fingerprint:
            raise PlanMismatch(
                f"this plan was made for another graph: it covers {len(set(self.schedule))} ops and the fingerprint "
                f"{self.fingerprint}, the graph has {len(graph.ops)} ops and {graph.fingerprint}. The model, the batch "
                "size, a dtype or the framework's version changed; plan again for this graph"
            )

    def save(self, path: str | Path, graph: Graph | None = None) -> None:
        """Write the plan as ``remat.plan`` JSON; a path ending in ``.gz`` is compressed.

        Args:
            path: of the file.
            graph: the graph that it was made for, kept in the same file, so that ``remat report`` needs no other.

        Raises:
            PlanMismatch: if it was made for another graph.
        """
        from remat.core.serialization import save_plan

        save_plan(self, path, graph)

    def to_json(self) -> Mapping[str, Any]:
        """The plan as a JSON-ready mapping in the ``remat.plan`` format."""
        from remat.core.serialization import plan_to_json

        return plan_to_json(self)

    def __str__(self) -> str:
        ops = len(set(self.schedule))
        peak, plain = format_bytes(self.peak_bytes), format_bytes(self.baseline_peak_bytes)
        traced = self.traced_peak_bytes
        share = f" ({self.peak_bytes / self.baseline_peak_bytes:.1%} of plain)" if self.baseline_peak_bytes else ""
        return "\n".join(
            (
                f"remat plan by {self.planner!r}, made in {self.plan_seconds:.2f} s",
                f"  budget         {format_bytes(self.budget_bytes)}",
                f"  predicted peak {peak}{share}, plain {plain}",
                *([f"  before fusion  {format_bytes(traced)}, by the trace"] if traced is not None else []),
                f"  overhead       {self.overhead:.2%} ({self.time_s:.4g} s, plain {self.baseline_time_s:.4g} s)",
                f"  lower bound    {self.overhead_lower_bound:.2%}: {self.lower_bound_meaning}",
                f"  gap            {self.overhead - self.overhead_lower_bound:.2%} of a plain step at most",
                f"  recomputed     {len(recomputed_ops(self.schedule))} of {ops} ops, in {self.recomputed} extra runs",
            )
        )


def plan(
    graph: Graph,
    budget: int | str = "60%",
    planner: str = "auto",
    time_limit_s: float | None = None,
    **options: Any,
) -> Plan:
    """Find the cheapest schedule of a training step whose peak stays within a budget.

    Where the plain step fits, the plan is the plain step. Every other schedule is replayed by the independent
    validator before it is handed out.

    Args:
        graph: the training step.
        budget: peak device bytes of the step, everything counted: an int, ``"4GiB"``, or ``"60%"`` of the plain peak.
        planner: a name from ``remat.planners.planner_names()``.
        time_limit_s: wall seconds that an anytime planner may use.
        options: passed on to the planner.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: if the planner finds nothing within the budget; ``minimum_bytes`` is what it can reach.
        ValueError: if no planner has that name.
    """
    # The planners import the core, so the core can only look them up when it is called.
    from remat.planners import get_planner

    started = time.perf_counter()
    find: Callable[..., Schedule] = get_planner(planner)
    plain = simulate(graph, graph.plain_schedule)
    budget_bytes = parse_budget(budget, plain.peak_bytes)
    schedule = graph.plain_schedule
    if plain.peak_bytes > budget_bytes:
        schedule = tuple(find(graph, budget_bytes, time_limit_s=time_limit_s, **options))
    timeline = _replay_twice(graph, schedule, planner)
    if timeline.peak_bytes > budget_bytes:
        raise _infeasible(graph, schedule, timeline, budget_bytes, planner)

    overhead = _share(timeline.time_s - plain.time_s, plain.time_s)
    time_left_s = None if time_limit_s is None else max(0.0, time_limit_s - (time.perf_counter() - started))
    bound, meaning = _lower_bound(graph, schedule, budget_bytes, overhead, time_left_s)
    return _assemble(graph, schedule, timeline, plain, bound, meaning, planner, budget_bytes, started)


def plan_for_schedule(graph: Graph, schedule: Schedule, *, planner: str, started: float | None = None) -> Plan:
    """The plan around a schedule that was made without a budget; its own peak stands as the budget.

    Args:
        graph: the training step.
        schedule: a legal schedule; it is replayed by the independent validator.
        planner: how it was made, for the report.
        started: ``time.perf_counter()`` when planning began.

    Raises:
        InvalidSchedule: if the schedule breaks a rule.
    """
    timeline = _replay_twice(graph, schedule, planner)
    plain = simulate(graph, graph.plain_schedule)
    meaning = "none was sought, since no budget was given"
    begun = time.perf_counter() if started is None else started
    return _assemble(graph, schedule, timeline, plain, 0.0, meaning, planner, timeline.peak_bytes, begun)


def _assemble(
    graph: Graph,
    schedule: Schedule,
    timeline: Timeline,
    plain: Timeline,
    bound: float,
    meaning: str,
    planner: str,
    budget_bytes: int,
    started: float,
) -> Plan:
    return Plan(
        schedule=schedule,
        fingerprint=graph.fingerprint,
        peak_bytes=timeline.peak_bytes,
        baseline_peak_bytes=plain.peak_bytes,
        time_s=timeline.time_s,
        baseline_time_s=plain.time_s,
        overhead=_share(timeline.time_s - plain.time_s, plain.time_s),
        overhead_lower_bound=bound,
        lower_bound_meaning=meaning,
        planner=planner,
        budget_bytes=budget_bytes,
        plan_seconds=time.perf_counter() - started,
    )


def _replay_twice(graph: Graph, schedule: Schedule, planner: str) -> Timeline:
    validated_peak_bytes = validate(graph, schedule)
    timeline = simulate(graph, schedule)
    if timeline.peak_bytes != validated_peak_bytes:
        raise AssertionError(
            f"internal error: for a schedule of planner {planner!r} the simulator counts {timeline.peak_bytes} bytes "
            f"and the validator {validated_peak_bytes}; please report this with the graph"
        )
    return timeline


def _lower_bound(
    graph: Graph, schedule: Schedule, budget_bytes: int, overhead: float, time_limit_s: float | None
) -> tuple[float, str]:
    """The proven bound as a fraction of the plain step, never above what the plan itself reached."""
    from remat.planners.linear.bounds import overhead_lower_bound

    if overhead == 0.0:
        return 0.0, "reached; no schedule takes less time than the plain step"
    found = overhead_lower_bound(graph, budget_bytes, time_limit_s, reached_s=overhead * graph.time_s)
    bound = _share(found.time_s, graph.time_s)
    if bound - overhead <= _ROUNDING * overhead:
        return min(bound, overhead), found.meaning
    if not keeps_program_order(schedule):
        # The bound is over program order, and this plan went below it by leaving that order.
        return 0.0, "trivial; the plan moves first runs and beats the bound for program order"
    raise AssertionError(
        f"internal error: the lower bound {bound:.9g} ({found.meaning}) is above the overhead {overhead:.9g} of a "
        "valid plan; please report this with the graph"
    )


def _share(extra_s: float, of_s: float) -> float:
    return extra_s / of_s if of_s > 0 else 0.0


def _infeasible(
    graph: Graph, schedule: Schedule, timeline: Timeline, budget_bytes: int, planner: str
) -> InfeasibleBudget:
    binding = _describe_peak(graph, schedule, timeline)
    minimum = timeline.peak_bytes
    return InfeasibleBudget(
        f"no schedule within {_exact(budget_bytes)} was found: the smallest peak that planner {planner!r} reached is "
        f"{_exact(minimum)}. What binds there is {binding}. Ask for at least {minimum} bytes, make the batch smaller, "
        "or try another planner",
        minimum_bytes=minimum,
        budget_bytes=budget_bytes,
        binding_op=binding,
    )


def _describe_peak(graph: Graph, schedule: Schedule, timeline: Timeline) -> str:
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
