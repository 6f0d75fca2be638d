"""``remat measure``: run the step plain and planned, each in a fresh process, beside what was predicted."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from remat.cli.console import CommandError, print_json, progress, traceback_wanted
from remat.cli.job import PLAN_FILE, RESULT_FILE
from remat.cli.options import Source
from remat.cli.plan_command import AsJson
from remat.cli.source import is_file
from remat.core.budget import format_bytes, parse_budget
from remat.core.files import read_json
from remat.core.plan import Plan, load_plan
from remat.report.text import format_time
from remat.running import machine
from remat.running.cost_model import MEASURED, device_here
from remat.running.process import run_job

JOB: Final = "remat.cli.job"
TIME_LIMIT_S: Final = 3600.0
Budget = Annotated[str, typer.Option(help="Peak bytes of a step: 4GiB, 512MB, 1000000, or 60% of the plain peak.")]


def measure_command(
    source: Source,
    budget: Budget = "60%",
    steps: Annotated[int, typer.Option(help="Steps to run; the first one is left out of the time.", min=2)] = 5,
    calibrate: Annotated[
        bool, typer.Option(help="Time some operations first, and keep the speed of this machine as --device measured.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Run the step plain and planned in fresh processes; show predicted and measured peaks and times."""
    refuse_file(source, "measure")
    parse_budget(budget, baseline_peak_bytes=1 << 60)
    source.check_device(calibrates=calibrate)
    calibration = None
    if calibrate:
        with progress("Timing operations for the cost model"):
            calibration, _ = job({"job": "calibrate", "source": asdict(source)}, "timing operations")
        source = replace(source, device=source.device or device_here(MEASURED))
    request = {"source": asdict(source), "steps": steps}
    with progress(f"Training the plain step of {source.name}"):
        plain, _ = job({**request, "job": "train", "budget": None}, "training the plain step")
    with progress(f"Training the step of {source.name} within {budget}"):
        planned, plan = job({**request, "job": "train", "budget": budget}, f"training within {budget}")
    assert plan is not None
    if as_json:
        print_json(_as_json(source, plain, planned, plan, calibration))
        return
    console = Console()
    console.print(_table(source, plain, planned, plan, calibration))
    if calibration is not None:
        console.print(
            f"This machine: {calibration['flops_per_s'] / 1e9:,.0f} GFLOP/s, "
            f"{calibration['bytes_per_s'] / 1e9:,.1f} GB/s, {format_time(calibration['overhead_s'])} to launch an "
            f"operation; kept in {calibration['path']} for --device measured",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def refuse_file(source: Source, command: str) -> None:
    """Make sure that a source can be run.

    Raises:
        CommandError: for a graph file.
    """
    if is_file(source):
        raise CommandError(
            f"{source.name} is a graph file, which cannot be run; `remat {command}` needs a model as module:callable"
        )


def job(request: dict[str, Any], doing: str) -> tuple[dict[str, Any], Plan | None]:
    """The result of a job in a fresh process, and the plan that it made."""

    def collect(folder: Path) -> tuple[dict[str, Any], Plan | None]:
        result: Any = read_json(folder / RESULT_FILE)
        plan = load_plan(folder / PLAN_FILE) if (folder / PLAN_FILE).exists() else None
        return result, plan

    return run_job(JOB, request, collect, doing=doing, time_limit_s=TIME_LIMIT_S, show_log=traceback_wanted())


def _table(
    source: Source, plain: dict[str, Any], planned: dict[str, Any], plan: Plan, calibration: dict[str, Any] | None
) -> Table:
    runs = (
        ("plain", plain, plan.baseline_peak_bytes, 0.0),
        (f"within {format_bytes(plan.budget_bytes)}", planned, plan.peak_bytes, plan.overhead),
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


def _as_json(
    source: Source, plain: dict[str, Any], planned: dict[str, Any], plan: Plan, calibration: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "source": source.name,
        "machine": {**machine.described(), **machine.versions()},
        "budget_bytes": plan.budget_bytes,
        "recomputed": plan.recomputed,
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
        "predicted_overhead": plan.overhead,
        "measured_overhead": planned["step_time_s"] / plain["step_time_s"] - 1,
        "calibration": calibration,
    }
