"""A plain function or a ``tf.function`` that recomputes: which of the ways of recomputation each of its calls takes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.running.recompute_switch import is_switched_off
from remat.tensorflow import _private
from remat.tensorflow.recompute.eager import EagerCalls
from remat.tensorflow.recompute.region_gradient import run_in_graph

Enabled = bool | Callable[[], bool]


def recomputed_function(
    function: Callable[..., Any], *, enabled: Enabled = True, in_segments: bool = False
) -> Callable[..., Any]:
    """A function of the same signature whose activations are dropped and made again; see ``recompute``."""
    has_own_enabled = "enabled" in _parameters(function)
    calls = EagerCalls(function, in_segments)
    compiled: Callable[..., Any] | None = None
    if _private.is_tf_function(function):
        compiled = _private.with_python_function(
            function, lambda own: recomputed_function(own, in_segments=in_segments)
        )

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        wanted = enabled
        if "enabled" in kwargs and not has_own_enabled:
            wanted = kwargs.pop("enabled")
        converted = _private.converted_by_autograph(function)
        if is_switched_off() or not (wanted() if callable(wanted) else wanted):
            return converted(*args, **kwargs)
        _refuse_symbolic(function, args, kwargs)
        if compiled is not None:
            return compiled(*args, **kwargs)
        if not tf.executing_eagerly():
            return run_in_graph(lambda: converted(*args, **kwargs), in_segments)
        if not _private.tape_is_recording():
            return function(*args, **kwargs)  # Without a tape nothing would be kept anyway.
        return calls.run(args, kwargs)

    # A tf.function or a partial has not all that a function has; wraps copies what is there.
    functools.update_wrapper(recomputed, function)
    return _private.left_alone_by_autograph(recomputed)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _refuse_symbolic(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    for name in ("keras", "tf_keras"):
        module = sys.modules.get(name)
        if module is None or not hasattr(module, "layers"):
            continue
        symbolic = getattr(module, "KerasTensor", None) or module.__internal__.KerasTensor
        for leaf in tf.nest.flatten((args, kwargs)):
            if isinstance(leaf, symbolic):
                raise UnsupportedStep(
                    f"recompute of {getattr(function, '__name__', function)!r} was called with {leaf.name!r}, a "
                    "symbolic Keras tensor, which has no value to compute with; put the function into the call of a "
                    "layer, or give recompute the layer itself"
                )
