"""``remat simulate`` and ``remat report``: what a graph file or a saved plan does, step by step and at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import remat
from remat.cli.console import CommandError, counted_progress, print_json, print_line, progress
from remat.cli.options import (
    AsJson,
    check_installed,
    check_output_path,
    check_picture,
    check_planner,
    check_time_limit,
)
from remat.core.errors import InvalidSchedule
from remat.core.graph import Graph
from remat.core.plan import Plan, load_plan_and_graph
from remat.core.simulator import Timeline
from remat.report import text


def simulate_command(
    graph_file: Annotated[Path, typer.Argument(help="A graph file (.json, .json.gz).", metavar="GRAPH")],
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="A plan for this graph; without one, the plain step.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw memory over the step into this file (.png, .svg, .pdf).", metavar="FILE")
    ] = None,
) -> None:
    """Replay a training step: its peak, what runs there, what is alive, and the time."""
    check_output_path(plot, "--plot", keep=[graph_file, plan_file])
    check_picture(plot)
    graph = remat.load_graph(graph_file)
    plan = None
    if plan_file is not None:
        plan = remat.load_plan(plan_file)
        plan.check_graph(graph)
    schedule = graph.plain_schedule if plan is None else plan.schedule
    # A plan file may have been edited, and the simulator replays illegal schedules, too.
    remat.validate(graph, schedule)
    timeline = remat.simulate(graph, schedule)
    if plot is not None:
        from remat.report import plots

        with progress(f"Drawing {plot}"):
            plots.save_figure(plots.memory_figure(graph, plan), plot)

    if as_json:
        print_json(_timeline_as_json(graph, schedule, timeline))
        return
    console = Console()
    what = "Plain step" if plan is None else f"Step planned by {plan.planner}"
    console.print(text.timeline_table(graph, schedule, timeline, title=f"{what} of {graph_file}"))
    if timeline.live_at_peak:
        console.print(text.live_tensors_table(graph, timeline))
    if plot is not None:
        print_line(f"Picture written to {plot}")


def report_command(
    plan_file: Annotated[Path, typer.Argument(help="A plan, as `remat plan --out` writes it.", metavar="PLAN")],
    out: Annotated[
        Path, typer.Option(help="The page (.html) or picture (.png, .svg, .pdf) to write.", metavar="FILE")
    ] = Path("report.html"),
    graph_file: Annotated[
        Path | None,
        typer.Option("--graph", help="The plan's graph, where the plan's file is without it.", metavar="FILE"),
    ] = None,
    points: Annotated[
        int, typer.Option(help="Budgets on the frontier, at least 2; 0 leaves the frontier out.", min=0)
    ] = 8,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds for each plan of the frontier.", metavar="S")
    ] = None,
    planner: Annotated[
        str | None, typer.Option("--planner", help="Planner of the frontier; the plan's own if not given.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title; the plan's file name if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan: memory over the step, what each budget costs, what fills the peak, what runs again."""
    from remat.report import Report
    from remat.report.report import check_report_path

    check_output_path(out, "--out", keep=[plan_file, graph_file])
    check_time_limit(time_limit)
    if points == 1:
        raise CommandError("--points 1: a frontier has two ends; ask for 2 or more, or for 0 to leave it out")
    if out.suffix.lower() not in (".html", ".htm"):
        check_installed("matplotlib")
    try:
        check_report_path(out)
    except ValueError as error:
        raise CommandError(f"--out {error}") from error
    with progress(f"Reading {plan_file}"):
        plan, graph = _plan_and_graph(plan_file, graph_file)
    frontier = _frontier(graph, plan, points, planner, time_limit) if points else ()
    name = plan_file.name.removesuffix(".gz").removesuffix(".json")
    with progress(f"Writing {out}"):
        Report(graph, plan, frontier, name if title is None else title).save(out)
    if as_json:
        print_json({"report": str(out), "size_bytes": out.stat().st_size, "points": len(frontier)})
        return
    print_line(f"Report written to {out}")


def _timeline_as_json(graph: Graph, schedule: tuple[int, ...], timeline: Timeline) -> dict[str, Any]:
    step = timeline.peak_step
    return {
        "peak_bytes": timeline.peak_bytes,
        "peak_step": step,
        "peak_op": None if step is None else _op_as_json(graph, schedule[step]),
        "live_at_peak": [_tensor_as_json(graph, tensor) for tensor in timeline.live_at_peak],
        "pinned_bytes": graph.pinned_bytes,
        "time_s": timeline.time_s,
        "bytes": list(timeline.bytes),
    }


def _op_as_json(graph: Graph, index: int) -> dict[str, Any]:
    return {"index": index, "kind": graph.ops[index].kind, "name": graph.ops[index].name}


def _tensor_as_json(graph: Graph, number: int) -> dict[str, Any]:
    return {"tensor": number, "name": graph.tensors[number].name, "size_bytes": graph.tensors[number].size_bytes}


def _plan_and_graph(plan_file: Path, graph_file: Path | None) -> tuple[Plan, Graph]:
    plan, graph = load_plan_and_graph(plan_file)
    if graph_file is not None:
        graph = remat.load_graph(graph_file)
        plan.check_graph(graph)
    if graph is None:
        raise CommandError(
            f"{plan_file}: this plan was saved without its graph, which a report needs; name the graph's file with "
            "--graph, or make the plan with `remat plan SOURCE --out`, which keeps both in one file"
        )
    # A plan file may have been edited.
    try:
        remat.validate(graph, plan.schedule)
    except InvalidSchedule as error:
        raise CommandError(f"{plan_file}: {error}") from error
    return plan, graph


def _frontier(
    graph: Graph, plan: Plan, points: int, planner: str | None, time_limit_s: float | None
) -> tuple[Plan, ...]:
    from remat.planners import planner_names

    chosen = planner or (plan.planner if plan.planner in planner_names() else "auto")
    check_planner(chosen)
    with counted_progress(f"Planning {len(graph.ops):,} ops at {points} budgets") as moved:
        return remat.frontier(graph, points, chosen, time_limit_s, on_plan=moved)
