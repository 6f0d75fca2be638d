"""The table that the benchmarks of slices write: a row for each way to run a model, beside the plain one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat.core.budget import format_bytes
from remat.running import machine


def table(title: str, about: str, lines: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown.

    Args:
        title: its heading.
        about: what stands above it, behind the machine: the framework, and what the columns mean.
        lines: one for each row, the first of each model being plain: "model", "way", "peak_bytes", "time_s", "slices",
            "recomputed", "difference", and "grown_bytes" where that was measured.
    """
    where = machine.described()
    text = [f"# {title}", "", f"{where['system']} {where['processor']}, {where['cores']} cores; {about}"]
    columns = ["peak", "of plain", "s a step", "slices", "runs again", "difference"]
    if any("grown_bytes" in line for line in lines):
        columns.insert(2, "grown")
    for model in dict.fromkeys(line["model"] for line in lines):
        own = [line for line in lines if line["model"] == model]
        text += ["", f"## {model}", "", f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        for line in own:
            share = line["peak_bytes"] / own[0]["peak_bytes"]
            figures = [format_bytes(line["peak_bytes"]), f"{share:.1%}"]
            figures += [format_bytes(line["grown_bytes"])] if "grown_bytes" in line else []
            figures += [f"{line['time_s']:.2f}", line["slices"], line["recomputed"], f"{line['difference']:.1e}"]
            text.append(f"| {line['way']} | {' | '.join(figures)} |")
    return "\n".join(text) + "\n"
