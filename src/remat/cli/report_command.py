"""``remat report``: a plan as an interactive page or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import remat
from remat.cli.checks import check_planner
from remat.cli.console import (
    CommandError,
    check_installed,
    check_output_path,
    check_time_limit,
    counted_progress,
    print_json,
    progress,
)
from remat.cli.plan_command import AsJson
from remat.core.errors import InvalidSchedule
from remat.core.graph import Graph
from remat.core.plan import Plan, load_plan_and_graph


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
    Console().print(f"Report written to {out}", markup=False, highlight=False, soft_wrap=True)


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
    # A file may have been edited.
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
    with counted_progress(f"Planning {len(graph.ops):,} ops at {points} budgets") as on_plan:
        return remat.frontier(graph, points, chosen, time_limit_s, on_plan=on_plan)
