"""The demo's results as a table, as JSON and as pictures."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from remat.core.budget import format_bytes
from remat.core.schedule import recomputed_ops
from remat.demo.results import TOLERANCE, Line
from remat.report import plots
from remat.report.text import format_time

TITLES: Final = {
    "residual": "Residual network with BatchNormalization",
    "transformer": "Transformer with dropout",
}


def table(model: str, lines: Sequence[Line]) -> Table:
    """The lines of one model as a table for the terminal."""
    shown = Table(title=TITLES[model], title_justify="left", title_style="bold")
    shown.add_column("Budget", no_wrap=True)
    for heading in (
        "Predicted peak",
        "Measured peak",
        "Predicted off by",
        "Step time",
        "Against plain",
        "Predicted",
        "Recomputed ops",
        "Final loss",
        "Accuracy",
        "Largest weight difference",
    ):
        shown.add_column(heading, justify="right")
    for line in lines:
        result, plan = line.run.result, line.run.plan
        shown.add_row(
            "plain" if line.budget_bytes is None else _budget(result.budget, line.budget_bytes),
            format_bytes(line.predicted_peak_bytes),
            format_bytes(result.measured_peak_bytes),
            f"{line.prediction_error:+.1%}",
            format_time(result.step_time_s),
            f"{line.relative_time:.2f} x",
            "" if plan is None else f"{1 + plan.expected_overhead:.2f} x",
            "" if plan is None else f"{len(recomputed_ops(plan.schedule)):,}",
            f"{result.final_loss:.6f}",
            f"{result.final_accuracy:.2%}",
            "" if line.difference is None else f"{line.difference.absolute:.1e}" if line.difference.absolute else "0",
            style="red" if line.failures else None,
        )
    return shown


def to_json(results: Mapping[str, Sequence[Line]], *, seconds: float) -> dict[str, Any]:
    """Everything that the tables show, and what they were made with."""
    failures = [failure for lines in results.values() for line in lines for failure in line.failures]
    versions = next(iter(results.values()))[0].run.result.versions
    return {
        "format": "remat.demo",
        "version": 1,
        "passed": not failures,
        "failures": failures,
        "tolerance": TOLERANCE,
        "seconds": seconds,
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **versions,
        },
        "models": [{"model": model, "runs": [_line_json(line) for line in lines]} for model, lines in results.items()],
    }


def save_pictures(folder: Path, results: Mapping[str, Sequence[Line]]) -> tuple[Path, ...]:
    """Draw memory over the step for each plan and, for each model, all losses on top of each other."""
    written = []
    for model, lines in results.items():
        losses = {line.run.result.budget or "plain": line.run.result.losses for line in lines}
        figure = plots.loss_figure(losses, x_label="step", title=f"{TITLES[model]}: training loss")
        written.append(_save(figure, folder / f"{model}-loss.png"))
        for line in lines:
            if line.run.plan is None or line.run.graph is None:
                continue
            budget = str(line.run.result.budget)
            figure = plots.memory_figure(line.run.graph, line.run.plan, title=f"{TITLES[model]}: memory over a step")
            written.append(_save(figure, folder / f"{model}-memory-{_in_file_name(budget)}.png"))
    return tuple(written)


def _line_json(line: Line) -> dict[str, Any]:
    result, plan, difference = line.run.result, line.run.plan, line.difference
    return {
        "budget": result.budget,
        "budget_bytes": line.budget_bytes,
        "predicted_peak_bytes": line.predicted_peak_bytes,
        "measured_peak_bytes": result.measured_peak_bytes,
        "prediction_error": line.prediction_error,
        "step_time_s": result.step_time_s,
        "plain_step_time_s": result.plain_time_s,
        "relative_step_time": line.relative_time,
        "first_step_s": result.first_step_s,
        "recomputed_ops": 0 if plan is None else len(recomputed_ops(plan.schedule)),
        "recomputed_runs": 0 if plan is None else plan.recomputed,
        "predicted_overhead": 0.0 if plan is None else plan.expected_overhead,
        "plan_seconds": 0.0 if plan is None else plan.plan_seconds,
        "final_loss": result.final_loss,
        "final_accuracy": result.final_accuracy,
        "largest_weight_difference": None if difference is None else _finite(difference.absolute),
        "largest_relative_weight_difference": None if difference is None else _finite(difference.relative),
        "losses": list(result.losses),
        "failures": list(line.failures),
    }


def _finite(value: float) -> float | None:
    """JSON knows no infinity; the line's failures then say what is wrong."""
    return value if math.isfinite(value) else None


def _budget(text: str | None, size_bytes: int) -> str:
    return f"{format_bytes(size_bytes)} ({text})" if text and text.strip().endswith("%") else format_bytes(size_bytes)


def _in_file_name(budget: str) -> str:
    return "".join(sign for sign in budget.replace("%", "pc") if sign.isalnum() or sign in ".-")


def _save(figure: Any, path: Path) -> Path:
    plots.save_figure(figure, path)
    return path
