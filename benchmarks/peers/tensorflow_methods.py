"""Twelve residual blocks [LayerNormalization, Dense 1024 gelu, Dense 256] in a ``tf.function``, batch 2048."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

TITLE = "TensorFlow: 12 residual blocks of LayerNormalization and two Dense layers, batch 2048, one gradient"
METHODS = (
    "plain",
    "tf.recompute_grad, each block",
    "keras.RematScope(mode='full')",
    "remat, bytes of tf.recompute_grad",
    "remat, 50 % of plain",
    "remat, its smallest",
)


def run(method: str, small: bool, earlier: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Peak bytes, seconds and gradients of one method."""
    import keras
    import tensorflow as tf

    import remat
    import remat.tensorflow

    width, hidden, batch, count = (64, 256, 512, 4) if small else (256, 1024, 2048, 12)
    keras.utils.set_random_seed(1)

    def blocks() -> list[Any]:
        return [
            keras.Sequential(
                [
                    keras.Input((width,)),
                    keras.layers.LayerNormalization(),
                    keras.layers.Dense(hidden, "gelu"),
                    keras.layers.Dense(width),
                ]
            )
            for _ in range(count)
        ]

    if method.startswith("keras.RematScope"):
        with keras.RematScope(mode="full"):
            layers = blocks()
    else:
        layers = blocks()
    weights = [v.value for layer in layers for v in layer.trainable_variables]
    x = tf.random.stateless_normal((batch, width), (0, 0))
    calls = [tf.recompute_grad(layer) if method.startswith("tf.recompute_grad") else layer for layer in layers]

    def step_within(budget: int | str | None) -> Any:
        @tf.function(autograph=False)
        def step(x: Any) -> Any:
            tape = tf.GradientTape() if budget is None else remat.tensorflow.GradientTape(budget=budget)
            with tape:
                for call in calls:
                    x = x + call(x)
                loss = tf.reduce_mean(tf.square(x))
            return tape.gradient(loss, weights)

        return step

    step = step_within(budget_of(method, earlier, "tf.recompute_grad, each block", lambda: smallest(step_within, x)))
    found = remat.tensorflow.measure(step, x, repeats=5)
    return {"peak_bytes": found.peak_bytes, "step_s": found.time_s}, [tf.convert_to_tensor(g) for g in step(x)]


def budget_of(method: str, earlier: dict[str, Any], peer: str, smallest: Any) -> int | str | None:
    """What a line of remat's may take; None for the other methods."""
    if not method.startswith("remat"):
        return None
    if "50 %" in method:
        return "50%"
    return smallest() if "smallest" in method else int(earlier[peer]["peak_bytes"])


def smallest(step_within: Any, *args: Any) -> int:
    """The smallest budget that remat says it can keep."""
    import remat

    try:
        step_within(1).get_concrete_function(*args)
    except remat.InfeasibleBudget as error:
        return error.minimum_bytes
    return 1
