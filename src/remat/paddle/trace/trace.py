"""``trace``: a training step of Paddle -> Graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from remat.core.graph import Graph
from remat.fit.request import Request
from remat.paddle.captured import Captured
from remat.paddle.trace.program import trace_program
from remat.paddle.trace.sizes import Sizes
from remat.running.cost_model import device_here, get_profile


def trace(
    fn: Any,
    *args: Any,
    batch_size: int | None = None,
    feed_shapes: Mapping[str, Sequence[int]] | None = None,
    fetch_list: Sequence[Any] = (),
    device: str | None = None,
) -> Graph:
    """The joint graph of a training step, without running it.

    Args:
        fn: a static program with its backward pass; or a layer or a function, which returns the loss, or what a loss is
            made of: it is captured by ``paddle.jit.to_static``, with the backward pass that Paddle appends.
        *args: the arguments of a layer or a function; none for a program.
        batch_size: of a program: what an open first dimension of an input is.
        feed_shapes: of a program: shapes of inputs by name.
        fetch_list: of a program: values that every step fetches.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured".

    Returns:
        The graph, its order fixed; sizes in bytes, times in seconds.

    Raises:
        TypeError: for anything else.
        UnsupportedStep: for a program of unknown sizes.
    """
    if not isinstance(fn, paddle.static.Program) and not callable(fn):
        raise TypeError(f"trace takes a static program, a layer or a function, not {type(fn).__name__}")
    if isinstance(fn, paddle.static.Program):
        profile = get_profile(device or device_here("cpu"))
        return trace_program(fn, profile, Sizes(fn, feed_shapes, batch_size), kept=fetch_list).graph
    target = fn.forward if isinstance(fn, paddle.nn.Layer) else getattr(fn, "remat_traced", fn)
    return Captured(target, Request(), device=device).program_of(*args).graph
