"""``remat check``: does a planned step train as the plain one does?"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

import remat
from remat.cli.console import CommandError, print_json, progress
from remat.cli.measure_command import Budget, job, refuse_file
from remat.cli.options import Source
from remat.cli.plan_command import AsJson
from remat.cli.source import traced, workload_from_source
from remat.core.budget import format_bytes, parse_budget
from remat.running.machine import available_bytes

# Plain training runs too, and the weights, gradients and states of three runs are kept to be compared.
_SHARE_OF_MEMORY: Final = 0.5


def check_command(
    source: Source,
    budget: Budget = "60%",
    steps: Annotated[int, typer.Option(help="Steps of training to compare.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Train a few steps plain and planned; compare gradients, weights, statistics, random states and peaks.

    Ends with exit code 0 where everything is equal but for rounding and the budget is kept, 1 otherwise.
    """
    refuse_file(source, "check")
    source.check_device()
    parse_budget(budget, baseline_peak_bytes=1 << 60)
    fitting = _that_fits(source)
    with progress(f"Checking {source.name} within {budget}"):
        result, _ = job(
            {"job": "check", "source": dataclasses.asdict(fitting), "budget": budget, "steps": steps},
            f"checking {source.name}",
        )
    if as_json:
        print_json({"source": source.name, "batch_size": fitting.batch_size, **result})
    else:
        console = Console()
        if fitting.batch_size != source.batch_size:
            console.print(f"At batch size {fitting.batch_size}, where the plain step fits into this machine's memory.")
        console.print(_table(source, result))
        console.print(f"{source.name}: {result['verdict']}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if result["passed"] else 1)


def _that_fits(source: Source) -> Source:
    """The source at the given batch size, or the largest half, quarter and so on at which plain training fits here.

    Raises:
        CommandError: where not even one sample fits.
    """
    free = available_bytes()
    workload = workload_from_source(source)
    graph = traced(source, workload)
    if free is None or workload.batch_size is None:
        return source
    samples, fitting = workload.batch_size, source
    while (peak := remat.simulate(graph, graph.plain_schedule).peak_bytes) > free * _SHARE_OF_MEMORY:
        if samples == 1:
            raise CommandError(
                f"{source.name}: plain training needs {format_bytes(peak)} for one sample, and {format_bytes(free)} "
                "are free here; check a smaller version of the model"
            )
        samples //= 2
        fitting = dataclasses.replace(source, batch_size=samples)
        graph = traced(fitting, workload_from_source(fitting))
    return fitting


def _table(source: Source, result: dict[str, Any]) -> Table:
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
    kept = result["planned_peak_bytes"] <= result["budget_bytes"]
    peaks = f"{format_bytes(result['plain_peak_bytes'])} -> {format_bytes(result['planned_peak_bytes'])}"
    table.add_row("measured peak", "", peaks, format_bytes(result["budget_bytes"]), "kept" if kept else "exceeded")
    return table
