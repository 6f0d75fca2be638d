"""``trace``: the joint graph of a TensorFlow training step, its ops named after layers and lines of source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from remat.core.graph import Graph
from remat.running.cost_model import get_profile
from remat.tensorflow.trace.func_graph import trace_func_graph
from remat.tensorflow.trace.labels import label_step


def trace(fn: Callable[..., Any], *args: Any, device: str = "cpu", **kwargs: Any) -> Graph:
    """The joint graph of a training step, without running it.

    Args:
        fn: a function or ``tf.function`` that computes a whole step, its gradients included.
        *args: tensors, arrays or ``tf.TensorSpec`` with fixed shapes.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured".
        **kwargs: further arguments of ``fn``.

    Returns:
        The graph, its order fixed; sizes in bytes, times in seconds.

    Raises:
        UnsupportedStep: where a shape is unknown.
    """
    function = fn if hasattr(fn, "get_concrete_function") else tf.function(fn)
    concrete = function.get_concrete_function(*args, **kwargs)
    return label_step(trace_func_graph(concrete.graph, profile=get_profile(device)))
