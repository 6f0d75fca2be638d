"""What slices save and cost in Keras on TensorFlow: ``python -m benchmarks.tf_split``.

Two models are of the shapes of ``benchmarks.split``: two layers of a small width and the full vocabularies of GPT-2 and
Llama 3, so that the head binds. Each is trained by ``train_on_batch`` with AdamW: plainly; with the smallest budget by
recomputation alone; with the smallest budget by recomputation and slices; and beside a head that people write by hand,
which computes the gradients of eight chunks, one behind the other, in its forward pass. remat is then given the bytes
that this head takes. A ConvNeXt of three blocks, whose inner layers bind, is trained in the first three ways. Each way
is a process of its own. Peaks are those of TensorFlow's own counter. Times are the least processor time of several
steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RESULT = Path(__file__).parent / "results" / "tf-split.md"
CHUNKS, TIMED, UPDATES, LAYERS, HEADS = 8, 4, 5, 2, 4
SAMPLES, LENGTH = 4, 256
LEVERS = ("recompute", "split")
PLAIN, BY_HAND = "plain", f"by hand, gradients in the forward pass, {CHUNKS} chunks"
WITHIN = "remat, slices within the bytes of the head by hand"
WAYS = (PLAIN, BY_HAND, "remat, smallest peak by recomputation", "remat, smallest peak with slices", WITHIN)
CONVNEXT = "convnext"
MODELS = {
    "gpt2": ("GPT-2's head, 50,257 words", 50_257, False),
    "llama": ("Llama's head, 128,256 words", 128_256, True),
    CONVNEXT: ("ConvNeXt, 3 blocks of width 24, 8 x 128 x 128", 10, False),
}
WAYS_OF_CONVNEXT = tuple(way for way in WAYS if way not in (BY_HAND, WITHIN))


def built(words: int, width: int, *, gated: bool, by_hand: bool) -> Any:
    """A decoder with GPT-2's inner layer and one matrix for both ends, or Llama's, compiled."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers

    def norm(x: Any) -> Any:
        return layers.RMSNormalization()(x) if gated else layers.LayerNormalization()(x)

    tokens = keras.Input((LENGTH,), dtype="int32")
    embedding = layers.ReversibleEmbedding(words, width, tie_weights=not gated)
    x = embedding(tokens)
    for _ in range(LAYERS):
        y = norm(x)
        x = x + layers.MultiHeadAttention(HEADS, width // HEADS)(y, y, use_causal_mask=True)
        y = norm(x)
        inner = layers.Dense(4 * width, activation="silu" if gated else "gelu", use_bias=not gated)(y)
        if gated:
            inner = inner * layers.Dense(4 * width, use_bias=False)(y)
        x = x + layers.Dense(width, use_bias=not gated)(inner)
    body = keras.Model(tokens, norm(x))

    class ByHand(keras.Model):  # type: ignore[misc, name-defined]
        """The model with a training step that knows its head."""

        def train_step(self, data: Any) -> Any:
            given, labels = data[:2]
            with tf.GradientTape() as tape:
                rows = tf.reshape(body(given, training=True), (-1, width))
                matrix = embedding.reverse_embeddings if gated else embedding.embeddings
                weight = tf.convert_to_tensor(matrix)
                loss = in_chunks(rows, weight, tf.reshape(labels, [-1]), turned=not gated)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, [one.value for one in variables]), variables)
            return {"loss": loss}

    kind = ByHand if by_hand else keras.Model
    model = kind(tokens, embedding(body.output, reverse=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, jit_compile=False)
    return model


def convnext(classes: int) -> Any:
    """Blocks of a ConvNeXt: a wide convolution of each channel, and an inner layer four times as wide, compiled."""
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    pixels = keras.Input((128, 128, 3))
    x = layers.Conv2D(24, 4, 2, padding="same")(pixels)
    for _ in range(3):
        y = layers.LayerNormalization()(layers.DepthwiseConv2D(7, padding="same")(x))
        x = x + layers.Dense(24)(layers.Dense(96, activation="gelu")(y))
    model = keras.Model(pixels, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, jit_compile=False)
    return model


def in_chunks(x: Any, weight: Any, labels: Any, *, turned: bool) -> Any:
    """The mean loss, and its gradients chunk by chunk in the forward pass.

    Args:
        x: what the head reads, a row a token.
        weight: its matrix.
        labels: a number a token.
        turned: has the matrix a row for each word?
    """
    import tensorflow as tf

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def loss_of(x: Any, weight: Any) -> Any:
        rows = SAMPLES * LENGTH
        size = rows // CHUNKS
        total, sums, parts = tf.zeros([]), None, []
        for number in range(CHUNKS):
            with tf.control_dependencies([] if sums is None else [sums]):
                part = tf.identity(x[number * size : (number + 1) * size])
            losses, gradient = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
                features=tf.matmul(part, weight, transpose_b=turned),
                labels=labels[number * size : (number + 1) * size],
            )
            gradient = gradient / rows
            total += tf.reduce_sum(losses) / rows
            parts.append(tf.matmul(gradient, weight, transpose_b=not turned))
            with tf.control_dependencies([parts[-1]]):
                pair = (gradient, part) if turned else (part, gradient)
                term = tf.matmul(*pair, transpose_a=True)
            sums = term if sums is None else sums + term
        joined = tf.concat(parts, 0)
        return total, lambda incoming: (joined * incoming, sums * incoming)

    return loss_of(x, weight)


def measured(model: str, way: str, budget: int | None, kept: Path, *, quick: bool) -> dict[str, Any]:
    """The figures of one way, in a process of its own; its weights after some steps are kept in a file."""
    import remat
    import remat.keras
    from remat.tensorflow.peak.device import current_device

    _, words, gated = MODELS[model]
    random = np.random.default_rng(1)
    if model == CONVNEXT:
        network = convnext(words)
        count = 2 if quick else 8
        data = [random.random((count, 128, 128, 3)).astype("float32"), random.integers(0, words, count).astype("int32")]
    else:
        words, width = (words // 16, 32) if quick else (words, 128)
        network = built(words, width, gated=gated, by_hand=way == BY_HAND)
        data = [random.integers(0, words, (SAMPLES, LENGTH)).astype("int32") for _ in range(2)]

    def step() -> None:
        network.train_on_batch(*data)

    is_planned = way not in (PLAIN, BY_HAND)
    limits, minimum_bytes = [1, None, None] if budget is None else [budget], 1
    for limit in limits if is_planned else []:
        levers = LEVERS if "slices" in way else ("recompute",)
        remat.keras.limit_memory(network, limit or minimum_bytes, levers=levers, time_limit_s=0.5)
        try:
            step()
            break
        except remat.InfeasibleBudget as error:
            # What is resident differs a little from trace to trace, so that the budget may fail again.
            minimum_bytes = error.minimum_bytes
    else:
        step()
    for _ in range(UPDATES - 1):
        step()
    np.savez(kept, *network.get_weights())
    device = current_device()
    device.reset_peak()
    step()
    peak_bytes = device.peak_bytes
    times = []
    for _ in range(TIMED):
        started = time.process_time()
        step()
        times.append(time.process_time() - started)
    plan = remat.keras.plan_of(network) if is_planned else None
    split = None if plan is None else plan.split
    return {
        "peak_bytes": peak_bytes,
        "time_s": min(times),
        "slices": "" if split is None else str(split.slices),
        "recomputed": "" if plan is None else str(plan.recomputed),
    }


def lines_of(model: str, *, quick: bool) -> list[dict[str, Any]]:
    """A line for each way to train one model."""
    lines: list[dict[str, Any]] = []
    expected: list[Any] = []
    for way in WAYS_OF_CONVNEXT if model == CONVNEXT else WAYS:
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "weights.npz"
            command = [sys.executable, "-m", "benchmarks.tf_split", "--model", model, "--way", way, "--kept", str(kept)]
            if way == WITHIN:
                by_hand = next(line for line in lines if line["way"] == BY_HAND)
                # A budget has a reserve of 4 %, which the measured peak need not show.
                command += ["--budget", str(int(by_hand["peak_bytes"] * 1.04))]
            # TensorFlow counts memory on the CPU where it runs oneDNN's kernels.
            quietly = {"KERAS_BACKEND": "tensorflow", "TF_ENABLE_ONEDNN_OPTS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
            quietly |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [*command, "--quick"] if quick else command,
                env={**os.environ, **quietly},
                stdout=subprocess.PIPE,
                check=False,
                text=True,
            )
            if done.returncode:
                print(f"{model}, {way}: failed", file=sys.stderr)
                continue
            weights = list(np.load(kept).values())
        expected = expected or weights
        # Taken together: AdamW makes as large a step of the rounding errors of a gradient that is 0.
        apart = sum(float(np.square(a - b).sum()) for a, b in zip(weights, expected, strict=True))
        difference = math.sqrt(apart / sum(float(np.square(b).sum()) for b in expected))
        line = {**json.loads(done.stdout.splitlines()[-1]), "model": MODELS[model][0], "way": way}
        lines.append({**line, "difference": difference})
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def written(lines: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    from benchmarks.split_table import table

    about = (
        "one thread; float32; `jit_compile=False`. Peak: TensorFlow's counter, weights and the optimizer's state "
        f"included. Difference: of all weights after {UPDATES} steps of AdamW from plain, relative."
    )
    return table("Slices in Keras on TensorFlow", about, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small vocabularies; keeps no result")
    parser.add_argument("--model", choices=MODELS, help="one model alone; keeps no result")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measured(options.model, options.way, options.budget, options.kept, quick=options.quick)))
        return
    models = [options.model] if options.model else list(MODELS)
    text = written([line for model in models for line in lines_of(model, quick=options.quick)])
    if not options.quick and options.model is None:
        RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
