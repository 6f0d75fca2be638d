"""The commands. Each reads its arguments, calls the core and prints; whatever else it needs lies beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

import remat
from remat.cli.console import (
    CommandError,
    OneLineErrors,
    check_installed,
    check_output_path,
    check_time_limit,
    counted_progress,
    print_json,
    progress,
)
from remat.cli.source import ModelOptions, graph_from_source
from remat.cost_model import profile_names
from remat.graph import Graph
from remat.plan import Plan
from remat.report import text
from remat.simulator import Timeline

app: Final = typer.Typer(
    name="remat",
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train the model that does not fit: exact recomputation, planned to a byte budget.",
    epilog="Errors are one line; set REMAT_TRACEBACK=1 to see tracebacks and frameworks' own logs.",
)

MODEL: Final = "Where SOURCE is a model"

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="A graph file (.json, .json.gz), or module:callable that returns a Keras model."
    ),
]
PlannerName = Annotated[str, typer.Option("--planner", help="Name of the planner.")]
Kwargs = Annotated[
    str | None,
    typer.Option("--kwargs", help="The callable's arguments, as a JSON object.", metavar="JSON", rich_help_panel=MODEL),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", help="Samples in a batch; 32 if not given.", min=1, rich_help_panel=MODEL)
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help=f"Whose speed predicts the times: {', '.join(profile_names())}.",
        metavar="NAME",
        rich_help_panel=MODEL,
    ),
]
Loss = Annotated[
    str | None, typer.Option("--loss", help="Name of a Keras loss.", metavar="NAME", rich_help_panel=MODEL)
]
Optimizer = Annotated[
    str | None, typer.Option("--optimizer", help="Name of a Keras optimizer.", metavar="NAME", rich_help_panel=MODEL)
]
DtypePolicy = Annotated[
    str | None,
    typer.Option(
        "--dtype-policy",
        help="A Keras dtype policy, such as mixed_float16.",
        metavar="NAME",
        rich_help_panel=MODEL,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]


def main() -> None:
    """Run the command line and leave the process with its exit code: 0, or 2 for what the user can put right."""
    app(prog_name="remat")


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"remat {remat.__version__}")
        raise typer.Exit()


@app.command("plan")
def plan_command(
    source: Source,
    budget: Annotated[
        str, typer.Option(help="Peak bytes of a step: 4GiB, 512MB, 1000000, or 60% of the plain peak.")
    ] = "60%",
    planner: PlannerName = "auto",
    time_limit: Annotated[float | None, typer.Option(help="Seconds that the planner may take.", metavar="S")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.", metavar="FILE")] = None,
    as_json: AsJson = False,
    kwargs: Kwargs = None,
    batch_size: BatchSize = None,
    device: Device = None,
    loss: Loss = None,
    optimizer: Optimizer = None,
    dtype_policy: DtypePolicy = None,
    save_graph: Annotated[
        Path | None,
        typer.Option(
            help="Write the traced graph to this file (.json, .json.gz).", metavar="FILE", rich_help_panel=MODEL
        ),
    ] = None,
) -> None:
    """Find the cheapest schedule of a training step within a byte budget."""
    _check_planner(planner)
    _check_device(device)
    check_time_limit(time_limit)
    check_output_path(out, "--out", keep=[source, save_graph])
    check_output_path(save_graph, "--save-graph", keep=[source])
    if out is not None and out == save_graph:
        raise CommandError(f"--out {out} and --save-graph name the same file; choose two names")

    graph = graph_from_source(source, ModelOptions(kwargs, batch_size, device, loss, optimizer, dtype_policy))
    if save_graph is not None:
        graph.save(save_graph)
    with progress(f"Planning {len(graph.ops):,} ops for {budget}"):
        plan = remat.plan(graph, budget, planner, time_limit)
    if out is not None:
        plan.save(out)

    if as_json:
        print_json(_plan_json(source, graph, plan))
        return
    console = Console()
    console.print(text.plan_table(graph, plan, title=f"Plan for {source}"))
    if plan.recomputed:
        console.print(text.recomputed_kinds_table(graph, plan))
    for name, path in (("Plan", out), ("Graph", save_graph)):
        if path is not None:
            console.print(f"{name} written to {path}", markup=False, highlight=False, soft_wrap=True)


@app.command("frontier")
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
    kwargs: Kwargs = None,
    batch_size: BatchSize = None,
    device: Device = None,
    loss: Loss = None,
    optimizer: Optimizer = None,
    dtype_policy: DtypePolicy = None,
) -> None:
    """Show what each budget costs, from the smallest feasible peak to the plain one."""
    _check_planner(planner)
    _check_device(device)
    check_time_limit(time_limit)
    check_output_path(plot, "--plot", keep=[source])
    if plot is not None:
        _check_picture(plot)
    graph = graph_from_source(source, ModelOptions(kwargs, batch_size, device, loss, optimizer, dtype_policy))
    with counted_progress(f"Planning {len(graph.ops):,} ops") as on_plan:
        plans = remat.frontier(graph, points, planner, time_limit, on_plan=on_plan)
    if plot is not None:
        from remat.report import plots

        plots.save_figure(plots.frontier_figure(plans), plot)
    if as_json:
        print_json(_frontier_json(source, graph, plans))
        return
    console = Console()
    console.print(text.frontier_table(plans, title=f"Frontier of {source}"))
    console.print(f"Lower bound: {plans[0].lower_bound_meaning}", markup=False, highlight=False)
    if plot is not None:
        console.print(f"Picture written to {plot}", markup=False, highlight=False, soft_wrap=True)


@app.command("simulate")
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
    if plot is not None:
        _check_picture(plot)
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
        print_json(_timeline_json(graph, schedule, timeline))
        return
    console = Console()
    what = "Plain step" if plan is None else f"Step planned by {plan.planner}"
    console.print(text.timeline_table(graph, schedule, timeline, title=f"{what} of {graph_file}"))
    if timeline.live_at_peak:
        console.print(text.live_tensors_table(graph, timeline))
    if plot is not None:
        console.print(f"Picture written to {plot}", markup=False, highlight=False, soft_wrap=True)


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the tables and pictures.", metavar="FOLDER")] = Path(
        "remat-demo"
    ),
    budget: Annotated[list[str] | None, typer.Option(help="A budget to train under; may be given again.")] = None,
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option(help="Fewer steps: a check that it works, not a result.")] = False,
) -> None:
    """Train two real models, plain and under byte budgets, and compare numbers, memory and time."""
    check_installed("tensorflow", "keras", "sklearn", "matplotlib")
    from remat.demo import run_demo

    code: int = run_demo(out, json_output=as_json, budgets=budget or ["60%", "40%", "25%"], quick=quick)
    raise typer.Exit(code)


def _check_planner(name: str) -> None:
    from remat.planners import get_planner

    try:
        get_planner(name)
    except ValueError as error:
        raise CommandError(f"--planner {name}: {error}") from error


def _check_device(name: str | None) -> None:
    if name is not None and name.lower() not in profile_names():
        raise CommandError(
            f"--device {name}: there is no device profile of this name; choose one of {', '.join(profile_names())}"
        )


def _check_picture(path: Path) -> None:
    from remat.report import plots

    try:
        plots.check_picture_path(path)
    except ValueError as error:
        raise CommandError(f"--plot {error}") from error


def _plan_json(source: str, graph: Graph, plan: Plan) -> dict[str, Any]:
    return {
        "source": source,
        "ops": len(graph.ops),
        "planner": plan.planner,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "overhead": plan.overhead,
        "overhead_lower_bound": plan.overhead_lower_bound,
        "lower_bound_meaning": plan.lower_bound_meaning,
        "time_s": plan.time_s,
        "baseline_time_s": plan.baseline_time_s,
        "recomputed": plan.recomputed,
        "plan_seconds": plan.plan_seconds,
        "fingerprint": plan.fingerprint,
        "schedule": list(plan.schedule),
    }


def _frontier_json(source: str, graph: Graph, plans: tuple[Plan, ...]) -> dict[str, Any]:
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


def _timeline_json(graph: Graph, schedule: tuple[int, ...], timeline: Timeline) -> dict[str, Any]:
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
