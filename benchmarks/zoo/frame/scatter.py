"""Predicted beside measured extra time, over the plans of a zoo: how far they are apart, and a picture of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.zoo.frame.measure import CAPTURED, SMALLEST
from benchmarks.zoo.frame.subject import PLAIN

HEAD: Final = (
    "| budget | plans | models | error in the mean | in the median | without its sign, mean | median | within 3 points "
    "| at worst |\n|---|---|---|---|---|---|---|---|---|"
)

NEAR: Final = 0.03
"""Of the plain step's time: a prediction so near is called good. What this project promises of its predictions."""
_NAMED: Final = 5
"""Plans whose models the picture names, the worst first. A judgement: more names lie over one another."""

_COLORS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito's, told apart by the colour-blind.
_MARKERS: Final = ("o", "s", "^", "D")
_BYTES_OF: Final = "in a peer's bytes"


@dataclass(frozen=True)
class Prediction:
    """One plan of one model.

    Attributes:
        model: its name.
        method: the budget that the plan keeps.
        predicted: extra time as a share of the plain step.
        measured: the same, in processor time; where remat runs the step itself, as a share of that step with nothing
            recomputed, if it was measured. Without what pages take where predictions know nothing of them.
    """

    model: str
    method: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How much more was predicted than measured."""
        return self.predicted - self.measured

    @property
    def kind(self) -> str:
        """The budget, without the peer's name where it is a peer's."""
        return _BYTES_OF if "bytes of" in self.method else self.method.removeprefix("remat").lstrip(", ")


def predictions(records: Sequence[dict[str, Any]]) -> list[Prediction]:
    """All plans that predict something and were run beside the plain step; refused ones and peers are none."""
    found: list[Prediction] = []
    for record in records:
        lines = record.get("lines", [])
        unplanned = _unplanned(lines)
        found += [
            Prediction(record["model"], line["method"], line["predicted"], _predictable(line) / unplanned - 1)
            for line in lines
            if line["method"].startswith("remat") and line["method"] != CAPTURED
            if line.get("predicted") is not None and "relative_time" in line
        ]
    return found


def _unplanned(lines: Sequence[dict[str, Any]]) -> float:
    """What predictions of a model compare with: the time of its step with nothing recomputed, or of the plain one."""
    timed = {line["method"]: line for line in lines if "relative_time" in line}
    line = timed.get(CAPTURED) or timed.get(PLAIN)
    return 1.0 if line is None else _predictable(line)


def _predictable(line: dict[str, Any]) -> float:
    """The time of a method beside the plain step's, without what it takes for pages where that is told apart."""
    if "pages_s" not in line:
        return float(line["relative_time"])
    return float(line["relative_time"] * (1 - line["pages_s"] / line["step_s"]))


def summary(found: Sequence[Prediction]) -> str:
    """The mean and the worst error, in points of the plain step's time; nothing where nothing was predicted."""
    if not found:
        return ""
    worst = _worst(found)
    return (
        f"Extra time, predicted less measured, {len(found)} plans of {len(_models(found))} models: "
        f"{_points(statistics.mean(one.error for one in found))} points in the mean, "
        f"{_size(statistics.mean(abs(one.error) for one in found))} without its sign, "
        f"{_points(worst.error)} at worst ({worst.model}, {worst.method})."
    )


def table(found: Sequence[Prediction]) -> list[str]:
    """Errors by budget in lines of Markdown, in points of the plain step's time; none where nothing was predicted.

    A model with many plans counts as often as it has plans, but in the last row: there each model counts once, with
    the median of its plans' errors.
    """
    if not found:
        return []
    rows = [_row(kind, [one for one in found if one.kind == kind]) for kind in _kinds(found)]
    medians = [
        statistics.median(abs(one.error) for one in found if one.model == model) for model in sorted(_models(found))
    ]
    rows += [
        _row("all", found),
        f"| each model's median | | {len(medians)} | | | {_size(statistics.mean(medians))} "
        f"| {_size(statistics.median(medians))} | {sum(one <= NEAR for one in medians)} | {_size(max(medians))} |",
    ]
    return [HEAD, *rows]


def draw(found: Sequence[Prediction], title: str, path: Path) -> None:
    """Measured against predicted: on the line the two are equal, within the band they are 3 points apart at most.

    The plans that are furthest from the line have their models' names.
    """
    from matplotlib.figure import Figure

    from remat.report.plots import save_figure

    figure = Figure(figsize=(7.5, 6.5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for kind, color, marker in zip(_kinds(found), _COLORS, _MARKERS, strict=False):
        own = [one for one in found if one.kind == kind]
        x, y = [100 * one.predicted for one in own], [100 * one.measured for one in own]
        axes.plot(x, y, linestyle="", marker=marker, markersize=5, alpha=0.7, color=color, label=f"{kind}: {len(own)}")
    # The limits of the points alone: a line or a band would widen them.
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    ends = [min(left, bottom), max(right, top)]
    near = 100 * NEAR
    axes.plot(ends, ends, color="#888888", linewidth=1, zorder=1, label="measured as predicted")
    lower, upper = ([end + shift for end in ends] for shift in (-near, near))
    axes.fill_between(ends, lower, upper, color="#888888", alpha=0.25, linewidth=0, label=f"within {near:g} points")
    for rank, one in enumerate(sorted(found, key=lambda one: -abs(one.error))[:_NAMED]):
        axes.annotate(
            f"{one.model}, {one.kind}",
            (100 * one.predicted, 100 * one.measured),
            # To the side with more room, and every other one higher, so that neighbours do not cover one another.
            xytext=(-6 if 100 * one.predicted > (left + right) / 2 else 6, 6 if rank % 2 else -8),
            textcoords="offset points",
            ha="right" if 100 * one.predicted > (left + right) / 2 else "left",
            fontsize="x-small",
        )
    axes.set(
        xlim=(left, right),
        ylim=(bottom, top),
        xlabel="predicted extra time (% of the plain step)",
        ylabel="measured extra time (% of the plain step's processor time)",
    )
    axes.set_title(f"{title}\n{_caption(found)}", fontsize="medium")
    axes.legend(fontsize="small")
    save_figure(figure, path)


def _caption(found: Sequence[Prediction]) -> str:
    errors = [abs(one.error) for one in found]
    return (
        f"{len(found)} plans of {len(_models(found))} models, {_size(statistics.mean(errors))} points apart in the "
        f"mean, {_size(statistics.median(errors))} in the median, {_size(max(errors))} at worst"
    )


def _row(kind: str, found: Sequence[Prediction]) -> str:
    errors = [one.error for one in found]
    sizes = [abs(error) for error in errors]
    worst = _worst(found)
    figures = [
        str(len(found)),
        str(len(_models(found))),
        _points(statistics.mean(errors)),
        _points(statistics.median(errors)),
        _size(statistics.mean(sizes)),
        _size(statistics.median(sizes)),
        str(sum(size <= NEAR for size in sizes)),
        f"{_points(worst.error)} ({worst.model})",
    ]
    return f"| {kind} | {' | '.join(figures)} |"


def _kinds(found: Sequence[Prediction]) -> list[str]:
    """Shares of the plain peak, the largest first, then the others."""
    shares = sorted({one.kind for one in found if one.kind.endswith("%")}, key=lambda kind: -float(kind.rstrip("%")))
    return [*shares, *(kind for kind in (SMALLEST, _BYTES_OF) if any(one.kind == kind for one in found))]


def _models(found: Sequence[Prediction]) -> set[str]:
    return {one.model for one in found}


def _worst(found: Sequence[Prediction]) -> Prediction:
    return max(found, key=lambda one: abs(one.error))


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _size(share: float) -> str:
    return f"{100 * share:.1f}"
