"""The operations of JAX that a calibration times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


class TimedOps:
    """See ``remat.running.calibration.TimedOps``."""

    def dtypes(self) -> Sequence[str]:
        """Half precision where the device computes in it."""
        return ("float32", "float16", "bfloat16") if self.on_gpu() else ("float32",)

    def on_gpu(self) -> bool:
        """Is it anything but a CPU?"""
        return jax.default_backend() != "cpu"

    def product(self, edge: int, dtype: str) -> Callable[[], Any]:
        """A product of two square matrices."""
        a, b = (jax.random.normal(jax.random.key(n), (edge, edge)).astype(dtype) for n in range(2))
        run: Any = jax.jit(jnp.matmul)
        return lambda: run(a, b)

    def addition(self, elements: int) -> Callable[[], Any]:
        """A sum of two vectors."""
        a, b = (jax.random.normal(jax.random.key(n), (elements,)) for n in range(2))
        run: Any = jax.jit(jnp.add)
        return lambda: run(a, b)

    def chain(self, edge: int, length: int) -> Callable[[], Any]:
        """Products in one compiled function."""

        @jax.jit
        def products(a: Any, b: Any) -> Any:
            for _ in range(length):
                a = a @ b
            return a

        a, b = jnp.zeros((edge, edge)), jax.random.normal(jax.random.key(0), (edge, edge))
        return lambda: products(a, b)

    def wait(self, result: Any) -> None:
        """Until the array is there."""
        jax.block_until_ready(result)  # type: ignore[no-untyped-call]
