"""Real peak bytes and seconds of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from remat.jax.peak import peak_of
from remat.running.measurement import Measurement, check_repeats, median_time_s


def measure(fn: Callable[..., Any], *args: Any, repeats: int = 3, **kwargs: Any) -> Measurement:
    """Compile a step, read the memory of the program, and run it.

    The peak is what the compiler's buffer assignment gives one device: arguments, results and everything between, less
    what results share with donated arguments.

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
    check_repeats(repeats)
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    compiled = jitted.lower(*args, **kwargs).compile()
    peak_bytes = peak_of(compiled.memory_analysis())
    wait: Any = jax.block_until_ready

    def copied_arguments() -> Any:
        return wait(jax.tree.map(_copied, (args, kwargs)))

    def run(arguments: Any) -> None:
        wait(jitted(*arguments[0], **arguments[1]))

    run(copied_arguments())
    return Measurement(peak_bytes, median_time_s(run, repeats, copied_arguments))


def _copied(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
