"""The commands by name. Each reads its arguments, calls the rest of remat, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

import remat
from remat.cli.console import OneLineErrors
from remat.cli.doctor_command import doctor_command
from remat.cli.options import AsJson, check_installed, takes_a_source
from remat.cli.plan_commands import frontier_command, plan_command
from remat.cli.replay_commands import report_command, simulate_command
from remat.cli.step_commands import check_command, measure_command

app: Final = typer.Typer(
    name="remat",
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train the model that does not fit: exact recomputation, planned to a byte budget.",
    epilog="Errors are one line; set REMAT_TRACEBACK=1 to see tracebacks and frameworks' own logs.",
)


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


app.command("plan")(takes_a_source(plan_command))
app.command("frontier")(takes_a_source(frontier_command))
app.command("simulate")(simulate_command)
app.command("report")(report_command)
app.command("measure")(takes_a_source(measure_command))
app.command("check")(takes_a_source(check_command))
app.command("doctor")(doctor_command)


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
