"""A model of JAX for the zoo: a loss whose blocks can be wrapped, or a whole step."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_cpu_multi_thread_eigen" not in os.environ.get("XLA_FLAGS", ""):
    # The process runs on one core (``one_core.py``), for which Eigen's kernels need no threads.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

import remat.jax
from benchmarks.zoo.frame.subject import PLAIN, Array, Prepared, Subject
from remat.jax.peak import peak_of

Wrap: TypeAlias = Callable[[Any], Any]
"""What goes around the function of a block: ``jax.checkpoint``, or nothing."""

Step: TypeAlias = Callable[..., Any]

_POLICIES: dict[str, Wrap] = {
    "jax.checkpoint, per block": jax.checkpoint,
    "jax.checkpoint, dots_saveable": lambda block: jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable),
}


class JaxModel(Subject):
    """A step of JAX.

    Args:
        make: takes what goes around each block, and gives the step: ``jax.value_and_grad`` of a loss, or a whole step.
        args: of the step.
        jit_options: as in ``jax.jit``, such as donated arguments.
    """

    peers = tuple(_POLICIES)
    clock = staticmethod(time.process_time)

    def __init__(self, make: Callable[[Wrap], Step], args: Sequence[Any], **jit_options: Any) -> None:
        self._make = make
        self._args = tuple(args)
        self._jit_options = jit_options

    def peer(self, method: str) -> Prepared:
        """Compiled by ``remat.jax.jit``: under a plain ``jax.jit`` on a CPU ``jax.checkpoint`` saves nothing."""
        wrap: Wrap = (lambda block: block) if method == PLAIN else _POLICIES[method]
        return self._prepared(remat.jax.jit(self._make(wrap), **self._jit_options))

    def planned(self, budget: int | str) -> Prepared:
        """The same step, planned whole."""
        ours = remat.jax.jit(self._make(lambda block: block), budget=budget, **self._jit_options)
        return self._prepared(ours)

    def _prepared(self, jitted: remat.jax.Jitted) -> Prepared:
        started = time.process_time()
        lowered = jitted.lower(*self._args)
        traced = time.process_time()
        compiled = lowered.compile()
        ended = time.process_time()
        is_planned = jitted.plan is not None

        def results() -> list[Array]:
            return [np.asarray(leaf) for leaf in jax.tree.leaves(compiled(*self._copies()))]

        def run() -> None:
            jax.block_until_ready(compiled(*self._copies()))

        return Prepared(
            peak_bytes=peak_of(compiled.memory_analysis()),
            run=run,
            results=results,
            planning_s=traced - started if is_planned else 0.0,
            compiling_s=ended - (traced if is_planned else started),
            predicted=None if jitted.plan is None else jitted.plan.expected_overhead,
        )

    def _copies(self) -> tuple[Any, ...]:
        """The arguments; copies where a step takes their buffers over."""
        if not self._jit_options:
            return self._args
        copied: tuple[Any, ...] = jax.tree.map(
            lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, self._args
        )
        return copied
