"""Budgets: numbers of bytes, as people write them."""

from __future__ import annotations

import operator
import re
from fractions import Fraction

from remat.core.errors import InvalidBudget

_DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SHOWN = (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))
_UNITS = {**_DECIMAL, **_BINARY}
# At most 30 digits: far above any memory, and short enough to stay exact and quick.
_TEXT = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*(%|[a-z]*)\s*", re.IGNORECASE | re.ASCII)
_ANY_PEAK_BYTES = 1 << 60  # Stands for a plain peak that is not known yet: a share of it is above 0 bytes.
_EXAMPLES = 'Write bytes (4294967296), a size ("4GiB", "512MB", "1.5 GiB") or a share of the plain peak ("60%").'


def parse_budget(budget: int | str, baseline_peak_bytes: int | None = None) -> int:
    """The budget as a number of bytes, rounded down.

    Args:
        budget: bytes as an int, or text: ``"123"``, ``"512MB"`` (10**6), ``"1.5GiB"`` (2**30), ``"60%"``. Case and
            spaces do not matter.
        baseline_peak_bytes: the plain step's peak, of which a percentage is taken; it may be above 100 %.

    Raises:
        InvalidBudget: for what cannot be read, is not above 0, or is a percentage where no plain peak is known.
    """
    if isinstance(budget, str):
        return _parse_text(budget, baseline_peak_bytes)
    if isinstance(budget, bool):
        raise InvalidBudget(f"the budget {budget!r} is a bool, not a number of bytes. {_EXAMPLES}")
    try:
        size_bytes = operator.index(budget)
    except TypeError:
        raise InvalidBudget(
            f"the budget {budget!r} is a {type(budget).__name__}, not an int or text. {_EXAMPLES}"
        ) from None
    return _above_zero(size_bytes, budget)


def check_budget(budget: int | str) -> None:
    """Make sure that a budget can be read, before the plain peak is known of which a percentage is taken.

    Raises:
        InvalidBudget: if it cannot.
    """
    parse_budget(budget, baseline_peak_bytes=_ANY_PEAK_BYTES)


def _parse_text(text: str, baseline_peak_bytes: int | None) -> int:
    match = _TEXT.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise InvalidBudget(f"the budget {text!r} cannot be read. {_EXAMPLES}")
    # Text such as "5." is no Fraction.
    number = Fraction(match[1].rstrip(".") or "0")
    if unit != "%":
        return _above_zero(int(number * _UNITS[unit]), text)
    if number == 0:
        raise InvalidBudget(f"the budget {text!r} is nothing; a budget is above 0. {_EXAMPLES}")
    if baseline_peak_bytes is None:
        raise InvalidBudget(
            f"the budget {text!r} is a share of the plain step's peak, which is not known here. "
            'Write it in bytes, for example "4GiB".'
        )
    return int(number * baseline_peak_bytes / 100)


def _above_zero(size_bytes: int, budget: int | str) -> int:
    if size_bytes <= 0:
        raise InvalidBudget(f"the budget {budget!r} comes to {size_bytes} bytes; a budget is above 0. {_EXAMPLES}")
    return size_bytes


def format_bytes(size_bytes: int) -> str:
    """A size for people, in binary units with at most two decimals: ``"1.5 GiB"``, ``"123 B"``."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    unit, scale = next(((unit, scale) for unit, scale in _SHOWN if abs(size_bytes) < 1024 * scale), _SHOWN[-1])
    return f"{size_bytes / scale:.2f}".rstrip("0").rstrip(".") + f" {unit}"
