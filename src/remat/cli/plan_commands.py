"""``remat plan`` and ``remat frontier``: what one budget costs a training step, and what each budget costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import remat
from remat.cli.console import CommandError, counted_progress, print_json, print_line, progress
from remat.cli.mesh import MeshRequest, plan_on_mesh
from remat.cli.options import (
    DEFAULT_BUDGET,
    AsJson,
    PlannerName,
    Source,
    check_output_path,
    check_picture,
    check_planner,
    check_time_limit,
)
from remat.cli.source import graph_from_source, is_file, traced, workload_from_source
from remat.core.breakdown import Breakdown, breakdown
from remat.core.budget import parse_budget
from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.labels import layer_of
from remat.core.plan import Plan
from remat.fit.auto_budget import MARGIN, auto_budget_bytes
from remat.planning.batch_size import LargestBatches, largest_batches
from remat.report import text
from remat.running.cost_model import MEASURED, get_profile
from remat.running.machine import memory_bytes
from remat.running.network import network_names


def plan_command(
    source: Source,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Peak bytes of a step: 4GiB, 512MB, 1000000, or 60% of the plain peak, which is the default; with "
            "--mesh that is the memory of the device less a margin."
        ),
    ] = None,
    planner: PlannerName = "auto",
    time_limit: Annotated[float | None, typer.Option(help="Seconds that the planner may take.", metavar="S")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan to this file, with its graph.", metavar="FILE")
    ] = None,
    save_graph: Annotated[
        Path | None, typer.Option(help="Write the graph to this file (.json, .json.gz).", metavar="FILE")
    ] = None,
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Also find the largest batch for the budget, plain and planned.")
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Plan for each device of many: axes and sizes, such as data=2,fsdp=8,tensor=8 (PyTorch).",
            metavar="AXES",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help=f"With --mesh, what connects nodes: {', '.join(network_names())}.", metavar="NAME"),
    ] = None,
    mixed_precision: Annotated[
        str | None,
        typer.Option(help="With --mesh, the dtype that parameters are gathered in: bfloat16.", metavar="DTYPE"),
    ] = None,
    tensor_styles: Annotated[
        Path | None,
        typer.Option(
            help="With --mesh, a JSON file: for patterns of layers' names, how they are cut (docs/cluster.md).",
            metavar="FILE",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest schedule of a training step within a byte budget, and show what fills its memory."""
    check_planner(planner)
    source.check_device()
    check_time_limit(time_limit)
    if mesh is not None:
        on_mesh = MeshRequest(mesh, network, mixed_precision, tensor_styles, budget, planner, time_limit, max_batch)
        plan_on_mesh(source, on_mesh, out, save_graph, as_json=as_json)
        return
    only_with_mesh = {"--network": network, "--mixed-precision": mixed_precision, "--tensor-styles": tensor_styles}
    if given := [name for name, value in only_with_mesh.items() if value is not None]:
        raise CommandError(f"{', '.join(given)} can be given with --mesh only")
    budget = DEFAULT_BUDGET if budget is None else budget
    check_output_path(out, "--out", keep=[source.name, save_graph])
    check_output_path(save_graph, "--save-graph", keep=[source.name])
    if out is not None and out == save_graph:
        raise CommandError(f"--out {out} and --save-graph name the same file; choose two names")
    if max_batch and is_file(source):
        raise CommandError(
            f"{source.name} is a graph file, whose sizes are fixed: --max-batch needs a model (module:callable)"
        )

    graph = graph_from_source(source)
    if save_graph is not None:
        graph.save(save_graph)
    batches = _largest_batches(source, graph, budget, planner, time_limit) if max_batch else None
    with progress(f"Planning {len(graph.ops):,} ops for {budget}"):
        try:
            plan = remat.plan(graph, budget, planner, time_limit)
        except InfeasibleBudget:
            # The batch that was asked for does not fit. The user still learns which batch does.
            if batches is not None and not as_json:
                Console().print(text.largest_batches_table(batches))
            raise
    if out is not None:
        plan.save(out, graph)
    plain, planned = breakdown(graph), breakdown(graph, plan.schedule)

    if as_json:
        print_json(_plan_as_json(source, graph, plan, plain, planned, batches))
        return
    console = Console()
    console.print(text.plan_table(graph, plan, title=f"Plan for {source.name}"))
    if (fits := fits_device(source.device, plan)) is not None:
        console.print(fits["sentence"], markup=False, highlight=False)
    for note in graph.notes:
        console.print(f"Assumed: {note}.", markup=False, highlight=False)
    console.print(text.breakdown_table(plain, planned if plan.recomputed else None))
    which = "planned" if plan.recomputed else "plain"
    console.print(text.largest_tensors_table(graph, planned, title=f"Largest tensors at the peak of the {which} step"))
    if plan.recomputed:
        console.print(text.recomputed_kinds_table(graph, plan))
    if batches is not None:
        console.print(text.largest_batches_table(batches))
    for name, path in (("Plan", out), ("Graph", save_graph)):
        if path is not None:
            print_line(f"{name} written to {path}")


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
    with counted_progress(f"Planning {len(graph.ops):,} ops") as moved:
        plans = remat.frontier(graph, points, planner, time_limit, on_plan=moved)
    if plot is not None:
        from remat.report import plots

        plots.save_figure(plots.frontier_figure(plans), plot)
    if as_json:
        print_json(
            {
                "source": source.name,
                "ops": len(graph.ops),
                "planner": plans[0].planner,
                "baseline_peak_bytes": plans[0].baseline_peak_bytes,
                "baseline_time_s": plans[0].baseline_time_s,
                "points": [_figures(plan) for plan in plans],
            }
        )
        return
    console = Console()
    console.print(text.frontier_table(plans, title=f"Frontier of {source.name}"))
    console.print(f"Lower bound: {plans[0].lower_bound_meaning}", markup=False, highlight=False)
    if plot is not None:
        print_line(f"Picture written to {plot}")


def fits_device(device: str | None, plan: Plan) -> dict[str, Any] | None:
    """Whether the plain and the planned step fit a device; None without a name, or where its memory is not known."""
    if device is None:
        return None
    profile = get_profile(device)
    size = profile.memory_bytes if profile.memory_bytes is not None else memory_bytes()
    if size is None:
        return None
    usable = auto_budget_bytes(device, size)
    plain, planned = plan.baseline_peak_bytes <= usable, plan.peak_bytes <= usable
    verdict = (
        "the plain step fits"
        if plain
        else "the plain step does not fit, the planned one does"
        if planned
        else "neither the plain nor the planned step fits; ask for a smaller budget or batch"
    )
    is_here = profile.memory_bytes is None or device.lower() == MEASURED
    whose = "this machine" if is_here else device.lower()
    sentence = f"Memory of {whose}: {remat.format_bytes(size)}, less {MARGIN:.0%} in reserve: {verdict}."
    return {"memory_bytes": size, "usable_bytes": usable, "plain": plain, "planned": planned, "sentence": sentence}


def _largest_batches(
    source: Source, graph: Graph, budget: str, planner: str, time_limit_s: float | None
) -> LargestBatches:
    plain_bytes = remat.simulate(graph, graph.plain_schedule).peak_bytes
    first = source.step_options().samples

    def trace(samples: int) -> Graph:
        if samples == first:
            return graph
        other = dataclasses.replace(source, batch_size=samples)
        return traced(other, workload_from_source(other))

    with progress(f"Looking for the largest batch of {source.name} within {budget}"):
        return largest_batches(
            trace, parse_budget(budget, plain_bytes), batch_size=first, planner=planner, time_limit_s=time_limit_s
        )


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "overhead": plan.overhead,
        "overhead_lower_bound": plan.overhead_lower_bound,
        "lower_bound_meaning": plan.lower_bound_meaning,
        "recomputed": plan.recomputed,
        "plan_seconds": plan.plan_seconds,
    }


def _plan_as_json(
    source: Source, graph: Graph, plan: Plan, plain: Breakdown, planned: Breakdown, batches: LargestBatches | None
) -> dict[str, Any]:
    fits = fits_device(source.device, plan)
    return {
        "source": source.name,
        "ops": len(graph.ops),
        "planner": plan.planner,
        **_figures(plan),
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "time_s": plan.time_s,
        "baseline_time_s": plan.baseline_time_s,
        "fingerprint": plan.fingerprint,
        "fits": None if fits is None else {key: value for key, value in fits.items() if key != "sentence"},
        "breakdown": {"plain": plain.size_bytes, "planned": planned.size_bytes},
        "largest_at_peak": _largest_as_json(graph, planned),
        "assumed": list(graph.notes),
        "max_batch": None if batches is None else dataclasses.asdict(batches),
        "schedule": list(plan.schedule),
    }


def _largest_as_json(graph: Graph, found: Breakdown) -> list[dict[str, Any]]:
    return [
        {
            "tensor": live.tensor,
            "name": graph.tensors[live.tensor].name,
            "size_bytes": live.size_bytes,
            "category": live.category,
            "op": live.op,
            "layer": "" if live.op is None else layer_of(graph, live.op),
            "source": "" if live.op is None else graph.ops[live.op].source,
        }
        for live in found.largest
    ]
