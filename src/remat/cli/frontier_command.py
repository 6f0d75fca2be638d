"""``remat frontier``: what each budget costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import remat
from remat.cli.checks import check_picture, check_planner
from remat.cli.console import check_output_path, check_time_limit, counted_progress, print_json
from remat.cli.options import Source
from remat.cli.plan_command import AsJson, PlannerName
from remat.cli.source import graph_from_source
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.report import text


def frontier_command(
    source: Source,
    points: Annotated[int, typer.Option(help="How many budgets, both ends included.", min=2)] = 10,
    planner: PlannerName = "auto",
    time_limit: Annotated[float | None, typer.Option(help="Seconds for each plan.", metavar="S")] = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw overhead against budget into this file (.png, .svg, .pdf).", metavar="FILE"),
    ] = None,
) -> None:
    """Show what each budget costs, from the smallest feasible peak to the plain one."""
    check_planner(planner)
    source.check_device()
    check_time_limit(time_limit)
    check_output_path(plot, "--plot", keep=[source.name])
    check_picture(plot)
    graph = graph_from_source(source)
    with counted_progress(f"Planning {len(graph.ops):,} ops") as on_plan:
        plans = remat.frontier(graph, points, planner, time_limit, on_plan=on_plan)
    if plot is not None:
        from remat.report import plots

        plots.save_figure(plots.frontier_figure(plans), plot)
    if as_json:
        print_json(_as_json(source.name, graph, plans))
        return
    console = Console()
    console.print(text.frontier_table(plans, title=f"Frontier of {source.name}"))
    console.print(f"Lower bound: {plans[0].lower_bound_meaning}", markup=False, highlight=False)
    if plot is not None:
        console.print(f"Picture written to {plot}", markup=False, highlight=False, soft_wrap=True)


def _as_json(source: str, graph: Graph, plans: tuple[Plan, ...]) -> dict[str, Any]:
    return {
        "source": source,
        "ops": len(graph.ops),
        "planner": plans[0].planner,
        "baseline_peak_bytes": plans[0].baseline_peak_bytes,
        "baseline_time_s": plans[0].baseline_time_s,
        "points": [
            {
                "budget_bytes": plan.budget_bytes,
                "peak_bytes": plan.peak_bytes,
                "overhead": plan.overhead,
                "overhead_lower_bound": plan.overhead_lower_bound,
                "lower_bound_meaning": plan.lower_bound_meaning,
                "recomputed": plan.recomputed,
                "plan_seconds": plan.plan_seconds,
            }
            for plan in plans
        ],
    }
