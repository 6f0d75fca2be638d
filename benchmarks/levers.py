"""Each lever alone and all of them together, at the same bytes: ``python -m benchmarks.levers --backend tensorflow``.

Keras on TensorFlow or JAX, where a plan has all four. The model is a small Transformer with a wide head and AdamW, and
a batch has few long sequences: micro-batches end at one sequence, slices at what the other layers keep. A budget is a
share of the peak of the plain step. Each way is a process of its own. Peaks are those of TensorFlow's counter, or of
XLA's compiled program. Times are the least processor time of an update: only their ratios mean something.

Figures are kept in a JSON file beside the table, so that one share, or one way, can be measured by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SHARES, RUNS = (60, 40, 25, 15), 5
WORDS, WIDTH, LENGTH, BATCH, BLOCKS = 8000, 64, 512, 4, 2
ALL = ("recompute", "micro_batches", "split", "update")
PLAIN = "plain"
WAYS = {PLAIN: (), **{f'"{name}" alone': (name,) for name in ALL}, "all four": ALL}
NAMES = {"tensorflow": "TensorFlow", "jax": "JAX"}


def language_model() -> Any:
    """Embedding, blocks of attention and an inner layer, a head."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    for _ in range(BLOCKS):
        h = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, WIDTH // 4)(h, h, use_causal_mask=True)])
        h = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(h)])
    model = keras.Model(tokens, layers.Dense(WORDS, use_bias=False)(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = keras.backend.backend() == "jax"
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss, jit_compile=compiled)
    return model


def measured(way: str, budget_bytes: int) -> dict[str, Any]:
    """Train in one way within a budget: its peak and its time, what it uses, or the smallest budget that would do."""
    import keras
    import numpy as np

    import remat
    import remat.keras

    random = np.random.default_rng(0)
    x = random.integers(0, WORDS, (BATCH, LENGTH))
    y = np.roll(x, -1, axis=1)
    model = language_model()
    on_tensorflow = keras.backend.backend() == "tensorflow"
    if way != PLAIN:
        remat.keras.limit_memory(model, budget_bytes, levers=WAYS[way])
    elif not on_tensorflow:
        # Planned for a budget that it keeps as it is, so that its plan tells its peak.
        remat.keras.limit_memory(model, 1 << 50)
    losses, times_s = [], []
    peak_bytes = 0
    for number in range(1 + RUNS):
        if on_tensorflow and number > 0:
            _reset_peak()
        started = time.process_time()
        try:
            losses.append(float(np.asarray(model.train_on_batch(x, y))))
        except remat.InfeasibleBudget as error:
            return {"smallest_bytes": error.minimum_bytes}
        times_s.append(time.process_time() - started)
        if on_tensorflow and number > 0:
            peak_bytes = max(peak_bytes, _peak_bytes())
    found = {"peak_bytes": peak_bytes, "time_s": min(times_s[1:]), "loss": losses[-1], "used": ""}
    if way == PLAIN and on_tensorflow:
        return found
    choice, plan = remat.keras.micro_batch_choice_of(model), remat.keras.plan_of(model)
    assert plan is not None, "the model has been trained"
    used = [] if choice is None or choice.micro_batches == 1 else [f"{choice.micro_batches} micro-batches"]
    used += [] if plan.split is None else [f"{plan.split.slices} slices"]
    used += [f"{plan.recomputed} run again"] if plan.recomputed else []
    used += [f"{plan.update.moved} ops of updates early"] if plan.update is not None and plan.update.moved else []
    if not on_tensorflow:
        found["peak_bytes"] = plan.peak_bytes
    return {**found, "used": ", ".join(used)}


def _reset_peak() -> None:
    import tensorflow as tf

    tf.config.experimental.reset_memory_stats("CPU:0")


def _peak_bytes() -> int:
    import tensorflow as tf

    return int(tf.config.experimental.get_memory_info("CPU:0")["peak"])


def in_a_process(backend: str, way: str, budget_bytes: int) -> dict[str, Any]:
    """What ``measured`` finds in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.levers", "--backend", backend, "--way", way]
    # TensorFlow counts memory on the CPU where it runs oneDNN's kernels.
    settings = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "TF_ENABLE_ONEDNN_OPTS": "1"}
    settings |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1"}
    settings |= {"TF_CPP_MIN_LOG_LEVEL": "3"}
    command += ["--budget", str(budget_bytes)]
    done = subprocess.run(command, env={**os.environ, **settings}, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(figures: dict[str, Any], backend: str) -> str:
    """The table as Markdown."""
    from remat.core.budget import format_bytes
    from remat.running import machine

    plain = figures[PLAIN]
    where = machine.described()
    lines = [
        f"# Four levers, Keras on {NAMES[backend]}",
        "",
        f"`python -m benchmarks.levers --backend {backend}`. {BLOCKS} blocks of width {WIDTH}, "
        f"{BATCH} x {LENGTH} tokens, {WORDS:,} words, AdamW. "
        f"Plain: {format_bytes(plain['peak_bytes'])}, {plain['time_s']:.2f} s a step. "
        f"{where['system']} {where['processor']}, one core that others used.",
        "",
        "| | | peak | of plain | time, plain = 1 | used |",
        "|---|---|---|---|---|---|",
    ]
    for share in sorted((int(one) for one in figures if one != PLAIN), reverse=True):
        budget_bytes = plain["peak_bytes"] * share // 100
        lines.append(f"| {share}% | the budget | {format_bytes(budget_bytes)} | {share}% | | |")
        for way in WAYS:
            one = figures[str(share)].get(way)
            if one is None:
                continue
            if "smallest_bytes" in one:
                smallest = one["smallest_bytes"]
                text = f"{format_bytes(smallest)} ({smallest / plain['peak_bytes']:.0%})"
                lines.append(f"| | {way} | refused, smallest {text} | | | |")
                continue
            shown = f"{format_bytes(one['peak_bytes'])} | {one['peak_bytes'] / plain['peak_bytes']:.0%}"
            lines.append(f"| | {way} | {shown} | {one['time_s'] / plain['time_s']:.2f} | {one['used']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what was asked for, and write the table of all that was measured so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=NAMES, default="tensorflow")
    parser.add_argument("--shares", type=int, nargs="*", default=list(SHARES))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way is not None:
        print(json.dumps(measured(asked.way, asked.budget)))
        return
    kept = RESULTS / f"levers-{asked.backend}.json"
    figures = json.loads(kept.read_text()) if kept.exists() else {}

    def keep() -> None:
        kept.write_text(json.dumps(figures, indent=1) + "\n")

    if PLAIN in asked.ways or PLAIN not in figures:
        figures[PLAIN] = in_a_process(asked.backend, PLAIN, 0)
        keep()
    for share in asked.shares:
        for way in asked.ways:
            if way != PLAIN:
                budget_bytes = figures[PLAIN]["peak_bytes"] * share // 100
                figures.setdefault(str(share), {})[way] = in_a_process(asked.backend, way, budget_bytes)
                print(share, way, figures[str(share)][way], file=sys.stderr, flush=True)
                keep()
    text = table(figures, asked.backend)
    kept.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
