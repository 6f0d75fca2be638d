"""TensorFlow's peers' model in turns: plain, ``tf.recompute_grad`` and remat in its bytes, in one process, five times.

    python -m benchmarks.peers.tensorflow_turns                  # from the project's root
    python -m benchmarks.peers.tensorflow_turns --one [--small]  # prints one run, or one of a small model as a check

Each run is a process of its own, in which the three steps take turns, so that what the machine does meanwhile hits all
of them. Peaks are those of TensorFlow's counter, times medians over the rounds of what a step takes relative to the
plain step of its round: wall time, and processor time. Writes ``benchmarks/results/peers-tensorflow-turns.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.tensorflow_methods import RECOMPUTE, TITLE, Blocks
from benchmarks.where import here

RESULT: Final = Path(__file__).parent.parent / "results" / "peers-tensorflow-turns.md"
RUNS: Final = 5
ROUNDS: Final = 15
REMAT: Final = "remat"


def one_run(small: bool = False) -> dict[str, Any]:
    """Peaks and relative times of the three steps in this process; where the peer's bytes are refused, in the least."""
    import remat
    import remat.tensorflow

    blocks = Blocks(small)
    steps = {"plain": blocks.step(blocks.layers, None), RECOMPUTE: blocks.step(blocks.recomputed(), None)}
    peaks = {name: remat.tensorflow.measure(step, blocks.x, repeats=1).peak_bytes for name, step in steps.items()}
    budget_bytes = peaks[RECOMPUTE]
    steps[REMAT] = blocks.step(blocks.layers, budget_bytes)
    try:
        steps[REMAT].get_concrete_function(blocks.x)
    except remat.InfeasibleBudget as error:
        budget_bytes = error.minimum_bytes
        steps[REMAT] = blocks.step(blocks.layers, budget_bytes)
    peaks[REMAT] = remat.tensorflow.measure(steps[REMAT], blocks.x, repeats=1).peak_bytes
    wall: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            started = time.perf_counter(), time.process_time()
            step(blocks.x)[-1].numpy()
            wall[name].append(time.perf_counter() - started[0])
            processor[name].append(time.process_time() - started[1])
    return {"peaks": peaks, "budget": budget_bytes, "wall": _relative(wall), "processor": _relative(processor)}


def _relative(seconds: dict[str, list[float]]) -> dict[str, float]:
    plain = seconds["plain"]
    return {name: statistics.median(a / b for a, b in zip(own, plain, strict=True)) for name, own in seconds.items()}


def written(runs: list[dict[str, Any]]) -> str:
    """The page: a line for each run."""
    text = [
        f"# {TITLE}; in turns",
        "",
        f"{here()}. {ROUNDS} rounds in each of {len(runs)} processes, on all cores. "
        "Times are multiples of the plain step's.",
        "",
        f"| run | plain MiB | {RECOMPUTE} MiB | remat MiB | {RECOMPUTE}, wall | remat, wall "
        f"| {RECOMPUTE}, processor | remat, processor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, run in enumerate(runs, 1):
        peaks = " | ".join(f"{run['peaks'][name] / 2**20:.1f}" for name in ("plain", RECOMPUTE, REMAT))
        times = " | ".join(f"{run[kind][name]:.2f}" for kind in ("wall", "processor") for name in (RECOMPUTE, REMAT))
        refused = run["budget"] > run["peaks"][RECOMPUTE]
        asked = f" (refused below {run['budget'] / 2**20:.1f})" if refused else ""
        text.append(f"| {number} | {peaks}{asked} | {times} |")
    return "\n".join(text) + "\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", action="store_true", help="one run, here, as JSON")
    parser.add_argument("--small", action="store_true", help="with --one: a small model, to see that it works")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one_run(small=asked.small)))
        return
    if asked.small:
        parser.error("--small goes with --one: five runs of the small model are no result")
    runs = []
    for _ in range(RUNS):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.peers.tensorflow_turns", "--one"],
            env={**os.environ, "REMAT_PLAN_CACHE": "off", "TF_ENABLE_ONEDNN_OPTS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        print(runs[-1], flush=True)
        RESULT.write_text(written(runs))


if __name__ == "__main__":
    main()
