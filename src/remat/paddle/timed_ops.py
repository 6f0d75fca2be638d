"""The operations of Paddle that a calibration times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle

from remat.paddle import _private


class TimedOps:
    """See ``remat.running.calibration.TimedOps``."""

    def dtypes(self) -> Sequence[str]:
        """Half precision where the device computes in it."""
        return ("float32", "float16", "bfloat16") if self.on_gpu() else ("float32",)

    def on_gpu(self) -> bool:
        """Does Paddle compute on a GPU?"""
        return _private.is_on_gpu()

    def product(self, edge: int, dtype: str) -> Callable[[], Any]:
        """A product of two square matrices."""
        a, b = (paddle.randn([edge, edge]).astype(dtype) for _ in range(2))
        return lambda: paddle.matmul(a, b)

    def addition(self, elements: int) -> Callable[[], Any]:
        """A sum of two vectors."""
        a, b = paddle.randn([elements]), paddle.randn([elements])
        return lambda: paddle.add(a, b)

    def chain(self, edge: int, length: int) -> Callable[[], Any]:
        """Products one after the other, launched from Python as an eager step launches them."""
        a, b = paddle.zeros([edge, edge]), paddle.randn([edge, edge])

        def products() -> Any:
            result = a
            for _ in range(length):
                result = paddle.matmul(result, b)
            return result

        return products

    def wait(self, result: Any) -> None:
        """Until the device is done."""
        _private.wait()
