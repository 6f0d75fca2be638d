"""The end of a trace, and the first call of what was traced: private TensorFlow symbols, as in ``_private.py``.

TensorFlow has no public hook for either.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context as _context
from tensorflow.python.framework import ops as _ops

from remat.tensorflow._private import FuncGraph, left_alone_by_autograph


@left_alone_by_autograph  # It looks at the frame that calls it.
def call_when_traced(function: Callable[[bool], None]) -> None:
    """Run ``function`` when the trace of the innermost ``tf.function`` ends, its outputs known.

    Args:
        function: told whether the trace succeeded.
    """
    graph = tf.compat.v1.get_default_graph()

    def when_a_scope_ends() -> None:
        scope = sys._getframe(1)
        outer = scope.f_locals.get("old_scope_exit_callbacks")
        if outer is not None and outer is not graph._scope_exit_callbacks:
            # Each replica enters the function once more, in a thread of its own. A scope that ends before the
            # function's own hands this call on to the list that becomes the function's next.
            outer.append(when_a_scope_ends)
        else:
            function(not _is_raised_through(scope))

    _ops.add_exit_callback_to_default_func_graph(when_a_scope_ends)


def _is_raised_through(scope: types.FrameType) -> bool:
    """Does an error leave this frame now? Another one may be handled by its caller while its own work goes well."""
    error = sys.exc_info()[1]
    return error is not None and any(frame is scope for frame, _ in traceback.walk_tb(error.__traceback__))


def around_first_call(graph: FuncGraph, around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Enter a context around the first call, from Python, of the function that was traced in ``graph``.

    TensorFlow has no hook for it: the function exists only when the trace is over, and who holds it is unknown here.
    Every such call goes through one method of the eager context, which is replaced while functions are waited for.

    Args:
        graph: its trace is about to end; it is called by nobody yet.
        around: makes the context.
    """
    # Names of operations do not tell two traces of one function apart.
    number = next(_numbers_of_awaited)
    graph.get_operations()[-1]._set_attr(_AWAITED_MARK, attr_value_pb2.AttrValue(i=number))
    _awaited[number] = around
    while len(_awaited) > _MOST_AWAITED:
        del _awaited[next(iter(_awaited))]
    _context.context().call_function = _call_function


def _call_function(name: bytes, tensor_inputs: Any, num_outputs: int) -> Any:
    """``call_function`` of the eager context, while functions are waited for."""
    context = _context.context()
    around = None
    if name not in _not_awaited:
        nodes = context.get_function_def(name).node_def
        number = next((node.attr[_AWAITED_MARK].i for node in nodes if _AWAITED_MARK in node.attr), None)
        around = None if number is None else _awaited.pop(number, None)
        _not_awaited.add(name)
    if not _awaited:
        vars(context).pop("call_function", None)
        _not_awaited.clear()
    with contextlib.nullcontext() if around is None else around():
        return type(context).call_function(context, name, tensor_inputs, num_outputs)


_MOST_AWAITED = 8
"""Functions that are waited for at once. What is called by other functions only never comes; with more, such functions
would be looked for at more calls, with fewer, functions that are traced together and called later go unmeasured."""

_AWAITED_MARK = "_remat_awaited"
_awaited: dict[int, Callable[[], contextlib.AbstractContextManager[None]]] = {}
_not_awaited: set[bytes] = set()
_numbers_of_awaited = itertools.count()
