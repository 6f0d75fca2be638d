"""Every planner over a suite of graphs: overhead, bound, gap, peak and seconds, as Markdown and JSON.

    python -m benchmarks.planners.run [--planners auto,gap_lp] [--cases layered100] [--time-limit 10] [--name full]
        [--shares 30,25,20]

Writes ``benchmarks/results/planners-NAME.md`` and ``.json``. Needs no framework: traced graphs lie in
``benchmarks/graphs`` (see ``trace_models``). Seconds are of one process; processor seconds hardly depend on what else
runs, wall seconds do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import remat
from remat.planners import planner_names
from remat.testing import chain, fan, layered, residual_blocks

FOLDER = Path(__file__).parent.parent
SHARES = (90, 80, 70)
TRACED_SHARES = (80, 60, 50, 40, 25)
# The oracle is for small graphs; elsewhere it would only show its fallback.
MOST_OPS = {"milp": 60}


def cases() -> dict[str, tuple[Callable[[], remat.Graph], tuple[int, ...]]]:
    """For each case how to get its graph, and the budgets in percent of the plain peak."""
    found: dict[str, tuple[Callable[[], remat.Graph], tuple[int, ...]]] = {
        "chain50": (lambda: chain(50), (50, 25)),
        "chain1000": (lambda: chain(1000), (50, 10)),
        "fan8x8": (lambda: fan(8, 8), (60, 40)),
    }
    for n in (50, 100, 250, 500, 1000):
        for seed in range(5):
            found[f"layered{n}_{seed}"] = (lambda n=n, seed=seed: layered(n, seed), SHARES)
    for blocks in (1250, 12500):
        found[f"repeated{8 * blocks}"] = (lambda blocks=blocks: residual_blocks(blocks), (50,))
    for path in sorted((FOLDER / "graphs").glob("*.json.gz")):
        found[path.name.removesuffix(".json.gz")] = (lambda path=path: remat.load_graph(path), TRACED_SHARES)
    return found


def measure(graph: remat.Graph, share: int, planner: str, time_limit_s: float | None) -> dict[str, Any]:
    """One plan's figures; ``overhead`` is None where the planner found none, and ``peak`` what it reached."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    plain = remat.simulate(graph, graph.plain_schedule).peak_bytes
    row: dict[str, Any] = {"planner": planner, "budget_percent": share}
    try:
        plan = remat.plan(graph, f"{share}%", planner, time_limit_s)
    except remat.InfeasibleBudget as error:
        row |= {"overhead": None, "bound": None, "gap": None, "peak": error.minimum_bytes / plain}
    else:
        bound = plan.overhead_lower_bound
        row |= {
            "overhead": plan.overhead,
            "bound": bound,
            "gap": plan.overhead - bound,
            "peak": plan.peak_bytes / plain,
        }
        row["bound_meaning"] = plan.lower_bound_meaning
    return row | {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}


def rows(
    planners: list[str], wanted: list[str], time_limit_s: float | None, given: tuple[int, ...] = ()
) -> Iterator[dict[str, Any]]:
    for name, (build, own_shares) in cases().items():
        shares = given or own_shares
        if wanted and not any(name.startswith(prefix) for prefix in wanted):
            continue
        graph = build()
        for share in shares:
            for planner in planners:
                if len(graph.ops) <= MOST_OPS.get(planner, len(graph.ops)):
                    row = {"case": name, "ops": len(graph.ops)} | measure(graph, share, planner, time_limit_s)
                    print(markdown_row(row), flush=True)
                    yield row


def markdown_row(row: dict[str, Any]) -> str:
    def percent(key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:.3%}"

    figures = [row["case"], row["ops"], f"{row['budget_percent']} %", row["planner"], percent("overhead")]
    figures += [percent("bound"), percent("gap"), f"{row['peak']:.1%}", f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}"]
    return "| " + " | ".join(map(str, figures)) + " |"


HEAD = """| case | ops | budget | planner | overhead | bound | gap | peak | wall s | cpu s |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planners", default=",".join(sorted(set(planner_names()) - {"store_all"})))
    parser.add_argument("--cases", default="", help="beginnings of names, between commas; all if not given")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds for each plan")
    parser.add_argument("--shares", default="", help="budgets in %% of the plain peak; each case's own if not given")
    parser.add_argument("--name", default="full", help="of the files that are written")
    options = parser.parse_args()
    wanted = [prefix for prefix in options.cases.split(",") if prefix]
    print(HEAD)
    shares = tuple(int(share) for share in options.shares.split(",") if share)
    found = list(rows(options.planners.split(","), wanted, options.time_limit, shares))
    results = FOLDER / "results"
    results.mkdir(exist_ok=True)
    (results / f"planners-{options.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    text = "\n".join([HEAD, *map(markdown_row, found)])
    title = f"# Planners: {options.name}\n\nPercentages of the plain step's time and peak; `-`: no schedule found.\n\n"
    (results / f"planners-{options.name}.md").write_text(title + text + "\n")


if __name__ == "__main__":
    main()
