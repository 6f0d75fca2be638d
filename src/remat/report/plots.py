"""Pictures of plans and training runs.

They use matplotlib's object interface only: no window is opened, no global state is touched, no display is needed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from remat.core.breakdown import CATEGORIES, breakdown
from remat.core.budget import format_bytes
from remat.core.files import write_atomically
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.schedule import Schedule
from remat.core.simulator import simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

# Okabe and Ito's palette, which people with any form of colour blindness can tell apart.
_GREY, _ORANGE, _BLUE, _VERMILION = "#8c8c8c", "#E69F00", "#0072B2", "#D55E00"
_LINES: Final = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#000000")
# In the order of CATEGORIES.
_CATEGORY_COLOURS: Final = ("#56B4E9", "#0072B2", "#999999", "#E69F00", "#009E73", "#CC79A7", "#777777", "#D55E00")
_SIZE_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_TIME_UNITS: Final = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def memory_figure(graph: Graph, plan: Plan | None = None, *, title: str = "Memory over one training step") -> Figure:
    """Memory over the step: plain and, where a plan is given, planned, with the budget as a line.

    The horizontal axis is the predicted time; where all times are 0, the number of the run.

    Raises:
        PlanMismatch: if the plan is for another graph.
    """
    from matplotlib.figure import Figure

    if plan is not None:
        plan.check_graph(graph)
    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_memory(axes, graph, plan)
    axes.set_title(title, loc="left", fontweight="bold")
    _finish(figure, axes)
    return figure


def _draw_memory(axes: Axes, graph: Graph, plan: Plan | None) -> None:
    timed = graph.time_s > 0
    curves = [("plain", graph.plain_schedule, _ORANGE)]
    if plan is not None:
        curves.append((f"planned ({plan.planner})", plan.schedule, _BLUE))
    ends_s = [sum(graph.ops[op].time_s for op in schedule) for _, schedule, _ in curves]
    peaks = [simulate(graph, schedule).peak_bytes for _, schedule, _ in curves]
    time_unit, time_scale = _unit(_TIME_UNITS, max(ends_s)) if timed else ("", 1.0)
    size_unit, size_scale = _unit(_SIZE_UNITS, max(peaks))

    for (label, schedule, colour), end_s, peak in zip(curves, ends_s, peaks, strict=True):
        edges, heights = _steps(graph, schedule, time_scale if timed else None, size_scale)
        overhead = f", {end_s / graph.time_s - 1:+.1%} time" if timed and plan is not None and label != "plain" else ""
        axes.stairs(heights, edges, fill=True, color=colour, alpha=0.22)
        axes.stairs(heights, edges, color=colour, linewidth=1.4, label=f"{label}: peak {format_bytes(peak)}{overhead}")
    if graph.pinned_bytes:
        axes.axhspan(0, graph.pinned_bytes / size_scale, color=_GREY, alpha=0.35, linewidth=0)
        axes.axhline(
            graph.pinned_bytes / size_scale,
            color=_GREY,
            linewidth=1,
            label=f"weights, optimizer state, batch: {format_bytes(graph.pinned_bytes)}",
        )
    if plan is not None:
        axes.axhline(
            plan.budget_bytes / size_scale,
            color=_VERMILION,
            linewidth=1.6,
            linestyle=(0, (6, 3)),
            label=f"budget: {format_bytes(plan.budget_bytes)}",
        )
    axes.set_xlabel(f"predicted time ({time_unit})" if timed else "operation run")
    axes.set_ylabel(f"memory ({size_unit})")
    axes.set_xlim(left=0)
    # A plan's budget may lie above the plain peak.
    highest = max([*peaks, plan.budget_bytes if plan is not None else 0])
    axes.set_ylim(0, max(1, highest) / size_scale * 1.05)


def frontier_figure(plans: Sequence[Plan], *, title: str = "What a smaller budget costs") -> Figure:
    """Overhead against budget, with the proven lower bound below it.

    Raises:
        ValueError: if there is no plan.
    """
    from matplotlib.figure import Figure

    if not plans:
        raise ValueError("there is nothing to draw: give at least one plan")
    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_frontier(axes, plans)
    axes.set_title(title, loc="left", fontweight="bold")
    _finish(figure, axes)
    return figure


def _draw_frontier(axes: Axes, plans: Sequence[Plan], chosen: Plan | None = None) -> None:
    unit, scale = _unit(_SIZE_UNITS, max(plan.budget_bytes for plan in plans))
    budgets = [plan.budget_bytes / scale for plan in plans]
    overheads = [100 * plan.overhead for plan in plans]
    bounds = [100 * plan.overhead_lower_bound for plan in plans]
    # Between two budgets the plan of the smaller one can be had, and the bound of the larger one holds.
    found = axes.plot(budgets, overheads, color=_BLUE, linewidth=1.8, marker="o", drawstyle="steps-post")
    bound = axes.plot(budgets, bounds, color=_GREY, linewidth=1.4, linestyle=(0, (6, 3)), drawstyle="steps-pre")
    found[0].set_label(f"found by {plans[0].planner}")
    bound[0].set_label("no schedule is below")
    for number, ends in enumerate(pairwise(budgets)):
        axes.fill_between(ends, bounds[number + 1], overheads[number], color=_BLUE, alpha=0.12, linewidth=0)
    axes.set_xlabel(f"budget ({unit})")
    axes.set_ylabel("extra time (% of a plain step)")
    if chosen is not None:
        label = f"this plan: {chosen.overhead:.1%} more time for {format_bytes(chosen.budget_bytes)}"
        axes.plot(
            [chosen.budget_bytes / scale],
            [100 * chosen.overhead],
            color=_VERMILION,
            marker="D",
            markersize=8,
            linestyle="none",
            label=label,
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def report_figure(
    graph: Graph, plan: Plan, frontier: Sequence[Plan] = (), *, title: str = "Memory over one training step"
) -> Figure:
    """A report as one picture: memory over the step, what fills its peak and, with a frontier, what budgets cost.

    Raises:
        PlanMismatch: if the plan is for another graph.
    """
    from matplotlib.figure import Figure

    plan.check_graph(graph)
    rows = 3 if frontier else 2
    figure = Figure(figsize=(9, 3 + 2.9 * rows), dpi=150, layout="constrained")
    parts: Any = figure.subfigures(rows, 1, height_ratios=[3, 1.5, 2.6][:rows])
    grid = [part.subplots() for part in parts]
    _draw_memory(grid[0], graph, plan)
    _draw_breakdown(grid[1], graph, plan)
    grid[0].set_title("Memory over the step", loc="left")
    grid[1].set_title("At the peak", loc="left")
    if frontier:
        _draw_frontier(grid[2], frontier, plan)
        grid[2].set_title("What each budget costs", loc="left")
    for part, axes in zip(parts, grid, strict=True):
        _finish(part, axes)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def _draw_breakdown(axes: Axes, graph: Graph, plan: Plan) -> None:
    """One bar for each step, of the bytes by category at its peak."""
    found = [("planned", breakdown(graph, plan.schedule)), ("plain", breakdown(graph))]
    unit, scale = _unit(_SIZE_UNITS, max(of.total_bytes for _, of in found))
    left = [0.0 for _ in found]
    for number, category in enumerate(CATEGORIES):
        sizes = [of.size_bytes[category] / scale for _, of in found]
        if any(sizes):
            colour = _CATEGORY_COLOURS[number]
            axes.barh([name for name, _ in found], sizes, left=left, color=colour, label=category.replace("_", " "))
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_xlabel(f"memory ({unit})")


def loss_figure(
    histories: Mapping[str, Sequence[float]], *, x_label: str = "epoch", title: str = "Training loss"
) -> Figure:
    """Loss curves on top of each other.

    Earlier curves are drawn wider than later ones, so that each can be seen where all of them are equal.

    Args:
        histories: for each run its label and one loss for each epoch or step, counted from 1.
        x_label: what the losses are counted in.
        title: of the picture.

    Raises:
        ValueError: if there is no run.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not histories:
        raise ValueError("there is nothing to draw: histories is empty; give at least one run's losses")
    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    widening = min(2.4, 9 / len(histories))
    widths = [1.5 + widening * rank for rank in reversed(range(len(histories)))]
    longest = max(len(losses) for losses in histories.values())
    for rank, (label, losses) in enumerate(histories.items()):
        axes.plot(
            range(1, len(losses) + 1),
            losses,
            color=_LINES[rank % len(_LINES)],
            linewidth=widths[rank],
            # A run of one epoch has no line to draw.
            marker="o" if longest == 1 else None,
            markersize=4 + widths[rank],
            solid_capstyle="round",
            label=label,
        )
    axes.set_xlabel(x_label)
    axes.set_ylabel("loss")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(figure, axes)
    return figure


def check_picture_path(path: str | Path) -> None:
    """Make sure that matplotlib can write a picture of this name, before work is spent on it.

    Raises:
        ValueError: if the name's ending is no known format of pictures; the message lists the formats.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = FigureCanvasAgg.get_supported_filetypes()
    ending = Path(path).suffix.lower().removeprefix(".")
    if ending not in known:
        raise ValueError(
            f"{path}: {ending or 'no ending'!r} is no picture format; end the name in one of {', '.join(sorted(known))}"
        )


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a picture atomically; the ending of the name chooses the format.

    Raises:
        ValueError: if the name's ending is no known format of pictures.
        OSError: if the file cannot be written; an older file of that name is then untouched.
    """
    check_picture_path(path)
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix.removeprefix("."))
    write_atomically(path, picture.getvalue())


def _steps(
    graph: Graph, schedule: Schedule, time_scale: float | None, size_scale: float
) -> tuple[list[float], list[float]]:
    """Edges (one more than runs) and heights of the staircase that a schedule's memory is."""
    timeline = simulate(graph, schedule)
    heights = [size / size_scale for size in timeline.bytes]
    if time_scale is None:
        return [float(step) for step in range(len(heights) + 1)], heights
    widths = (graph.ops[op].time_s / time_scale for op in schedule)
    return list(accumulate(widths, initial=0.0)), heights


def _unit(units: Sequence[tuple[str, float]], largest: float) -> tuple[str, float]:
    return next(((name, scale) for name, scale in units if largest >= scale), units[-1])


def _tidy(axes: Axes) -> None:
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _finish(figure: FigureBase, axes: Axes) -> None:
    _tidy(axes)
    # Below the axes, so that it hides no curve.
    columns = 5 if len(axes.get_legend_handles_labels()[0]) > 4 else 2
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)
