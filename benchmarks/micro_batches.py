"""Recomputation only, accumulation only, and what "auto" chooses at the same bytes: peak and time of an update.

    python -m benchmarks.micro_batches   # from the project's root; writes benchmarks/results/micro_batches_<device>.*

One process per model holds every variant of its training step. They are measured in turn, round after round, so that
what else runs on the machine disturbs them alike: only ratios mean something. A budget is a share of the peak that the
plain step was measured at, in bytes. "Accumulation only" is the smallest number of micro-batches whose measured peak
stays within it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MODELS = ("transformer", "convolutions")
SHARES = (60, 40, 25)


def convolutional_network(width: int = 32, blocks: int = 6) -> Any:
    """Residual blocks of two convolutions with GroupNormalization, which does not couple samples."""
    from keras import Input, Model, layers

    image = Input((8, 8, 1))
    values = layers.UpSampling2D(4, interpolation="bilinear")(image)
    values = layers.Conv2D(width, 3, strides=2, padding="same")(values)
    for _ in range(blocks):
        branch = layers.Conv2D(width, 3, padding="same", use_bias=False)(values)
        branch = layers.ReLU()(layers.GroupNormalization(8)(branch))
        branch = layers.Conv2D(width, 3, padding="same", use_bias=False)(branch)
        values = layers.ReLU()(layers.Add()([layers.GroupNormalization(8)(branch), values]))
    return Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(values)))


class Variants:
    """Training steps of one model, each as a function that runs one update."""

    def __init__(self, model_name: str, batch_size: int) -> None:
        import keras
        import numpy as np
        import tensorflow as tf

        from remat.demo.models import transformer
        from remat.tensorflow.peak.device import current_device

        keras.utils.set_random_seed(0)
        self.model = transformer(width=96, blocks=4) if model_name == "transformer" else convolutional_network()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
        random = np.random.default_rng(0)
        self.x = tf.constant(random.normal(size=(2 * batch_size, 8, 8, 1)).astype("float32"))
        self.y = tf.constant(random.integers(0, 10, 2 * batch_size))
        self.batch_size = batch_size
        self.device = current_device()

    def step(self, samples: int, limit: Callable[[Any], Any] | None) -> Callable[[], None]:
        """One update on so many samples; the first call, which traces and plans, is made here."""
        import remat.keras

        remat.keras.limit_memory(self.model, None)
        self.model.train_function = None
        if limit is not None:
            limit(self.model)
        x, y = self.x[:samples], self.y[:samples]
        self.model.train_on_batch(x, y)
        function = self.model.train_function

        def run() -> None:
            self.model.train_function = function
            self.model.train_on_batch(x, y)

        run()
        return run

    def peak_bytes(self, run: Callable[[], None], repeats: int = 4) -> int:
        """The largest of a few updates."""
        peaks = []
        for _ in range(repeats):
            self.device.reset_peak()
            run()
            peaks.append(self.device.peak_bytes)
        return max(peaks)


def measured(model_name: str, batch_size: int, rounds: int, shares: Sequence[int]) -> list[dict[str, Any]]:
    """The lines of one model's table."""
    import remat.keras
    from remat.micro_batches.choose import counts_to_try

    made = Variants(model_name, batch_size)
    plain = made.step(batch_size, None)
    plain_bytes = made.peak_bytes(plain)
    lines: list[dict[str, Any]] = [{"variant": "plain", "micro_batches": 1, "peak_bytes": plain_bytes}]
    runs: list[Callable[[], None] | None] = [plain]

    def accumulating(count: int) -> Callable[[Any], Any]:
        return lambda model: remat.keras.limit_memory(model, micro_batches=count)

    def add(variant: str, budget: int | None, run: Callable[[], None] | None, **more: Any) -> None:
        peak = None if run is None else made.peak_bytes(run)
        lines.append({"variant": variant, "budget_bytes": budget, "peak_bytes": peak, **more})
        runs.append(run)
        print(json.dumps(lines[-1]), file=sys.stderr, flush=True)

    full = made.step(2 * batch_size, accumulating(2))
    add("2 micro-batches of the plain batch's size", None, full, micro_batches=2, samples=2 * batch_size)
    alone = {}
    for share in shares:
        budget = plain_bytes * share // 100
        for variant, asked in (("recomputation only", 1), ("chosen", "auto")):
            try:
                run = made.step(
                    batch_size,
                    lambda model, budget=budget, asked=asked: remat.keras.limit_memory(
                        model, budget, micro_batches=asked
                    ),
                )
            except remat.InfeasibleBudget as error:
                add(variant, budget, None, minimum_bytes=error.minimum_bytes)
                continue
            plan = remat.keras.plan_of(made.model)
            choice = remat.keras.micro_batch_choice_of(made.model)
            add(
                variant,
                budget,
                run,
                micro_batches=1 if choice is None else choice.micro_batches,
                predicted_bytes=plan.peak_bytes,
                predicted_overhead=plan.overhead,
                recomputed=plan.recomputed,
                why=None if choice is None else str(choice),
            )
        for count in list(counts_to_try(batch_size))[1:]:
            if count not in alone:
                run = made.step(batch_size, accumulating(count))
                alone[count] = run, made.peak_bytes(run)
            if alone[count][1] <= budget:
                add("accumulation only", budget, alone[count][0], micro_batches=count)
                break
        else:
            add("accumulation only", budget, None)
    _time(lines, runs, rounds, batch_size)
    return [{"model": model_name, "share": _share(line, plain_bytes), **line} for line in lines]


def _time(lines: list[dict[str, Any]], runs: list[Callable[[], None] | None], rounds: int, batch_size: int) -> None:
    """The least seconds of an update's samples, over rounds in which every variant has its turn."""
    wall: dict[int, list[float]] = {n: [] for n, run in enumerate(runs) if run is not None}
    processor: dict[int, list[float]] = {n: [] for n in wall}
    for _ in range(rounds):
        for number in wall:
            run = runs[number]
            assert run is not None
            started, started_processor = time.perf_counter(), time.process_time()
            run()
            wall[number].append(time.perf_counter() - started)
            processor[number].append(time.process_time() - started_processor)
    for number, seconds in wall.items():
        batches = lines[number].get("samples", batch_size) / batch_size
        lines[number]["wall_s"] = min(seconds) / batches
        lines[number]["processor_s"] = min(processor[number]) / batches


def _share(line: dict[str, Any], plain_bytes: int) -> int | None:
    budget = line.get("budget_bytes")
    return None if budget is None else round(100 * budget / plain_bytes)


def as_markdown(lines: list[dict[str, Any]], about: str) -> str:
    """The table; times are ratios to the plain step of the same model."""
    rows = [
        '# Recomputation only, accumulation only, and what `micro_batches="auto"` chooses',
        "",
        about,
        "",
        "| model | budget | variant | micro-batches | extra runs | peak MB | of budget | processor time | wall time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    plain: dict[str, Any] = {}
    for line in lines:
        if line["variant"] == "plain":
            plain = line
        share = "" if line["share"] is None else f"{line['share']} %"
        if line["peak_bytes"] is None:
            minimum = line.get("minimum_bytes")
            needs = f"not reached; needs {minimum / 1e6:.1f} MB" if minimum else "not reached"
            rows.append(f"| {line['model']} | {share} | {line['variant']} | {needs} | | | | | |")
            continue
        budget = line.get("budget_bytes")
        used = "" if budget is None else f"{line['peak_bytes'] / budget:.0%}"
        rows.append(
            f"| {line['model']} | {share} | {line['variant']} | {line['micro_batches']} | "
            f"{line.get('recomputed', 0)} | {line['peak_bytes'] / 1e6:.1f} | {used} | "
            f"{line['processor_s'] / plain['processor_s']:.2f} | {line['wall_s'] / plain['wall_s']:.2f} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=192)
    parser.add_argument("--shares", nargs="+", type=int, default=list(SHARES), help="budgets in %% of the plain peak")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--worker", choices=MODELS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        print(json.dumps(measured(asked.worker, asked.batch_size, asked.rounds, asked.shares)))
        return
    lines = []
    for name in asked.models:
        command = [sys.executable, "-m", "benchmarks.micro_batches", "--worker", name]
        command += ["--batch-size", str(asked.batch_size), "--rounds", str(asked.rounds)]
        command += ["--shares", *map(str, asked.shares)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines += json.loads(done.stdout.splitlines()[-1])
    import os
    import platform

    import tensorflow as tf

    device = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
    about = (
        f"Batches of {asked.batch_size} samples; {device}, {platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[1]:.1f}; TensorFlow {tf.__version__}; least of {asked.rounds} rounds. Times are ratios to "
        "the plain step of the same model, per sample."
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"micro_batches_{device}.json").write_text(json.dumps({"about": about, "lines": lines}, indent=1) + "\n")
    (RESULTS / f"micro_batches_{device}.md").write_text(as_markdown(lines, about))
    print(as_markdown(lines, about))


if __name__ == "__main__":
    main()
