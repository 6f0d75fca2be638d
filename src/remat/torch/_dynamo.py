"""What both kinds of captured steps, graph mode and Inductor, ask of Dynamo; importing this imports Dynamo."""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import config


@contextmanager
def once_left_unsaid() -> Iterator[None]:
    """Inside, what a library says once (transformers' ``warning_once``) does not break a capture; it is left unsaid.

    transformers adds such methods to ``logging.Logger``.
    """
    # PyTorch 2.9 has the second one only.
    setting = next(name for name in ("ignore_logging_functions", "ignore_logger_methods") if hasattr(config, name))
    ignored = getattr(config, setting)
    once = (value for name, value in vars(logging.Logger).items() if name.endswith("_once"))
    setattr(config, setting, {*ignored, *once})
    try:
        yield
    finally:
        setattr(config, setting, ignored)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does not keep its object alive; the object lives as long as captured functions are called.

    Dynamo keeps its backends for good, and captured functions for as long as what their guards look at lives;
    AOTAutograd keeps what compiled them. If these led back to a model, neither would ever go.
    """
    itself = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = itself()
        assert found is not None, "whoever calls what was captured holds what captures"
        return found(*args, **kwargs)

    return call


def with_code_of_its_own(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function like this one, or a method, that Dynamo has not seen yet; anything else as it is.

    Dynamo keeps what it captures by code objects, and captures so many graphs of each. Those of other models count,
    where one function trains them all: the 65th trial of a search for parameters would run eagerly.
    """
    if isinstance(fn, types.MethodType):
        return types.MethodType(with_code_of_its_own(fn.__func__), fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return fn
    copy = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__, copy.__module__, copy.__qualname__ = fn.__kwdefaults__, fn.__module__, fn.__qualname__
    vars(copy).update(vars(fn))
    return copy
