"""What both kinds of captured steps, graph mode and Inductor, ask of Dynamo; importing this imports Dynamo."""

from __future__ import annotations

import logging
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
