"""What remat warns of while a step runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Inside, remat's warnings are added to the list."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("remat")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
