"""The part of the last-level cache that a process has, by the speed at which vectors of some lengths are multiplied."""

from __future__ import annotations

import numpy as np
import pytest

from remat.running import usable_cache
from remat.running.step_time import cache_bytes

MIB = 1 << 20


def found(monkeypatch: pytest.MonkeyPatch, bytes_per_s: dict[int, float], whole: int = 32) -> int:
    """What is found of a cache of so many MiB where vectors of some MiB, or fewer, are multiplied at such speeds."""

    def speed(_: object, length_bytes: int) -> float:
        return next(speed for least, speed in sorted(bytes_per_s.items()) if length_bytes <= least * MIB)

    monkeypatch.setattr(usable_cache, "cache_bytes", lambda: whole * MIB)
    monkeypatch.setattr(usable_cache, "_bytes_per_s", speed)
    return usable_cache.usable_cache_bytes.__wrapped__() // MIB


def test_it_ends_where_vectors_run_at_the_speed_of_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, {12: 85e9, 16: 35e9, 999: 25e9}) == 12
    assert found(monkeypatch, {32: 85e9, 999: 25e9}) == 32
    assert found(monkeypatch, {3: 85e9, 999: 25e9}) == 2


def test_of_a_large_cache_a_part_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, {999: 85e9}, whole=384) == 384
    assert found(monkeypatch, {64: 85e9, 999: 25e9}, whole=384) == 384
    assert found(monkeypatch, {40: 85e9, 999: 25e9}, whole=384) == 32


def test_a_machine_whose_caches_are_no_quicker_now_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, {12: 26e9, 999: 25e9}) == 32


def test_this_machine_has_some_of_it_and_no_more_than_all() -> None:
    least = min(cache_bytes(), usable_cache._MOST_BYTES) // 16
    assert least <= usable_cache.usable_cache_bytes() <= cache_bytes()
    assert usable_cache.usable_cache_bytes() == usable_cache.usable_cache_bytes()


def test_the_vector_is_left_as_it_was() -> None:
    vector = np.arange(1 << 16, dtype=np.float32)
    assert usable_cache._bytes_per_s(vector, MIB // 8) > 1e6
    assert np.array_equal(vector, np.arange(1 << 16, dtype=np.float32))
