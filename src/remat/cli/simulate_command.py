"""``remat simulate``: replay a training step, plain or planned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import remat
from remat.cli.checks import check_picture
from remat.cli.console import check_output_path, print_json, progress
from remat.cli.plan_command import AsJson
from remat.core.graph import Graph
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
    # A plan file may have been edited; the simulator replays illegal schedules too.
    remat.validate(graph, schedule)
    timeline = remat.simulate(graph, schedule)
    if plot is not None:
        from remat.report import plots

        with progress(f"Drawing {plot}"):
            plots.save_figure(plots.memory_figure(graph, plan), plot)

    if as_json:
        print_json(_as_json(graph, schedule, timeline))
        return
    console = Console()
    what = "Plain step" if plan is None else f"Step planned by {plan.planner}"
    console.print(text.timeline_table(graph, schedule, timeline, title=f"{what} of {graph_file}"))
    if timeline.live_at_peak:
        console.print(text.live_tensors_table(graph, timeline))
    if plot is not None:
        console.print(f"Picture written to {plot}", markup=False, highlight=False, soft_wrap=True)


def _as_json(graph: Graph, schedule: tuple[int, ...], timeline: Timeline) -> dict[str, Any]:
    step = timeline.peak_step
    return {
        "peak_bytes": timeline.peak_bytes,
        "peak_step": step,
        "peak_op": None if step is None else _op_json(graph, schedule[step]),
        "live_at_peak": [_tensor_json(graph, tensor) for tensor in timeline.live_at_peak],
        "pinned_bytes": graph.pinned_bytes,
        "time_s": timeline.time_s,
        "bytes": list(timeline.bytes),
    }


def _op_json(graph: Graph, index: int) -> dict[str, Any]:
    return {"index": index, "kind": graph.ops[index].kind, "name": graph.ops[index].name}


def _tensor_json(graph: Graph, number: int) -> dict[str, Any]:
    return {"tensor": number, "name": graph.tensors[number].name, "size_bytes": graph.tensors[number].size_bytes}
