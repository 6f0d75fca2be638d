"""Tables for the terminal: plans, frontiers, timelines, and what the bytes of a step are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from remat.core.breakdown import CATEGORIES, Breakdown
from remat.core.budget import format_bytes
from remat.core.graph import Graph, Tensor
from remat.core.labels import layer_of
from remat.core.plan import Plan
from remat.core.schedule import recomputed_ops
from remat.core.simulator import Timeline
from remat.planning.batch_size import LargestBatches
from remat.report.recomputed import RecomputedGroup, recomputed_kinds

# Rows and columns that fit a terminal of usual size beside the other tables.
_KINDS_SHOWN: Final = 8
_TENSORS_SHOWN: Final = 10
_BAR_WIDTH: Final = 24


def plan_table(graph: Graph, plan: Plan, *, title: str = "Plan") -> Table:
    """The figures of a plan, one to a line."""
    table = _figures(title)
    table.add_row("Budget", _with_share(plan.budget_bytes, plan.baseline_peak_bytes))
    table.add_row("Predicted peak", _with_share(plan.peak_bytes, plan.baseline_peak_bytes))
    table.add_row("Plain peak", format_bytes(plan.baseline_peak_bytes))
    table.add_row("Resident inputs", f"{format_bytes(graph.pinned_bytes)} (weights, optimizer state, the batch)")
    table.add_row(
        "Overhead",
        f"{plan.overhead:.2%} ({format_time(plan.time_s)} a step, plain {format_time(plan.baseline_time_s)})",
    )
    if plan.expected_time_s is not None and plan.baseline_expected_time_s is not None:
        ours, plain = format_time(plan.expected_time_s), format_time(plan.baseline_expected_time_s)
        table.add_row(
            "Expected", f"{plan.expected_overhead:+.2%} ({ours} a step, plain {plain}), memory and calls counted"
        )
    table.add_row("Lower bound", Text(f"{plan.overhead_lower_bound:.2%} ({plan.lower_bound_meaning})"))
    table.add_row("Gap", f"at most {plan.overhead - plan.overhead_lower_bound:.2%} of a plain step above the best")
    table.add_row("Planner", Text(f"{plan.planner}, in {plan.plan_seconds:.2f} s"))
    table.add_row(
        "Recomputed",
        f"{len(recomputed_ops(plan.schedule)):,} of {len(graph.ops):,} ops, in {plan.recomputed:,} extra runs",
    )
    return table


def frontier_table(plans: Sequence[Plan], *, title: str = "Frontier") -> Table:
    """What each budget costs, the smallest first, with a bar for each overhead."""
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for heading in ("Budget", "Of plain", "Overhead", "Lower bound", "Gap"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    highest = max((plan.overhead for plan in plans), default=0.0)
    for plan in plans:
        width = round(_BAR_WIDTH * plan.overhead / highest) if highest else 0
        table.add_row(
            format_bytes(plan.budget_bytes),
            _share(plan.budget_bytes, plan.baseline_peak_bytes),
            f"{plan.overhead:.2%}",
            f"{plan.overhead_lower_bound:.2%}",
            f"{plan.overhead - plan.overhead_lower_bound:.2%}",
            Text("━" * width, style="cyan"),
        )
    return table


def recomputed_kinds_table(graph: Graph, plan: Plan) -> Table:
    """The kinds of operation that cost most in recomputation; the rest together in the last line."""
    kinds = recomputed_kinds(graph, plan)
    total_s = sum(entry.extra_time_s for entry in kinds)
    table = Table(title="Recomputed, by kind of op", title_justify="left", title_style="bold")
    table.add_column("Kind")
    for heading in ("Ops", "Extra runs", "Extra time", "Share"):
        table.add_column(heading, justify="right")

    shown, rest = kinds[:_KINDS_SHOWN], kinds[_KINDS_SHOWN:]
    for entry in shown:
        _add_kind(table, entry, entry.name or "(no kind)", total_s)
    if rest:
        merged = RecomputedGroup(
            name="",
            kinds=(),
            ops=sum(entry.ops for entry in rest),
            total_ops=sum(entry.total_ops for entry in rest),
            extra_runs=sum(entry.extra_runs for entry in rest),
            extra_time_s=sum(entry.extra_time_s for entry in rest),
        )
        _add_kind(table, merged, f"{len(rest)} other kinds" if len(rest) > 1 else "1 other kind", total_s)
    return table


def timeline_table(graph: Graph, schedule: tuple[int, ...], timeline: Timeline, *, title: str = "Timeline") -> Table:
    """The figures of a simulated schedule: its peak, where that is, and the time."""
    table = _figures(title)
    table.add_row("Peak", format_bytes(timeline.peak_bytes))
    if timeline.peak_step is not None:
        table.add_row("Peak step", f"{timeline.peak_step:,} (of 0 to {len(schedule) - 1:,})")
        table.add_row("Op at the peak", Text(graph.describe_op(schedule[timeline.peak_step])))
    table.add_row("Resident inputs", f"{format_bytes(graph.pinned_bytes)} (weights, optimizer state, the batch)")
    table.add_row("Time", f"{format_time(timeline.time_s)} a step, predicted")
    table.add_row("Runs", f"{len(schedule):,} of {len(graph.ops):,} ops")
    return table


def live_tensors_table(graph: Graph, timeline: Timeline) -> Table:
    """The largest tensors alive at the peak and the ops that made them; the rest together in the last line."""
    table = Table(title="Alive at the peak", title_justify="left", title_style="bold")
    table.add_column("Size", justify="right", no_wrap=True)
    table.add_column("Share", justify="right", no_wrap=True)
    table.add_column("Tensor", overflow="fold")
    table.add_column("Made by", justify="right", no_wrap=True)
    table.add_column("Kind", overflow="fold")
    table.add_column("Name", overflow="fold")
    shown = timeline.live_at_peak[:_TENSORS_SHOWN]
    for number in shown:
        size_bytes = graph.tensors[number].size_bytes
        maker = graph.producer[number]
        op = None if maker is None else graph.ops[maker]
        table.add_row(
            format_bytes(size_bytes),
            _share(size_bytes, timeline.peak_bytes),
            Text(f"{number} {shape_and_dtype(graph.tensors[number])}".strip()),
            "" if maker is None else f"op {maker}",
            Text(op.kind if op else ""),
            Text(op.name if op else ""),
        )
    rest = timeline.live_at_peak[len(shown) :]
    if rest:
        size_bytes = sum(graph.tensors[number].size_bytes for number in rest)
        table.add_row(format_bytes(size_bytes), _share(size_bytes, timeline.peak_bytes), f"{len(rest):,} others")
    return table


def breakdown_table(plain: Breakdown, planned: Breakdown | None = None) -> Table:
    """Bytes by category at the peak of the plain step and, where one is given, of the planned one."""
    table = Table(title="At the peak", title_justify="left", title_style="bold")
    table.add_column("Bytes of")
    columns = [("plain", plain)] + ([("planned", planned)] if planned is not None else [])
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for category in CATEGORIES:
        sizes = [found.size_bytes[category] for _, found in columns]
        if any(sizes):
            table.add_row(category.replace("_", " "), *map(format_bytes, sizes))
    table.add_section()
    table.add_row("all", *(format_bytes(found.total_bytes) for _, found in columns))
    return table


def largest_tensors_table(graph: Graph, found: Breakdown, *, title: str) -> Table:
    """The largest tensors alive at a peak, with the layer and the line that made them."""
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for heading in ("Size", "Shape", "What", "Op", "Layer", "Source"):
        table.add_column(heading, justify="right" if heading == "Size" else "left", overflow="fold")
    for live in found.largest:
        tensor = graph.tensors[live.tensor]
        op = None if live.op is None else graph.ops[live.op]
        table.add_row(
            format_bytes(live.size_bytes),
            Text(shape_and_dtype(tensor)),
            live.category.replace("_", " "),
            Text(tensor.name if op is None else op.kind),
            Text("" if live.op is None else layer_of(graph, live.op)),
            Text("" if op is None else _without_folders(op.source)),
        )
    return table


def largest_batches_table(found: LargestBatches) -> Table:
    """The largest batch within a budget, plain and planned."""
    table = Table(
        title=f"Largest batch for {format_bytes(found.budget_bytes)}", title_justify="left", title_style="bold"
    )
    for heading in ("", "Batch", "Predicted peak", "Overhead"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, one in (("plain", found.plain), ("with recomputation", found.planned)):
        batch = f"{one.batch_size:,}" if one.batch_size else "none; one sample needs"
        table.add_row(name, batch, format_bytes(one.peak_bytes), f"{one.overhead:.1%}")
    return table


def format_time(time_s: float) -> str:
    """A duration for people, with three significant digits: ``"1.25 ms"``, ``"3.4 s"``."""
    if time_s == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(time_s) >= scale:
            return f"{_three_digits(time_s / scale)} {unit}"
    return f"{_three_digits(time_s / 1e-9)} ns"


def shape_and_dtype(tensor: Tensor) -> str:
    """A tensor's shape and dtype, as far as they are known: ``"[32, 64] float32"``."""
    return f"{'' if tensor.shape is None else list(tensor.shape)} {tensor.dtype or ''}".strip()


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _figures(title: str) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", show_header=False)
    table.add_column("Figure", style="dim", no_wrap=True)
    table.add_column("Value", overflow="fold")
    return table


def _with_share(size_bytes: int, of_bytes: int) -> str:
    size = format_bytes(size_bytes)
    return f"{size} ({_share(size_bytes, of_bytes)} of plain)" if of_bytes else size


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _add_kind(table: Table, entry: RecomputedGroup, label: str, total_s: float) -> None:
    table.add_row(
        Text(label),
        f"{entry.ops:,} of {entry.total_ops:,}",
        f"{entry.extra_runs:,}",
        format_time(entry.extra_time_s),
        _share(entry.extra_time_s, total_s),
    )


def _without_folders(source: str) -> str:
    """The file and the line without folders and function, which a terminal has no room for."""
    return source.partition(" in ")[0].rpartition("/")[2]
