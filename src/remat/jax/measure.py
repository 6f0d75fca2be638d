"""Real peak bytes and seconds of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from remat.jax.peak import peak_of


@dataclass(frozen=True)
class Measurement:
    """What a step really needed.

    Attributes:
        peak_bytes: bytes of one device by the compiler's own buffer assignment: arguments, results and everything
            between, less what results share with donated arguments.
        time_s: median wall seconds of a step.
    """

    peak_bytes: int
    time_s: float


def measure(fn: Callable[..., Any], *args: Any, repeats: int = 3, **kwargs: Any) -> Measurement:
    """Compile a step, read the memory of the program, and run it.

    Args:
        fn: a function, or what ``jax.jit`` or ``remat.jax.jit`` made of one; it runs ``repeats + 1`` times, the first
            time to warm up.
        *args: its arguments; they are copied before each run, so that donated ones stay as they are.
        repeats: measured runs, 1 or more.
        **kwargs: further arguments of ``fn``.

    Raises:
        ValueError: for fewer than one run.
        UnsupportedStep: where the platform does not say how much memory a program needs.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} measures nothing; give 1 or more")
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    compiled = jitted.lower(*args, **kwargs).compile()
    peak_bytes = peak_of(compiled.memory_analysis())
    times = []
    wait: Any = jax.block_until_ready
    for _ in range(repeats + 1):
        own_args, own_kwargs = wait(jax.tree.map(_copied, (args, kwargs)))
        started = time.perf_counter()
        wait(jitted(*own_args, **own_kwargs))
        times.append(time.perf_counter() - started)
    return Measurement(peak_bytes, sorted(times[1:])[repeats // 2])


def _copied(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
