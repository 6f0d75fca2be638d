"""The calls that led to a trace, its end, and the first call of what was traced.

TensorFlow has no public hook for any of them: these are private symbols, as in ``_private.py``.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.distribute import mirrored_run as _mirrored_run
from tensorflow.python.eager import context as _context
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function as _Function
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


@left_alone_by_autograph  # It looks at the frames that call it.
def arguments_of_calls() -> list[tf.Tensor]:
    """The tensors that exist already of all those which the functions being traced here were called with.

    A function that is called while another is traced is handed tensors of that other one, which may be its arguments.
    """
    found: dict[int, tf.Tensor] = {}
    for _, innermost in threads_of_calls():
        frame: types.FrameType | None = innermost
        while frame is not None:
            if frame.f_code in _CALLS:
                given = [frame.f_locals[name] for name in _names_of_the_rest(frame.f_code)]
                for value in tf.nest.flatten(given, expand_composites=True):
                    if isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value):
                        found[id(value)] = value
            frame = frame.f_back
    return list(found.values())


@left_alone_by_autograph  # It looks at the frame that calls it.
def threads_of_calls() -> list[tuple[int, types.FrameType]]:
    """The threads whose calls have led here, this one first: their numbers and innermost frames.

    ``strategy.run`` traces each replica in a thread of its own, for which the caller's waits.
    """
    found = [(threading.get_ident(), sys._getframe(1))]
    while (caller := _waits_for(found[-1][0])) is not None:
        found.append(caller)
    return found


def _waits_for(replica: int) -> tuple[int, types.FrameType] | None:
    """The thread that has called ``strategy.run`` and waits for a replica's, by its number; None where it is none."""
    for thread, innermost in sys._current_frames().items():
        frame: types.FrameType | None = innermost
        while frame is not None:
            if frame.f_code is _FOR_EACH_REPLICA and any(one.ident == replica for one in frame.f_locals["threads"]):
                return thread, innermost
            frame = frame.f_back
    return None


def _names_of_the_rest(code: types.CodeType) -> tuple[str, str]:
    """Of a function that takes ``*args, **kwargs``: what it calls them."""
    first = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[first], code.co_varnames[first + 1]


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


_CALLS = frozenset(inspect.unwrap(call).__code__ for call in (_Function.__call__, _Function.get_concrete_function))

_FOR_EACH_REPLICA = _mirrored_run._call_for_each_replica.__code__

_MOST_AWAITED = 8
"""Functions that are waited for at once. What is called by other functions only never comes; with more, such functions
would be looked for at more calls, with fewer, functions that are traced together and called later go unmeasured."""

_AWAITED_MARK = "_remat_awaited"
_awaited: dict[int, Callable[[], contextlib.AbstractContextManager[None]]] = {}
_not_awaited: set[bytes] = set()
_numbers_of_awaited = itertools.count()
