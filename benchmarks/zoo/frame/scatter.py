"""Predicted beside measured extra time, over the plans of a zoo: how far they are apart, and a picture of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_COLORS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito's, told apart by the colour-blind.
_BYTES_OF: Final = "bytes of a peer"


@dataclass(frozen=True)
class Prediction:
    """One plan of one model.

    Attributes:
        model: its name.
        method: the budget that the plan keeps.
        predicted: extra time as a share of the plain step.
        measured: the same, in processor time.
    """

    model: str
    method: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How much more was predicted than measured."""
        return self.predicted - self.measured


def predictions(records: Sequence[dict[str, Any]]) -> list[Prediction]:
    """All plans that predict something and were run."""
    return [
        Prediction(record["model"], line["method"], line["predicted"], line["relative_time"] - 1)
        for record in records
        for line in record.get("lines", [])
        if line["method"].startswith("remat") and line.get("predicted") is not None and "relative_time" in line
    ]


def summary(found: Sequence[Prediction]) -> str:
    """The mean and the worst error, in points of the plain step's time; nothing where nothing was predicted."""
    if not found:
        return ""
    worst = max(found, key=lambda one: abs(one.error))
    return (
        f"Extra time, predicted less measured, {len(found)} plans of {len({one.model for one in found})} models: "
        f"{_points(statistics.mean(one.error for one in found))} points in the mean, "
        f"{100 * statistics.mean(abs(one.error) for one in found):.1f} without its sign, "
        f"{_points(worst.error)} at worst ({worst.model}, {worst.method})."
    )


def draw(found: Sequence[Prediction], title: str, path: Path) -> None:
    """Measured against predicted; on the line the two are equal."""
    from matplotlib.figure import Figure

    from remat.report.plots import save_figure

    figure = Figure(figsize=(6.5, 5.5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    kinds = list(dict.fromkeys(_kind(one) for one in found))
    for kind, color in zip(kinds, _COLORS, strict=False):
        own = [one for one in found if _kind(one) == kind]
        x, y = [100 * one.predicted for one in own], [100 * one.measured for one in own]
        axes.plot(x, y, linestyle="", marker="o", markersize=5, alpha=0.7, color=color, label=kind)
    axes.axline((0, 0), slope=1, color="#888888", linewidth=1)
    axes.set(xlabel="predicted extra time (% of the plain step)", ylabel="measured extra time (%)", title=title)
    axes.legend(fontsize="small")
    save_figure(figure, path)


def _kind(one: Prediction) -> str:
    return _BYTES_OF if "bytes of" in one.method else one.method


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"
