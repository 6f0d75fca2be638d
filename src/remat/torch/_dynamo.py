"""What both kinds of captured steps, graph mode and Inductor, ask of Dynamo; importing this imports Dynamo."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
