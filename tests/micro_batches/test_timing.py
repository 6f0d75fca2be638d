"""How computations of several sizes are timed on a machine that does other work, too."""

from __future__ import annotations

import time

import pytest

from remat.micro_batches.timing import least_times_s


@pytest.mark.parametrize(
    ("wall_s", "on_processor", "expected"),
    [
        pytest.param({2: 0.06, 4: 0.1}, True, {2: 0.06, 4: 0.1}, id="an idle machine of two cores"),
        pytest.param({2: 0.9, 4: 0.1}, True, {2: 0.1, 4: 0.2}, id="one had to wait for a core"),
        pytest.param({2: 0.9, 4: 0.1}, False, {2: 0.9, 4: 0.1}, id="work of another device"),
    ],
)
def test_a_wait_for_a_core_is_no_cost(monkeypatch, wall_s, on_processor, expected):
    now = {"wall": 0.0, "processor": 0.0}
    order = []

    def run(key):
        order.append(key)
        # The first turn warms up, and is not counted.
        first = order.count(key) == 1
        now["wall"] += 9.0 if first else wall_s[key]
        now["processor"] += 9.0 if first else {2: 0.1, 4: 0.2}[key]

    monkeypatch.setattr(time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(time, "process_time", lambda: now["processor"])
    runs = {key: lambda key=key: run(key) for key in (2, 4)}

    found = least_times_s(runs, repeats=2, on_processor=on_processor)
    assert found == pytest.approx(expected)
    assert order == [2, 4] * 3
