"""``auto`` beside the optimum on graphs of up to 60 ops in a fixed order, as Markdown and JSON.

    python -m benchmarks.planners.oracle [--seconds 60]

The stage MILP is solved to the end for a fixed set of layered graphs, chains and repeated blocks; where it does not end
in time the row says so and counts in no mean. Writes ``benchmarks/results/planners-oracle.md`` and ``.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import remat
from remat.planners import get_planner
from remat.planners.methods.milp import solve_stages
from remat.planners.view.problem import Problem
from remat.testing import chain, layered, residual_blocks

RESULTS = Path(__file__).parent.parent / "results"
SHARES = (90, 80, 70)
BLOCK_SHARES = (70, 60, 50)


def cases() -> dict[str, tuple[Callable[[], remat.Graph], tuple[int, ...]]]:
    """For each case how to get its graph, and the budgets in percent of the plain peak."""
    found: dict[str, tuple[Callable[[], remat.Graph], tuple[int, ...]]] = {}
    for n in (20, 30, 40, 50, 60):
        for seed in range(4):
            found[f"layered{n}_{seed}"] = (lambda n=n, seed=seed: layered(n, seed, free_order=False), SHARES)
    for n in (10, 16):
        found[f"chain{n}"] = (lambda n=n: chain(n, free_order=False), BLOCK_SHARES)
    for blocks in (2, 3, 4):
        found[f"blocks{blocks}"] = (lambda blocks=blocks: residual_blocks(blocks), BLOCK_SHARES)
    return found


def rows(seconds: float) -> Iterator[dict[str, Any]]:
    """One row for each case and budget that some schedule fits."""
    for name, (build, shares) in cases().items():
        graph = build()
        plain_bytes = remat.simulate(graph, graph.plain_schedule).peak_bytes
        for share in shares:
            budget_bytes = share * plain_bytes // 100
            begun_s = time.process_time()
            schedule = get_planner("auto")(graph, budget_bytes)
            auto_s = time.process_time() - begun_s
            found = remat.simulate(graph, schedule)
            begun_s = time.process_time()
            optimum = solve_stages(Problem.of(graph), budget_bytes, time.monotonic() + seconds)
            milp_s = time.process_time() - begun_s
            auto = found.time_s / graph.time_s - 1 if remat.validate(graph, schedule) <= budget_bytes else None
            best = None if optimum is None else remat.simulate(graph, optimum).time_s / graph.time_s - 1
            row = {"case": name, "ops": len(graph.ops), "budget_percent": share, "auto": auto, "optimum": best}
            # Relative to the whole step, as a user sees it, and to the overhead itself.
            row["beyond_step"] = None if auto is None or best is None else (1 + auto) / (1 + best) - 1
            row["beyond_overhead"] = None if auto is None or not best else auto / best - 1
            yield row | {"auto_cpu_s": auto_s, "milp_cpu_s": milp_s}


HEAD = """| case | ops | budget | auto | optimum | beyond, of step | beyond, of overhead | auto cpu s | milp cpu s |
|---|---|---|---|---|---|---|---|---|"""


def markdown_row(row: dict[str, Any]) -> str:
    def percent(key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:.3%}"

    figures = [row["case"], row["ops"], f"{row['budget_percent']} %", *map(percent, ("auto", "optimum"))]
    figures += [percent("beyond_step"), percent("beyond_overhead")]
    return "| " + " | ".join(map(str, [*figures, f"{row['auto_cpu_s']:.1f}", f"{row['milp_cpu_s']:.1f}"])) + " |"


def summary(found: list[dict[str, Any]]) -> str:
    """The means and the worst over the rows where both have a schedule."""
    both = [row for row in found if row["beyond_step"] is not None]
    missed = sum(row["auto"] is None and row["optimum"] is not None for row in found)
    better = sum(row["auto"] is not None and row["optimum"] is None for row in found)
    lines = [
        f"{len(both)} of {len(found)} rows have both; auto found nothing in {missed} that the MILP solved, the MILP"
    ]
    lines += [f"nothing in {better} that auto solved (its time, or its form of schedules, ends first)."]
    for key, of in (("beyond_step", "step"), ("beyond_overhead", "overhead")):
        values = [row[key] for row in both if row[key] is not None]
        mean = sum(values) / max(1, len(values))
        lines.append(
            f"Dearer than the optimum, relative to the {of}: mean {mean:.3%}, worst {max(values, default=0):.3%}."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each MILP, by the clock")
    options = parser.parse_args()
    print(HEAD)
    found = []
    for row in rows(options.seconds):
        print(markdown_row(row), flush=True)
        found.append(row)
    print(summary(found))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "planners-oracle.json").write_text(json.dumps(found, indent=1) + "\n")
    text = "\n".join([HEAD, *map(markdown_row, found)])
    title = "# auto beside the optimum\n\nOverheads in percent of the plain step; `-`: none found.\n\n"
    (RESULTS / "planners-oracle.md").write_text(title + text + "\n\n" + summary(found) + "\n")


if __name__ == "__main__":
    main()
