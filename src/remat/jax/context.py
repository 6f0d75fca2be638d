"""Two settings of a trace: how recomputations are held back, and whether the user or a plan decides about them.

JAX remembers the functions that it has traced. Both settings are part of the key that it remembers a trace under.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import jax

Tie = Literal["barrier", "data"]

_make_context: Any = jax.make_user_context
_tie = _make_context("native")
_decides = _make_context("user")


def native_tie() -> Tie:
    """The ties that a plain ``jax.jit`` keeps on the current platform."""
    return "data" if jax.default_backend() == "cpu" else "barrier"


def current_tie() -> Tie:
    """How recomputations are held back in what is being traced now."""
    return "barrier" if _tie.value == "barrier" else native_tie()


@contextlib.contextmanager
def barriers_stay() -> Iterator[None]:
    """Inside of this context, functions are traced for a compiler whose options keep barriers."""
    with _tie("barrier"):
        yield


def plan_decides() -> bool:
    """Is the trace under way made for a plan, which then decides in place of the user's regions?"""
    return bool(_decides.value == "plan")


@contextlib.contextmanager
def for_a_plan() -> Iterator[None]:
    """Inside of this context, ``recompute`` calls its function plainly, so that a plan sees every operation."""
    with _decides("plan"):
        yield
