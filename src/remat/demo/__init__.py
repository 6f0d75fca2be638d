"""``remat demo``: two real models, plain and under byte budgets; numbers, memory and time side by side."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from remat.core.budget import check_budget
from remat.core.files import write_json
from remat.demo import show
from remat.demo.results import TOLERANCE, Line, compare
from remat.demo.training import train

__all__ = ["run_demo"]

_MODELS: Final = ("residual", "transformer")
_WIDTH_IN_FILES: Final = 150  # Columns that the tables need to show each run in one line.


def run_demo(out: Path, *, json_output: bool, budgets: Sequence[str], quick: bool = False) -> int:
    """Train two models on scikit-learn's digits, plain and under each budget, and compare.

    Every run has a process of its own. A budget in percent is handed to ``limit_memory`` as it is, which takes the
    share of the plain step's predicted peak; the table shows the bytes that this comes to.

    Args:
        out: folder for ``demo.json`` and the pictures; made if missing. Nothing is written before all runs have ended.
        json_output: print the JSON object on stdout instead of the tables.
        budgets: as ``remat.keras.limit_memory`` takes them; at least one.
        quick: one small model under the first budget only.

    Returns:
        0, or 1 where a measured peak is over its budget or weights differ by more than float rounding; stderr then
        says which.

    Raises:
        InvalidBudget: if a budget cannot be read.
        JobFailed: if a run does not come to its end, for example because its budget cannot be kept.
        OSError: if the folder cannot be made.
    """
    budgets = list(dict.fromkeys(budgets))
    if not budgets:
        raise ValueError('the demo needs at least one budget, such as "60%"')
    for budget in budgets:
        check_budget(budget)
    models = _MODELS[:1] if quick else _MODELS
    if quick:
        budgets = budgets[:1]
    out.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()
    results: dict[str, tuple[Line, ...]] = {}
    choices: list[str | None] = [None, *budgets]
    with _progress(len(models) * len(choices)) as step:
        for model in models:
            runs = []
            for choice in choices:
                step.start(f"{model}, {'plain' if choice is None else choice}")
                runs.append(train(model, choice, quick=quick))
                step.done()
            results[model] = compare(runs)
    report = show.to_json(results, seconds=time.perf_counter() - started)
    pictures = show.save_pictures(out, results)
    write_json(out / "demo.json", report)

    if json_output:
        import json

        print(json.dumps(report, allow_nan=False))
    else:
        _print_tables(results, out, pictures, report["seconds"])
    for failure in report["failures"]:
        print(f"remat: {failure}", file=sys.stderr)
    return 0 if report["passed"] else 1


def _print_tables(results: dict[str, tuple[Line, ...]], out: Path, pictures: Sequence[Path], seconds: float) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_IN_FILES)
    for model, lines in results.items():
        console.print(show.table(model, lines))
    if not any(line.failures for lines in results.values() for line in lines):
        console.print(
            f"Every measured peak is within its budget, and all weights equal those of plain training to within "
            f"{TOLERANCE:g} of their size.",
            soft_wrap=True,
        )
    console.print(
        f"{out / 'demo.json'} and {len(pictures)} pictures written in {seconds:.0f} s.", highlight=False, soft_wrap=True
    )


class _Steps(Protocol):
    def start(self, what: str) -> None: ...
    def done(self) -> None: ...


@contextmanager
def _progress(total: int) -> Iterator[_Steps]:
    """A bar on stderr; where that is no terminal, a line for each run."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Training", total=total)

        class Steps:
            count = 0

            def start(self, what: str) -> None:
                self.count += 1
                bar.update(task, description=f"Training {what}")
                if not console.is_terminal:
                    print(f"remat: run {self.count} of {total}: {what}", file=sys.stderr, flush=True)

            def done(self) -> None:
                bar.advance(task)

        yield Steps()
