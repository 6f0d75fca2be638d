"""A plan: a schedule with everything that was predicted and proved about it.

How a plan is found stands in ``remat.planning.find``, how good it is proved to be in ``remat.planning.prove``. Its file
format is ``remat.plan`` version 1: JSON, plain or gzipped, with the graph beside the plan if the writer wishes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from remat.core.budget import format_bytes
from remat.core.errors import PlanMismatch
from remat.core.files import JsonReader, read_json, write_json
from remat.core.graph import Graph, graph_from
from remat.core.schedule import Schedule, recomputed_ops
from remat.core.simulator import Timeline, simulate
from remat.core.validator import validate

PLAN_FORMAT: Final = "remat.plan"
PLAN_VERSION: Final = 1
"""The newest version of the format, which is also the only one so far."""

ONE_BY_ONE: Final = "every op waits for the end of the one before it"
"""What ``Plan.one_by_one`` says, for the report."""

NOT_PROVED: Final = "not proved"
"""What a plan's bound means before ``remat.planning.prove`` has looked for one."""


@dataclass(frozen=True)
class Split:
    """A region of the step that runs in slices, each slice from the region's first op to its last.

    Attributes:
        slices: how many.
        saved_bytes: of the tensors that live inside the region only, as they are without the split.
        extra_time_s: predicted seconds that the plain step takes longer for it.
        unsplit_fingerprint: of the graph without the split.
        stands_for: pairs of an op of the plan's graph, which a slice runs, and the op of the graph without the split
            that it is a part of.
        inner: do inner layers run in slices, too, whose forward ops then run once more in the backward part?
    """

    slices: int
    saved_bytes: int
    extra_time_s: float
    unsplit_fingerprint: str
    stands_for: tuple[tuple[int, int], ...]
    inner: bool = False

    def described(self, plain_time_s: float) -> str:
        """What runs in slices, and what that saves and costs, in a line.

        Args:
            plain_time_s: predicted seconds of the step without the split.
        """
        cost = self.extra_time_s / plain_time_s if plain_time_s > 0 else 0.0
        ops = len({op for _, op in self.stands_for})
        what = "ops, those of inner layers included," if self.inner else "ops"
        before, after = format_bytes(self.saved_bytes), format_bytes(self.saved_bytes // self.slices)
        return f"{ops} {what} in {self.slices} slices: {before} between them become {after}, for {cost:.2%} more time"

    def to_json(self) -> dict[str, Any]:
        """The split as a JSON-ready dictionary."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**values, "stands_for": [list(pair) for pair in self.stands_for]}


@dataclass(frozen=True)
class Update:
    """Updates of parameters that run as soon as their gradient is final: an order of the step's first runs.

    Attributes:
        moved: ops of updates that run earlier than in program order.
        saved_bytes: by how much the peak of the plain step is lower by the trace.
        bound_by: name of the op that makes a number which all updates wait for; "" where there is none.
        waiting_bytes: of the gradients that wait for it.
    """

    moved: int
    saved_bytes: int
    bound_by: str
    waiting_bytes: int

    def described(self) -> str:
        """Which updates run early, what that saves, and what others wait for, in a line."""
        if self.saved_bytes:
            saved = format_bytes(self.saved_bytes)
            text = f"{self.moved} ops of updates run as soon as their gradient is final: {saved} less, for no time"
        elif self.moved:
            text = f"{self.moved} ops of updates run earlier, which lowers the plain peak by nothing"
        else:
            text = "no update runs early"
        if self.bound_by:
            text += f"; {format_bytes(self.waiting_bytes)} of gradients wait for {self.bound_by}"
        return text


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
        traced_budget_bytes: what the peak of the traced step had to stay within, where ``budget_bytes`` limits what a
            device or a compiler makes of it; the lower bound is proved for these bytes. None where the two are one.
        measured_peak_bytes: what the first step under the plan took, where a front end measures that; None before.
        mode: how a front end carries the plan out: "graph", "eager" or "inductor" in PyTorch, "static" or
            "to_static" in Paddle; None where there is one way only.
        split: the region that runs in slices, where there is one. The plan's graph is the one with the slices; the
            plain step that the figures are compared with is the one without.
        update: which updates run early, where this was asked for. The order of the plan's graph is the moved one.
        one_by_one: does every op wait for the end of the one before it? A front end whose runtime runs several ops at a
            time otherwise leaves them free where memory is not short.
        expected_time_s: seconds that a run of the step is expected to take, with what a front end knows beside its
            ops: which bytes are in caches, which pages the system has to hand out anew, or what calls take in Python.
            None where it knows nothing.
        baseline_expected_time_s: the same of the plain step.
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
    traced_budget_bytes: int | None = None
    measured_peak_bytes: int | None = field(default=None, compare=False)
    mode: str | None = field(default=None, compare=False)
    split: Split | None = None
    update: Update | None = None
    one_by_one: bool = False
    expected_time_s: float | None = field(default=None, compare=False)
    baseline_expected_time_s: float | None = field(default=None, compare=False)

    @property
    def expected_overhead(self) -> float:
        """What a run is expected to take more than a plain one, as a fraction of it: ops, memory and calls together.

        Below 0 where the plain step loses more to its memory than the plan to recomputation. ``overhead``, which the
        planner minimises and the bound is proved for, knows the ops only; where nothing else is known the two are one.
        """
        if self.expected_time_s is None or not self.baseline_expected_time_s:
            return self.overhead
        return self.expected_time_s / self.baseline_expected_time_s - 1

    @property
    def recomputed(self) -> int:
        """Number of extra runs: how often the schedule runs an op that had run before."""
        return sum(recomputed_ops(self.schedule).values())

    @property
    def unsplit_fingerprint(self) -> str:
        """The fingerprint of the step as it was traced, without slices."""
        return self.fingerprint if self.split is None else self.split.unsplit_fingerprint

    def set_measured_peak(self, measured_peak_bytes: int) -> None:
        """Note what the first step took: the only thing about a plan that is not known when it is made."""
        object.__setattr__(self, "measured_peak_bytes", measured_peak_bytes)

    def check_graph(self, graph: Graph, mode: str | None = None) -> None:
        """Make sure that this plan was made for ``graph``; names and times may differ.

        Args:
            graph: the graph.
            mode: how the plan would be carried out, where a front end has several ways; the error names both.

        Raises:
            PlanMismatch: if the plan is for another graph.
        """
        if graph.fingerprint != self.fingerprint:
            why = "The model, the batch size, a dtype or the framework's version changed; plan again for this graph"
            if mode is not None and self.mode is not None and self.mode != mode:
                why = f"It was made in mode {self.mode!r}, and a step in mode {mode!r} has a graph of its own"
            raise PlanMismatch(
                f"this plan was made for another graph: it covers {len(set(self.schedule))} ops and the fingerprint "
                f"{self.fingerprint}, the graph has {len(graph.ops)} ops and {graph.fingerprint}. {why}"
            )

    def save(self, path: str | Path, graph: Graph | None = None) -> None:
        """Write the plan as ``remat.plan`` JSON; a path ending in ``.gz`` is compressed.

        Args:
            path: of the file.
            graph: the graph that it was made for, kept in the same file, so that ``remat report`` needs no other.

        Raises:
            PlanMismatch: if it was made for another graph.
        """
        values = self.to_json()
        if graph is not None:
            self.check_graph(graph)
            values["graph"] = graph.to_json()
        write_json(path, values)

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON-ready dictionary in the ``remat.plan`` format. What is None or false is left out."""
        # Only the fields of Plan: a front end's plan carries more than the format has.
        values = {one.name: value for one in fields(Plan) if (value := getattr(self, one.name)) is not None}
        if not self.one_by_one:
            del values["one_by_one"]
        if self.split is not None:
            values["split"] = self.split.to_json()
        if self.update is not None:
            values["update"] = {one.name: getattr(self.update, one.name) for one in fields(Update)}
        return {"format": PLAN_FORMAT, "version": PLAN_VERSION, **values, "schedule": list(self.schedule)}

    def __str__(self) -> str:
        ops = len(set(self.schedule))
        peak, plain = format_bytes(self.peak_bytes), format_bytes(self.baseline_peak_bytes)
        traced, measured = self.traced_peak_bytes, self.measured_peak_bytes
        split = self.split
        share = f" ({self.peak_bytes / self.baseline_peak_bytes:.1%} of plain)" if self.baseline_peak_bytes else ""
        return "\n".join(
            (
                f"remat plan by {self.planner!r}, made in {self.plan_seconds:.2f} s",
                *([f"  mode           {self.mode}"] if self.mode is not None else []),
                f"  budget         {format_bytes(self.budget_bytes)}",
                f"  predicted peak {peak}{share}, plain {plain}",
                *([f"  before fusion  {format_bytes(traced)}, by the trace"] if traced is not None else []),
                *([f"  measured peak  {format_bytes(measured)}, of the first step"] if measured is not None else []),
                f"  overhead       {self.overhead:.2%} ({self.time_s:.4g} s, plain {self.baseline_time_s:.4g} s)",
                *self._expected_line(),
                f"  lower bound    {self.overhead_lower_bound:.2%}: {self.lower_bound_meaning}",
                f"  gap            {self.overhead - self.overhead_lower_bound:.2%} of a plain step at most",
                *([] if split is None else [f"  split          {split.described(self.baseline_time_s)}"]),
                *([] if self.update is None else [f"  update         {self.update.described()}"]),
                *([f"  order          {ONE_BY_ONE}"] if self.one_by_one else []),
                f"  recomputed     {len(recomputed_ops(self.schedule))} of {ops} ops, in {self.recomputed} extra runs",
            )
        )

    def _expected_line(self) -> list[str]:
        """What runs are expected to take; nothing where that is not known."""
        ours, plain = self.expected_time_s, self.baseline_expected_time_s
        if ours is None or plain is None:
            return []
        return [
            f"  expected       {self.expected_overhead:+.2%} ({ours:.4g} s, plain {plain:.4g} s), "
            "memory and calls counted"
        ]


def load_plan(path: str | Path) -> Plan:
    """Read a plan from ``.json`` or ``.json.gz``; ``plan.check_graph`` tells whether it fits a graph.

    Raises:
        InvalidFile: if the file is no ``remat.plan``, is truncated, or was written by a newer version.
        FileNotFoundError: if there is no such file.
    """
    return _plan_from(JsonReader(str(path), read_json(path)))


def load_plan_and_graph(path: str | Path) -> tuple[Plan, Graph | None]:
    """Read a plan and the graph that it was saved with, None where it was saved alone.

    Raises:
        InvalidFile: as ``load_plan``.
        InvalidGraph: if the graph in it breaks a structural rule.
        PlanMismatch: if the graph in it is another than the plan's.
        FileNotFoundError: if there is no such file.
    """
    reader = JsonReader(str(path), read_json(path))
    plan = _plan_from(reader)
    if not reader.has("graph"):
        return plan, None
    graph = graph_from(reader.nested("graph"))
    plan.check_graph(graph)
    return plan, graph


def plan_from_json(data: object) -> Plan:
    """The plan in a decoded JSON value of the ``remat.plan`` format.

    Raises:
        InvalidFile: if the value is something else.
    """
    return _plan_from(JsonReader("plan JSON", data))


def _plan_from(reader: JsonReader) -> Plan:
    reader.check_format(PLAN_FORMAT, PLAN_VERSION)
    return Plan(
        schedule=reader.integers("schedule"),
        fingerprint=reader.text("fingerprint"),
        peak_bytes=reader.integer("peak_bytes"),
        baseline_peak_bytes=reader.integer("baseline_peak_bytes"),
        time_s=reader.number("time_s"),
        baseline_time_s=reader.number("baseline_time_s"),
        overhead=reader.number("overhead"),
        overhead_lower_bound=reader.number("overhead_lower_bound"),
        lower_bound_meaning=reader.text("lower_bound_meaning"),
        planner=reader.text("planner"),
        budget_bytes=reader.integer("budget_bytes"),
        plan_seconds=reader.number("plan_seconds"),
        traced_peak_bytes=reader.integer("traced_peak_bytes") if reader.has("traced_peak_bytes") else None,
        traced_budget_bytes=reader.integer("traced_budget_bytes") if reader.has("traced_budget_bytes") else None,
        measured_peak_bytes=reader.integer("measured_peak_bytes") if reader.has("measured_peak_bytes") else None,
        mode=reader.text("mode") if reader.has("mode") else None,
        split=_split_from(reader.nested("split")) if reader.has("split") else None,
        update=_update_from(reader.nested("update")) if reader.has("update") else None,
        one_by_one=reader.flag("one_by_one", False),
        expected_time_s=_number_or_none(reader, "expected_time_s"),
        baseline_expected_time_s=_number_or_none(reader, "baseline_expected_time_s"),
    )


def _number_or_none(reader: JsonReader, key: str) -> float | None:
    return reader.number(key) if reader.has(key) else None


def _split_from(reader: JsonReader) -> Split:
    return Split(
        slices=reader.integer("slices"),
        saved_bytes=reader.integer("saved_bytes"),
        extra_time_s=reader.number("extra_time_s"),
        unsplit_fingerprint=reader.text("unsplit_fingerprint"),
        stands_for=reader.pairs("stands_for"),
        inner=reader.flag("inner", False),
    )


def _update_from(reader: JsonReader) -> Update:
    return Update(
        moved=reader.integer("moved"),
        saved_bytes=reader.integer("saved_bytes"),
        bound_by=reader.text("bound_by"),
        waiting_bytes=reader.integer("waiting_bytes"),
    )


def plan_for_schedule(
    graph: Graph,
    schedule: Schedule,
    *,
    planner: str,
    budget_bytes: int | None = None,
    started: float | None = None,
) -> Plan:
    """The plan around a schedule, its lower bound not proved.

    Args:
        graph: the training step.
        schedule: a legal schedule; it is replayed by the independent validator.
        planner: how it was made, for the report.
        budget_bytes: what it was made to stay within; None for a schedule that was made without a budget, whose own
            peak then stands as the budget.
        started: ``time.perf_counter()`` when planning began.

    Raises:
        InvalidSchedule: if the schedule breaks a rule.
    """
    timeline = _replay_twice(graph, schedule, planner)
    plain = simulate(graph, graph.plain_schedule)
    now = time.perf_counter()
    return Plan(
        schedule=schedule,
        fingerprint=graph.fingerprint,
        peak_bytes=timeline.peak_bytes,
        baseline_peak_bytes=plain.peak_bytes,
        time_s=timeline.time_s,
        baseline_time_s=plain.time_s,
        overhead=(timeline.time_s - plain.time_s) / plain.time_s if plain.time_s > 0 else 0.0,
        overhead_lower_bound=0.0,
        lower_bound_meaning=NOT_PROVED if budget_bytes is not None else "none was sought, since no budget was given",
        planner=planner,
        budget_bytes=timeline.peak_bytes if budget_bytes is None else budget_bytes,
        plan_seconds=0.0 if started is None else now - started,
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
