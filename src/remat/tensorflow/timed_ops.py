"""The operations of TensorFlow that a calibration times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from remat.tensorflow.peak.device import current_device


class TimedOps:
    """See ``remat.running.calibration.TimedOps``."""

    def dtypes(self) -> Sequence[str]:
        """Half precision where the device computes in it."""
        return ("float32", "float16", "bfloat16") if self.on_gpu() else ("float32",)

    def on_gpu(self) -> bool:
        """Does TensorFlow compute on a GPU?"""
        return current_device().is_gpu

    def product(self, edge: int, dtype: str) -> Callable[[], Any]:
        """A product of two square matrices."""
        a, b = (tf.cast(tf.random.normal((edge, edge)), dtype) for _ in range(2))
        return lambda: tf.linalg.matmul(a, b)

    def addition(self, elements: int) -> Callable[[], Any]:
        """A sum of two vectors."""
        a, b = tf.random.normal((elements,)), tf.random.normal((elements,))
        return lambda: tf.add(a, b)

    def chain(self, edge: int, length: int) -> Callable[[], Any]:
        """Products in a ``tf.function``, whose executor launches what a training step has launched."""

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def products(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
            for _ in range(length):
                a = tf.linalg.matmul(a, b)
            return a

        a, b = tf.zeros((edge, edge)), tf.random.normal((edge, edge))
        return lambda: products(a, b)

    def wait(self, result: Any) -> None:
        """Fetch one element: the device computes in order."""
        tf.reshape(result, (-1,))[:1].numpy()
