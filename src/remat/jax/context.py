"""What is true while a function is traced: how recomputations are held back, and who decides what is recomputed.

JAX keeps what it has traced, so both are part of the key that it keeps traces under.
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
    """What is traced inside is compiled with the options that keep barriers."""
    with _tie("barrier"):
        yield


def plan_decides() -> bool:
    """Is a function being traced for a plan, which decides anew what is recomputed?"""
    return bool(_decides.value == "plan")


@contextlib.contextmanager
def for_a_plan() -> Iterator[None]:
    """Regions under ``recompute`` dissolve in what is traced inside."""
    with _decides("plan"):
        yield
