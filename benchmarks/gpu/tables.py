"""The results as Markdown, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import PARTS

MIB = 2**20


def write(target: Path, results: dict[str, Any]) -> None:
    """``target`` with three endings; each file is written whole."""
    target.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    target.with_suffix(".md").write_text("\n".join(_page(results)) + "\n")
    _picture(results, target.with_suffix(".png"))


def _page(results: dict[str, Any]) -> Sequence[str]:
    where = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    page = [
        f"# remat on {results['device']}",
        "",
        f"{results['date']}; {where['system']} {where['processor']}, {where['cores']} cores; {versions}."
        + (" Small models, to see that it works." if results["small"] else ""),
        "",
        "Differences are those of gradients, relative to the largest of them. 'Bits' says whether all are equal.",
        "Times are relative to plain steps that ran in turns with them. Peaks are the device's own counter, after the",
        "first steps; 'reserved' is what PyTorch's allocator took from the device meanwhile.",
    ]
    for part, meaning in PARTS.items():
        cases = {key: lines for key, lines in results["cases"].items() if key.startswith(f"{part}/")}
        if not cases:
            continue
        page += ["", f"## {part.capitalize()}: {meaning}"]
        if part == "library":
            page += ["", *_library(cases)]
            continue
        for key, lines in cases.items():
            page += ["", f"**{key.partition('/')[2]}**", "", *_table(part, lines)]
    if results["skipped"]:
        page += ["", f"Skipped for want of time: {', '.join(results['skipped'])}."]
    return page


def _table(part: str, lines: Sequence[dict[str, Any]]) -> list[str]:
    if part == "host":
        rows = [
            f"| {line['name']} | {_figure(line.get('forward_us'), '.1f')} | {_figure(line.get('backward_us'), '.1f')} |"
            for line in lines
            if "error" not in line
        ]
        return ["| host time, us an operator | forward | backward |", "|---|---|---|", *rows, *_errors(lines, 3)]
    if part == "laptop":
        return _laptop(lines)
    if part == "room":
        return _room(lines)
    if part == "calibration":
        rows = [
            f"| {line['name']} | {line['step_s'] * 1e3:.2f} | {line['predicted_step_s'] * 1e3:.2f} | "
            f"{line['predicted_step_s'] / line['step_s'] - 1:+.0%} |"
            for line in lines
            if "predicted_step_s" in line
        ]
        speeds = [f"{json.dumps(line)}" for line in lines if line["name"] == "speed"]
        head = ["| plain step | measured ms | predicted ms | error |", "|---|---|---|---|"]
        return [*speeds, "", *head, *rows, *_errors(lines, 4)]
    head = [
        "| method | budget MiB | predicted MiB | peak MiB | reserved MiB | predicted time | time | difference | bits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return [*head, *(_row(line) for line in lines if "error" not in line), *_errors(lines, 9)]


def _library(cases: dict[str, Sequence[dict[str, Any]]]) -> list[str]:
    """One table of all models: what each budget's peak is of it, and of what was predicted."""
    plain = "Bits of 'plain' say whether a second plain step gives the numbers of the first."
    head = ["| model | step | budget MiB | peak MiB | of budget | of predicted | difference | bits | mode |"]
    rows = []
    for key, lines in cases.items():
        model = " ".join(reversed(key.split("/")[2:]))
        for line in lines:
            if line["name"] != "plain":  # The second one says more.
                rows.append(_library_row(model, line))
    return [plain, "", *head, "|---|---|---|---|---|---|---|---|---|", *rows]


def _library_row(model: str, line: dict[str, Any]) -> str:
    if "error" in line:
        return f"| {' | '.join([model, line['name'], _error(line), *[''] * 6])} |"
    peak, budget, predicted = line["peak_bytes"], line.get("budget_bytes"), line.get("predicted_bytes")
    cells = [
        model,
        line["name"].replace("plain again", "plain"),
        _figure(budget and budget / MIB, ".1f"),
        f"{peak / MIB:.1f}",
        _figure(budget and peak / budget, ".3f"),
        _figure(predicted and peak / predicted, ".3f"),
        f"{line['difference']:.1e}",
        "equal" if line["equal_bits"] else "",
        f"{line.get('mode') or ''}{_told(line)}",
    ]
    return f"| {' | '.join(cells)} |"


def _told(line: dict[str, Any]) -> str:
    """Does a step that takes more than 1 % above its budget say so?"""
    if "budget_bytes" not in line or line["peak_bytes"] <= 1.01 * line["budget_bytes"]:
        return ""
    return "; it says so" if "more than was predicted" in line["said"] else "; without a word"


def _room(lines: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        f"| {line['name']} | {line['peak_bytes'] / MIB:.1f} | {_figure(line.get('share'), '.0%')} | {line['freed']} |"
        for line in lines
        if "error" not in line
    ]
    head = ["| step | peak MiB | runs where the allocator may take | times it gave back blocks |", "|---|---|---|---|"]
    return [*head, *rows, *_errors(lines, 4)]


def _laptop(lines: Sequence[dict[str, Any]]) -> list[str]:
    page = []
    for line in lines:
        if "calls" in line:
            page.append(
                f"Attention: of {line['calls']} calls {line['others']} take another kernel than the rules name."
            )
            page += ["", *(f"- {example}" for example in line["examples"])]
    page += ["", "| plain step | peak said elsewhere, MiB | said here | measured | operators that differ |"]
    page.append("|---|---|---|---|---|")
    for line in lines:
        if "elsewhere_bytes" in line:
            sizes = [line.get(name) for name in ("elsewhere_bytes", "here_bytes", "peak_bytes")]
            differ = ", ".join(f"{count} {kind}" for kind, count in line.get("differ", {}).items())
            page.append(f"| {' | '.join([line['name'], *(_figure(s and s / MIB, '.1f') for s in sizes), differ])} |")
    return [*page, *_errors(lines, 5)]


def _row(line: dict[str, Any]) -> str:
    sizes = [line.get(name) for name in ("budget_bytes", "predicted_bytes", "peak_bytes", "reserved_bytes")]
    cells = [
        line["name"],
        *(_figure(size and size / MIB, ".1f") for size in sizes),
        _figure(line.get("predicted_time"), ".2f"),
        _figure(line.get("relative_time"), ".2f"),
        f"{line['difference']:.1e}",
        "equal" if line["equal_bits"] else "",
    ]
    return f"| {' | '.join(cells)} |"


def _errors(lines: Sequence[dict[str, Any]], columns: int) -> list[str]:
    found = []
    for line in lines:
        if "error" in line:
            cells = [line["name"], _error(line), *[""] * (columns - 2)]
            found.append(f"| {' | '.join(cells)} |")
    return found


def _error(line: dict[str, Any]) -> str:
    """What stopped a step; of a refusal with the smallest budget."""
    smallest = f": smallest {line['smallest_bytes'] / MIB:.1f} MiB" if "smallest_bytes" in line else ""
    return f"{line['error']}{smallest}".replace("|", "/")


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


COLOURS = {"eager": "#E69F00", "graph": "#0072B2", "compiled": "#009E73", "jit": "#CC79A7"}


def _points(results: dict[str, Any]) -> dict[tuple[str, bool], list[tuple[float, float]]]:
    """Peak and time, both relative to plain, by engine and whether they are remat's."""
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for key, lines in results["cases"].items():
        if not key.startswith(("budgets/", "peers/")) or "peak_bytes" not in lines[0]:
            continue
        for line in lines[1:]:
            if "error" not in line and line["name"] != "plain again":
                at = (line["peak_bytes"] / lines[0]["peak_bytes"], line["relative_time"])
                found.setdefault((key.split("/")[2], line["name"].startswith("remat")), []).append(at)
    return found


def _picture(results: dict[str, Any], path: Path) -> None:
    """Time against peak, both relative to plain: what lies below and to the left is better."""
    from matplotlib.figure import Figure

    from remat.report.plots import save_figure

    figure = Figure(figsize=(9, 5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for (engine, ours), points in _points(results).items():
        colour = COLOURS.get(engine, "#000000")
        label = f"remat, {engine}" if ours else f"peers, {engine}"
        marker = "o" if ours else "s"
        axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, color=colour, label=label)
    axes.set(xlabel="peak, of the plain step's", ylabel="time, of the plain step's", xlim=(0, None), ylim=(0, None))
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.suptitle(f"remat on {results['device']}")
    save_figure(figure, path)
