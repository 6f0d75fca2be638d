"""The zoo's records as Markdown: a table for each model, and one line for all of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.zoo.frame import scatter
from benchmarks.zoo.frame.measure import CAPTURED

HEAD: Final = (
    "| method | peak MiB | of plain | time | predicted | planning s | compiling s | difference |\n"
    "|---|---|---|---|---|---|---|---|"
)

_LEFT_OUT: Final = (
    "A second figure of MiB is what the framework's counter leaves out (TensorFlow's: blocks below 256 KiB), at most, "
    "and maybe at another moment; budgets and predictions count it, and so do shares of plain."
)

_BESIDE_CAPTURED: Final = (
    f'remat runs these steps itself, in place of the framework. Where "{CAPTURED}" was measured ({{models}} models), '
    "extra time above is that beside it; the times below are beside the framework's own step."
)

_WITHOUT_PAGES: Final = (
    "Of {models} models extra time above is without what a step takes for pages that the C library gives back to the "
    "system and fetches anew, of which predictions know nothing: {share:.1%} of a plain step in the median, {most:.0%} "
    "at most. The times below have it."
)

_TELLING: Final = ("more than the budget of", "over its budget", "the allocator's rounding may take it to")
"""Of remat's warnings, parts of those that say that a budget was broken, or may be."""


def as_markdown(framework: str, records: Sequence[dict[str, Any]], where: str) -> str:
    """The whole page.

    Args:
        framework: its name.
        records: of the models.
        where: one line about the machine and the versions.
    """
    parts = [f"# The zoo: {framework}", "", where, "", summary(records), ""]
    if said := planning(records):
        parts += [said, ""]
    if found := scatter.predictions(records):
        picture = f"([picture](zoo-{framework}.png))"
        parts += [f"{scatter.summary(found)} The same by budget {picture}:", "", *scatter.table(found), ""]
    if captured := sum(line["method"] == CAPTURED for record in records for line in record.get("lines", [])):
        parts += [_BESIDE_CAPTURED.format(models=captured), ""]
    if said := _pages(records):
        parts += [said, ""]
    if any(line.get("beside_bytes") for record in records for line in record.get("lines", [])):
        parts += [_LEFT_OUT, ""]
    for record in records:
        parts += [f"## {record['model']}", "", *_table_of(record), ""]
    return "\n".join(parts)


def summary(records: Sequence[dict[str, Any]]) -> str:
    """How many models ran, how many plans were over their budget, how many were refused at a peer's bytes."""
    lines = [line for record in records for line in record.get("lines", [])]
    planned = [line for line in lines if line["method"].startswith("remat")]
    over = sum(bool(line.get("is_over")) for line in planned)
    silent = sum(bool(line.get("is_over")) and not _is_told(line) for line in planned)
    refused = sum(line.get("error", "").startswith("refused") for line in planned if "bytes of" in line["method"])
    broken = sum("error" in line and not line["error"].startswith("refused") for line in planned)
    failed = sum("error" in record for record in records)
    return (
        f"{len(records)} models, {failed} of which did not run; {len(planned)} plans: {over} over their budget by "
        f"more than 1 %, {silent} of them without a word, "
        f"{refused} refused at the bytes of a peer, {broken} ended by another error."
    )


def _pages(records: Sequence[dict[str, Any]]) -> str:
    """What pages take of plain steps, where that was told apart; nothing where it was not."""
    plain = [record["lines"][0] for record in records if record.get("lines")]
    shares = [line["pages_s"] / line["step_s"] for line in plain if "pages_s" in line]
    if not shares:
        return ""
    return _WITHOUT_PAGES.format(models=len(shares), share=statistics.median(shares), most=max(shares))


def planning(records: Sequence[dict[str, Any]]) -> str:
    """What planning takes beside compiling the plain step; nothing where refusals were not timed."""
    plans: list[float] = []
    refusals: list[float] = []
    for record in records:
        plain, *lines = record.get("lines") or [{}]
        if plain.get("compiling_s"):
            plans += [line["planning_s"] / plain["compiling_s"] for line in lines if line.get("planning_s")]
            refusals += [line["refusing_s"] / plain["compiling_s"] for line in lines if line.get("refusing_s")]
    if not refusals:
        return ""
    return (
        f"Planning takes {statistics.median(plans):.2f} times what compiling the plain step takes (processor time, "
        f"median of {len(plans)} plans), and {statistics.median([*plans, *refusals]):.2f} times with {len(refusals)} "
        "refusals, of which most are for a budget of one byte."
    )


def _table_of(record: dict[str, Any]) -> list[str]:
    if "error" in record:
        return [f"Did not run: {record['error']}"]
    plain_bytes = _all_bytes(record["lines"][0])
    return [HEAD, *(_row(line, plain_bytes) for line in record["lines"])]


def _row(line: dict[str, Any], plain_bytes: int) -> str:
    if "error" in line:
        return f"| {line['method']} | {line['error'].replace('|', '/')} | | | | | | |"
    predicted = "" if line["predicted"] is None else f"{line['predicted']:+.0%}"
    planning = "" if not line["planning_s"] else f"{line['planning_s']:.1f}"
    figures = [
        f"{line['peak_bytes'] / 2**20:.2f}{_beside(line)}{_over(line)}",
        f"{_all_bytes(line) / plain_bytes:.0%}",
        "" if line.get("relative_time") is None else f"{line['relative_time']:.2f}",
        predicted,
        planning,
        f"{line['compiling_s']:.1f}",
        f"{line['difference']:.1e}{_sensitivity(line)}",
    ]
    return f"| {line['method']}{_mode(line)} | {' | '.join(figures)} |"


def _all_bytes(line: dict[str, Any]) -> int:
    return int(line.get("peak_bytes", 0) + line.get("beside_bytes", 0))


def _beside(line: dict[str, Any]) -> str:
    """What the counter leaves out."""
    beside = line.get("beside_bytes", 0)
    return f" + {beside / 2**20:.2f}" if beside else ""


def _sensitivity(line: dict[str, Any]) -> str:
    value = line.get("sensitivity")
    return "" if value is None else f" ({value:.1e} after rounding of weights)"


def _mode(line: dict[str, Any]) -> str:
    return f" ({line['mode']})" if line.get("mode") else ""


def _over(line: dict[str, Any]) -> str:
    if not line["is_over"]:
        return ""
    return f" ({line['of_budget']:.1%} of the budget, {'told' if _is_told(line) else 'without a word'})"


def _is_told(line: dict[str, Any]) -> bool:
    """Did a warning say that the budget was broken, or that it may be?"""
    return any(words in line.get("said", "") for words in _TELLING)
