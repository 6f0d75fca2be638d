"""Budgets as people write them, and sizes as people read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat import InvalidBudget, RematError, format_bytes, parse_budget

PLAIN = 1001


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [
        (1, 1),
        (123, 123),
        (10**15, 10**15),
        (np.int64(7), 7),
        ("123", 123),
        ("123B", 123),
        ("4GiB", 4 * 2**30),
        ("4GB", 4 * 10**9),
        ("512MB", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("300KiB", 300 * 2**10),
        ("2kb", 2000),
        ("1TiB", 2**40),
        ("1TB", 10**12),
        ("  4 gib ", 4 * 2**30),
        ("4GIB", 4 * 2**30),
        (".5KiB", 512),
        ("5.", 5),
        ("0.1GB", 10**8),
        ("60%", 600),
        (" 60 % ", 600),
        ("12.5%", 125),
        ("100%", 1001),
        ("250%", 2502),
        ("0.01%", 0),
    ],
)
def test_readable(budget: int | str, size_bytes: int) -> None:
    parsed = parse_budget(budget, PLAIN)
    assert parsed == size_bytes
    assert type(parsed) is int


@pytest.mark.parametrize(
    "budget",
    [
        *(True, False, 0, -1, float("nan"), 4e9, float("inf"), None, b"4GiB", [1]),
        *("", " ", "GiB", "4 Gib iB", "4G", "4 XB", "-4GiB", "-1", "0", "0GiB", "0.5", "0%", "-60%", "%", "60%%"),
        *("1e9", "nan", "NaN", "inf", "1,5GiB", "1_000", "4GiB 2MB", "0x10", "٣GiB", "9" * 5000),
    ],
)
def test_unreadable(budget: Any) -> None:
    with pytest.raises(InvalidBudget) as caught:
        parse_budget(budget, PLAIN)
    message = str(caught.value)
    assert repr(budget) in message
    assert '"4GiB"' in message
    assert '"60%"' in message
    assert isinstance(caught.value, RematError)
    assert isinstance(caught.value, ValueError)


def test_share_needs_a_plain_peak() -> None:
    with pytest.raises(InvalidBudget, match=r"'60%' is a share of the plain step's peak, which is not known"):
        parse_budget("60%", None)
    assert parse_budget("4GiB", None) == 2**32


def test_share_of_an_empty_step_is_nothing() -> None:
    assert parse_budget("60%", 0) == 0


def test_large_shares_stay_exact() -> None:
    assert parse_budget("100%", 2**53 - 1) == 2**53 - 1
    assert parse_budget("33.3%", 10**18) == 333 * 10**15


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1024 KiB"),
        (300 * 2**20, "300 MiB"),
        (5606 * 10**6, "5.22 GiB"),
        (3 * 2**40, "3 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_format(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(1, 2**50))
def test_formatted_size_reads_back_within_its_two_decimals(size_bytes: int) -> None:
    again = parse_budget(format_bytes(size_bytes))
    unit = 1024 ** max(k for k in range(5) if k == 0 or size_bytes >= 1024**k)
    assert abs(again - size_bytes) <= 0.005 * unit + 1
