"""Twelve residual blocks [LayerNormalization, Dense 1024 gelu, Dense 256] in a ``tf.function``, batch 2048."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

TITLE = "TensorFlow: 12 residual blocks of LayerNormalization and two Dense layers, batch 2048, one gradient"
RECOMPUTE = "tf.recompute_grad"
METHODS = (
    "plain",
    f"{RECOMPUTE}, each block",
    "keras.RematScope(mode='full')",
    f"remat, bytes of {RECOMPUTE}",
    "remat, 50 % of plain",
    "remat, its smallest",
)


def run(method: str, small: bool, earlier: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Peak bytes, seconds and gradients of one method."""
    import keras
    import tensorflow as tf

    import remat.tensorflow

    with keras.RematScope(mode="full") if method.startswith("keras.RematScope") else nullcontext():
        blocks = Blocks(small)
    calls = blocks.recomputed() if method.startswith(RECOMPUTE) else blocks.layers

    def step_within(budget: int | str | None) -> Any:
        return blocks.step(calls, budget)

    step = step_within(budget_of(method, earlier, METHODS[1], lambda: smallest(step_within, blocks.x)))
    found = remat.tensorflow.measure(step, blocks.x, repeats=5)
    return {"peak_bytes": found.peak_bytes, "step_s": found.time_s}, [tf.convert_to_tensor(g) for g in step(blocks.x)]


class Blocks:
    """The network and its batch, the same numbers each time.

    Args:
        small: a network for a check.

    Attributes:
        layers: one for each block.
        x: the batch.
    """

    def __init__(self, small: bool) -> None:
        import keras
        import tensorflow as tf

        width, hidden, batch, count = (64, 256, 512, 4) if small else (256, 1024, 2048, 12)
        keras.utils.set_random_seed(1)
        self.layers = [
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
        self.x = tf.random.stateless_normal((batch, width), (0, 0))
        self._weights = [v.value for layer in self.layers for v in layer.trainable_variables]

    def recomputed(self) -> list[Any]:
        """The layers, each under ``tf.recompute_grad``."""
        import tensorflow as tf

        return [tf.recompute_grad(layer) for layer in self.layers]

    def step(self, calls: list[Any], budget: int | str | None) -> Any:
        """A compiled function from the batch to all gradients.

        Args:
            calls: the layers, or what stands for them.
            budget: for remat; without one, the step is TensorFlow's own.
        """
        import tensorflow as tf

        import remat.tensorflow

        @tf.function(autograph=False)
        def step(x: Any) -> Any:
            tape = tf.GradientTape() if budget is None else remat.tensorflow.GradientTape(budget=budget)
            with tape:
                for call in calls:
                    x = x + call(x)
                loss = tf.reduce_mean(tf.square(x))
            return tape.gradient(loss, self._weights)

        return step


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
