"""``recompute``: a function, a layer or a layer's ``call`` whose activations are dropped and made again when needed."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

from remat.tensorflow.recompute.function import Enabled, recomputed_function

F = TypeVar("F", bound=Callable[..., Any])


@overload
def recompute(function: F, *, enabled: Enabled = True, in_segments: bool = False) -> F: ...
@overload
def recompute(function: None = None, *, enabled: Enabled = True, in_segments: bool = False) -> Callable[[F], F]: ...


def recompute(function: Any = None, *, enabled: Enabled = True, in_segments: bool = False) -> Any:
    """Drop a function's activations after the forward pass and recompute them in the backward pass.

    The numbers are those of the plain function. What must not run twice does not: random draws are kept, variables are
    updated once, Python side effects happen once. Works in eager mode, ``tf.function``, under ``jit_compile=True``, in
    Keras ``fit``, inside ``tf.while_loop``, nested, under persistent tapes and for second-order gradients.

        @remat.tensorflow.recompute
        def block(x, mask=None): ...

        class Block(keras.layers.Layer):
            @remat.tensorflow.recompute
            def call(self, inputs, training=False): ...

    Args:
        function: any callable on tensors, a Keras layer (changed in place and returned) or a layer class (a subclass
            is returned); None to use it as a decorator with arguments. Arguments and results may be nested; tensors
            and variables that the function closes over are found. Each call holds its inputs, its outputs and what may
            not repeat until its backward pass. A ``tf.function`` is traced once for each signature, as ever; what is
            no ``tf.function`` runs in Python at each eager call, as ever.
        enabled: False to run plainly, or a function that says so at each call. A call may also pass
            ``enabled=False`` itself, unless ``function`` has a parameter of that name. ``REMAT_RECOMPUTE=0`` in the
            environment switches all off.
        in_segments: for a function that is a whole network. One call over all of it would have everything again at once
            in its backward pass, and save nothing; in segments it also keeps a few tensors on the way, and recomputes
            from one to the next: about 2 sqrt(n) of n equal tensors in a row. A Keras model that is given itself and
            trained (``compile``, ``fit``) is recomputed in segments without being asked.

    Returns:
        A function with the same signature.

    Raises:
        UnsupportedStep: at a call with a symbolic Keras tensor; a layer that is to be part of a functional model
            must be given as a layer.
    """
    if function is None:
        return functools.partial(recompute, enabled=enabled, in_segments=in_segments)
    if _is_keras_layer(function):
        from remat.keras.recompute import recompute_layer

        return recompute_layer(function, enabled=enabled, in_segments=in_segments)
    if not callable(function):
        raise TypeError(f"recompute takes a function, a Keras layer or a layer class, not {function!r}")
    if inspect.isclass(function):
        call = recompute(getattr(function, "call"), enabled=enabled, in_segments=in_segments)  # noqa: B009
        return type(function.__name__, (function,), {"call": call})
    return recomputed_function(function, enabled=enabled, in_segments=in_segments)


def _is_keras_layer(value: Any) -> bool:
    for name in ("keras", "tf_keras"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "layers") and isinstance(value, module.layers.Layer):
            return True
    return False
