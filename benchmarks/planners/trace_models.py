"""Traces the models of the suite with the Keras front end into ``benchmarks/graphs``, names and shapes stripped.

    python -m benchmarks.planners.trace_models [name ...]

Needs the ``tensorflow`` extra; the traced files are committed, so that the suite itself needs no framework. Pinned
tensors get size 0: budgets then speak of what the step itself makes. Times are an A100's roofline.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import keras

from remat.core.graph import Graph
from remat.keras import trace_model

GRAPHS = Path(__file__).parent.parent / "graphs"


def transformer(layers: int, width: int, heads: int, length: int, vocabulary: int, *, causal: bool) -> keras.Model:
    """A plain Transformer over token ids with a language-model head, of GPT-2's or BERT's shape."""
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    for _ in range(layers):
        normed = keras.layers.LayerNormalization()(x)
        attended = keras.layers.MultiHeadAttention(heads, width // heads)(normed, normed, use_causal_mask=causal)
        x = keras.layers.Add()([x, keras.layers.Dropout(0.1)(attended)])
        normed = keras.layers.LayerNormalization()(x)
        wide = keras.layers.Dense(4 * width, activation="gelu")(normed)
        x = keras.layers.Add()([x, keras.layers.Dropout(0.1)(keras.layers.Dense(width)(wide))])
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(tokens, keras.layers.Dense(vocabulary, activation="softmax")(x))


def u_net(side: int = 256, width: int = 64) -> keras.Model:
    """Ronneberger et al. 2015 (arXiv:1505.04597), with padding and batch normalisation."""

    def block(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
        for _ in range(2):
            x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        return x

    image = keras.Input((side, side, 3))
    x, skips = image, []
    for level in range(4):
        x = block(x, width << level)
        skips.append(x)
        x = keras.layers.MaxPooling2D()(x)
    x = block(x, width << 4)
    for level in reversed(range(4)):
        x = keras.layers.Conv2DTranspose(width << level, 2, strides=2, padding="same")(x)
        x = block(keras.layers.Concatenate()([skips[level], x]), width << level)
    return keras.Model(image, keras.layers.Conv2D(2, 1, activation="softmax")(x))


MODELS: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "resnet50": (lambda: keras.applications.ResNet50(weights=None), 64),
    "densenet121": (lambda: keras.applications.DenseNet121(weights=None), 32),
    "efficientnetb0": (lambda: keras.applications.EfficientNetB0(weights=None), 64),
    "resnet152": (lambda: keras.applications.ResNet152(weights=None), 32),
    "u_net": (u_net, 8),
    "gpt2_small": (lambda: transformer(12, 768, 12, 1024, 50257, causal=True), 4),
    "bert_large": (lambda: transformer(24, 1024, 16, 512, 30522, causal=False), 8),
}


def stripped(graph: Graph) -> Graph:
    """The graph without names, shapes and pinned bytes, which is all that planners do not look at."""
    pinned = {graph.roots[tensor] for tensor in graph.inputs}
    tensors = tuple(
        dataclasses.replace(
            tensor, name="", shape=None, dtype=None, size_bytes=0 if graph.roots[i] in pinned else tensor.size_bytes
        )
        for i, tensor in enumerate(graph.tensors)
    )
    ops = tuple(dataclasses.replace(op, name="", time_s=float(f"{op.time_s:.3e}")) for op in graph.ops)
    return Graph(ops, tensors, graph.inputs, graph.outputs, graph.free_order)


def main(names: list[str]) -> None:
    GRAPHS.mkdir(exist_ok=True)
    for name in names or list(MODELS):
        build, batch_size = MODELS[name]
        graph = trace_model(build(), batch_size=batch_size, device="a100", optimizer="sgd")
        path = GRAPHS / f"{name}.json.gz"
        stripped(graph).save(path)
        print(f"{name}: {len(graph.ops)} ops, {path.stat().st_size / 1000:.0f} kB", flush=True)
        keras.backend.clear_session()


if __name__ == "__main__":
    main(sys.argv[1:])
