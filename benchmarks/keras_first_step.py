"""How long a first training step of Keras takes, plainly and planned: ``python -m benchmarks.keras_first_step``.

Models of the zoo, each on each backend, plain and under two budgets, in a process of its own, on one thread; processor
seconds, from ``train_on_batch`` to its logs, or to an error. Nothing comes from the cache of plans. "At most" is what a
planned first step should take: twice the plain one and five seconds. Models of keras-hub need that package. Writes
``benchmarks/results/keras-first-step.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.where import here
from remat.core.budget import format_bytes
from remat.core.errors import InfeasibleBudget

RESULT: Final = Path(__file__).parent / "results" / "keras-first-step.md"
MODELS: Final = ("hub GPT-2", "hub ViT", "MobileNet")
BACKENDS: Final = ("tensorflow", "jax", "torch")
PLAIN: Final = "plain"
BUDGETS: Final = ("60%", "40%")


def first_step(backend: str, name: str, way: str) -> dict[str, Any]:
    """Processor seconds of the first step and of the second, and its plan."""
    from benchmarks.zoo.frame.subject import models_of
    from benchmarks.zoo.keras.subject import KerasModel

    subject = models_of(f"keras-{backend}")[name]()
    assert isinstance(subject, KerasModel)
    model = subject.compiled()
    if way != PLAIN:
        import remat.keras

        remat.keras.limit_memory(model, way)
    seconds = []
    for _ in range(2):
        started = time.process_time()
        try:
            model.train_on_batch(*subject.batch)
        except InfeasibleBudget as error:
            taken_s = time.process_time() - started
            return {"error": f"refused in {taken_s:.1f}; the smallest is {format_bytes(error.minimum_bytes)}"}
        seconds.append(time.process_time() - started)
    found: dict[str, Any] = {"first": seconds[0], "second": seconds[1]}
    if way != PLAIN:
        plan = remat.keras.plan_of(model)
        assert plan is not None
        found |= {"used": plan.peak_bytes / plan.budget_bytes, "overhead": plan.overhead, "mode": plan.mode or ""}
    return found


def in_a_process(backend: str, name: str, way: str) -> dict[str, Any]:
    """The same in a fresh process; where that ends with an error, its last line."""
    surroundings = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "REMAT_PLAN_CACHE": "off",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_ENABLE_ONEDNN_OPTS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.keras_first_step", backend, name, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:120]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def written(lines: list[list[str]]) -> str:
    """The table as Markdown."""
    text = [
        "# First steps of Keras models, plain and planned",
        "",
        f"{here()}. Processor seconds of one thread.",
        "",
        "| model | backend | budget | plain first step | planned first step | at most | plain, planned second step | "
        "mode | budget used | predicted extra time |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*text, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def row(name: str, backend: str, budget: str, plain: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    if "error" in found:
        return [name, backend, budget, f"{plain['first']:.1f}", found["error"], "", "", "", "", ""]
    return [
        name,
        backend,
        budget,
        f"{plain['first']:.1f}",
        f"{found['first']:.1f}",
        f"{2 * plain['first'] + 5:.1f}",
        f"{plain['second']:.2f}, {found['second']:.2f}",
        found["mode"],
        f"{found['used']:.2f}",
        f"{100 * found['overhead']:.1f} %",
    ]


def main() -> None:
    if len(sys.argv) > 3:
        print(json.dumps(first_step(*sys.argv[1:4])))
        return
    lines = []
    for name in MODELS:
        for backend in BACKENDS:
            plain = in_a_process(backend, name, PLAIN)
            if "error" in plain:
                raise SystemExit(f"{name} on {backend}, plain: {plain['error']}")
            for budget in BUDGETS:
                lines.append(row(name, backend, budget, plain, in_a_process(backend, name, budget)))
                print(" | ".join(lines[-1]), flush=True)
    RESULT.write_text(written(lines))


if __name__ == "__main__":
    main()
