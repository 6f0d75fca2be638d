"""``remat measure`` and ``remat check``: the step run plain and planned, and what that shows.

Both run the user's model in fresh processes (``step_job``), so that nothing of one run counts in another.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

import remat
from remat.cli.console import CommandError, print_json, print_line, progress
from remat.cli.options import DEFAULT_BUDGET, AsJson, Budget, Source
from remat.cli.source import is_file, traced, workload_from_source
from remat.cli.step_job import run_step_job
from remat.core.budget import check_budget, format_bytes
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.report.text import format_time
from remat.running import machine
from remat.running.cost_model import MEASURED, device_here

# `remat check` trains at a batch for which the plain step, with so many copies of the weights and states, takes this
# share of the free memory at most: those of three runs are kept to be compared. A PyTorch step of 1.5 GiB, .3 of them
# weights and states, took 3.7 in all, the framework's own among them. A larger share could end the process.
_COPIES: Final = 3
_SHARE_OF_MEMORY: Final = 0.6


def measure_command(
    source: Source,
    budget: Budget = DEFAULT_BUDGET,
    steps: Annotated[int, typer.Option(help="Steps to run; the first one is left out of the time.", min=2)] = 5,
    calibrate: Annotated[
        bool, typer.Option(help="Time some operations first, and keep the speed of this machine as --device measured.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Run the step plain and planned in fresh processes; show predicted and measured peaks and times."""
    _refuse_file(source, "measure")
    check_budget(budget)
    source.check_device(calibrates=calibrate)
    calibration = None
    if calibrate:
        with progress("Timing operations for the cost model"):
            calibration, _ = run_step_job("calibrate", source, doing="timing operations")
        source = dataclasses.replace(source, device=source.device or device_here(MEASURED))
    with progress(f"Training the plain step of {source.name}"):
        plain, _ = run_step_job("train", source, doing="training the plain step", budget=None, steps=steps)
    with progress(f"Training the step of {source.name} within {budget}"):
        planned, plan = run_step_job("train", source, doing=f"training within {budget}", budget=budget, steps=steps)
    assert plan is not None
    if as_json:
        print_json(_measure_as_json(source, plain, planned, plan, calibration))
        return
    console = Console()
    console.print(_measure_table(source, plain, planned, plan, calibration))
    if calibration is not None:
        print_line(
            f"This machine: {calibration['flops_per_s'] / 1e9:,.0f} GFLOP/s, "
            f"{calibration['bytes_per_s'] / 1e9:,.1f} GB/s, {format_time(calibration['overhead_s'])} to launch an "
            f"operation; kept in {calibration['path']} for --device measured"
        )


def check_command(
    source: Source,
    budget: Budget = DEFAULT_BUDGET,
    steps: Annotated[int, typer.Option(help="Steps of training to compare.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Train a few steps plain and planned; compare gradients, weights, statistics, random states and peaks.

    Ends with exit code 0 where everything is equal but for rounding and the budget is kept, 1 otherwise.
    """
    _refuse_file(source, "check")
    source.check_device()
    check_budget(budget)
    fitting = _fitting_batch(source)
    with progress(f"Checking {source.name} within {budget}"):
        result, _ = run_step_job("check", fitting, doing=f"checking {source.name}", budget=budget, steps=steps)
    if as_json:
        print_json({"source": source.name, "batch_size": fitting.batch_size, **result})
    else:
        console = Console()
        if fitting.batch_size != source.batch_size:
            console.print(f"At batch size {fitting.batch_size}, where the plain step fits into this machine's memory.")
        console.print(_check_table(source, result))
        print_line(f"{source.name}: {result['verdict']}")
    raise typer.Exit(0 if result["passed"] else 1)


def _refuse_file(source: Source, command: str) -> None:
    """Make sure that a source can be run.

    Raises:
        CommandError: for a graph file.
    """
    if is_file(source):
        raise CommandError(
            f"{source.name} is a graph file, which cannot be run; `remat {command}` needs a model as module:callable"
        )


def _measure_table(
    source: Source, plain: dict[str, Any], planned: dict[str, Any], plan: Plan, calibration: dict[str, Any] | None
) -> Table:
    runs = (
        ("plain", plain, plan.baseline_peak_bytes, 0.0),
        (f"within {format_bytes(plan.budget_bytes)}", planned, plan.peak_bytes, plan.expected_overhead),
    )
    table = Table(title=f"Measured: {source.name}", title_justify="left", title_style="bold")
    table.add_column("A step", no_wrap=True)
    for name, *_ in runs:
        table.add_column(name, justify="right")
    table.add_row("Predicted peak", *(format_bytes(predicted) for _, _, predicted, _ in runs))
    table.add_row("Measured peak", *(_peak(found["peak_bytes"]) for _, found, _, _ in runs))
    table.add_row("Prediction off by", *(_off_by(predicted, found["peak_bytes"]) for _, found, predicted, _ in runs))
    table.add_section()
    if calibration is not None:
        table.add_row("Predicted time", *(format_time(calibration["plain_time_s"] * (1 + o)) for *_, o in runs))
    table.add_row("Measured time", *(format_time(found["step_time_s"]) for _, found, _, _ in runs))
    table.add_row("Predicted against plain", *(f"{1 + overhead:.2f} x" for *_, overhead in runs))
    table.add_row(
        "Measured against plain", *(f"{f['step_time_s'] / plain['step_time_s']:.2f} x" for _, f, _, _ in runs)
    )
    return table


def _peak(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else "no counter"


def _off_by(predicted_bytes: int, measured_bytes: int) -> str:
    return f"{predicted_bytes / measured_bytes - 1:+.1%}" if measured_bytes else ""


def _measure_as_json(
    source: Source, plain: dict[str, Any], planned: dict[str, Any], plan: Plan, calibration: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "source": source.name,
        "machine": {**machine.described(), **machine.versions()},
        "budget_bytes": plan.budget_bytes,
        "recomputed": plan.recomputed,
        "mode": plan.mode,
        "plain": {
            "predicted_peak_bytes": plan.baseline_peak_bytes,
            "measured_peak_bytes": plain["peak_bytes"],
            "measured_time_s": plain["step_time_s"],
            "losses": plain["losses"],
        },
        "planned": {
            "predicted_peak_bytes": plan.peak_bytes,
            "measured_peak_bytes": planned["peak_bytes"],
            "measured_time_s": planned["step_time_s"],
            "losses": planned["losses"],
        },
        "predicted_overhead": plan.expected_overhead,
        "measured_overhead": planned["step_time_s"] / plain["step_time_s"] - 1,
        "calibration": calibration,
    }


def _fitting_batch(source: Source) -> Source:
    """The source at the given batch size, or the largest half, quarter and so on at which plain training fits here.

    Raises:
        CommandError: where not even one sample fits.
    """
    free = machine.available_bytes()
    workload = workload_from_source(source)
    graph = traced(source, workload)
    if free is None or workload.batch_size is None:
        return source
    samples, fitting = workload.batch_size, source
    while (needed := _bytes_of_check(graph)) > free * _SHARE_OF_MEMORY:
        if samples == 1:
            raise CommandError(
                f"{source.name}: a check needs {format_bytes(int(needed / _SHARE_OF_MEMORY))} for one sample, and "
                f"{format_bytes(free)} are free here; check a smaller version of the model"
            )
        samples //= 2
        fitting = dataclasses.replace(source, batch_size=samples)
        graph = traced(fitting, workload_from_source(fitting))
    return fitting


def _bytes_of_check(graph: Graph) -> int:
    return remat.simulate(graph, graph.plain_schedule).peak_bytes + _COPIES * graph.pinned_bytes


def _check_table(source: Source, result: dict[str, Any]) -> Table:
    table = Table(title=f"Check of {source.name}", title_justify="left", title_style="bold")
    for heading in ("Plain against planned", "Arrays", "Largest difference", "Rounding allows", ""):
        table.add_column(heading, justify="right" if heading in ("Arrays", "Largest difference") else "left")
    for one in result["comparisons"]:
        is_equal = one["difference"] <= one["allowed"]
        exact = one["allowed"] == 0
        table.add_row(
            one["what"],
            f"{one['count']:,}",
            f"{one['difference']:.0f} unequal" if exact else f"{one['difference']:.1e}",
            "none" if exact else f"{one['allowed']:.1e}",
            "equal" if is_equal else f"different: {one['worst']}",
            style=None if is_equal else "red",
        )
    table.add_section()
    peaks = f"{_peak(result['plain_peak_bytes'])} -> {_peak(result['planned_peak_bytes'])}"
    kept = "kept" if result["planned_peak_bytes"] <= result["budget_bytes"] else "exceeded"
    table.add_row(
        *("measured peak", "", peaks, format_bytes(result["budget_bytes"])),
        kept if result["planned_peak_bytes"] else "not measured",
    )
    return table
