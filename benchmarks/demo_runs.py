"""The demo five times: how much of each budget is used, and measured beside predicted extra time.

    python -m benchmarks.demo_runs [--runs 5]   # from the project's root, on a machine that does nothing else

A run is what ``remat demo`` does: each training has a process of its own, in which plain and planned epochs take turns.
Times are wall time on all cores. Writes ``benchmarks/results/demo-runs.md`` after each run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.where import here

RESULT: Final = Path(__file__).parent / "results" / "demo-runs.md"

HEAD: Final = (
    "| model | budget | MiB | predicted peak, of it | measured peak, of it | predicted extra time "
    "| measured, median | each run |\n|---|---|---|---|---|---|---|---|"
)


def one_run() -> list[dict[str, Any]]:
    """The planned lines of one demo."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [Path(sys.executable).with_name("remat"), "demo", "--json", "--out", folder],
            env={**os.environ, "REMAT_PLAN_CACHE": "off"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    report = json.loads(done.stdout.splitlines()[-1])
    return [
        {"model": model["model"], **run}
        for model in report["models"]
        for run in model["runs"]
        if run["budget"] is not None
    ]


def written(runs: Sequence[Sequence[dict[str, Any]]]) -> str:
    """The page: a line for each model and budget.

    Args:
        runs: the planned lines of each demo, in the same order.
    """
    lines: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        for line in run:
            lines[line["model"], line["budget"]].append(line)
    text = [
        f"# The demo, {len(runs)} runs",
        "",
        f"{here()}. Wall time on all cores; a planned step beside plain ones of the same process, in turns. Shares of "
        "budgets and predictions are medians over the runs. TensorFlow's counter leaves blocks below 256 KiB out.",
        "",
        HEAD,
    ]
    return "\n".join([*text, *(_row(*key, found) for key, found in lines.items())]) + "\n"


def _row(model: str, budget: str, found: Sequence[dict[str, Any]]) -> str:
    extra = [100 * (line["relative_step_time"] - 1) for line in found]
    of_budget = [
        statistics.median(line[peak] / line["budget_bytes"] for line in found)
        for peak in ("predicted_peak_bytes", "measured_peak_bytes")
    ]
    predicted = 100 * statistics.median(line["predicted_overhead"] for line in found)
    figures = [
        model,
        budget,
        f"{found[0]['budget_bytes'] / 2**20:.1f}",
        *(f"{share:.2f}" for share in of_budget),
        f"{predicted:+.1f} %",
        f"{statistics.median(extra):+.1f} %",
        ", ".join(f"{one:+.1f}" for one in extra),
    ]
    return f"| {' | '.join(figures)} |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    count = parser.parse_args().runs
    runs: list[list[dict[str, Any]]] = []
    while len(runs) < count:
        runs.append(one_run())
        RESULT.write_text(written(runs))  # A run takes minutes: none is lost where a later one ends with an error.
        print(written(runs), flush=True)


if __name__ == "__main__":
    main()
