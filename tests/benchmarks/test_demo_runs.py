"""The table of several demos: medians of what each measured."""

from __future__ import annotations

from typing import Any

from benchmarks.demo_runs import HEAD, written


def line(budget: str, measured_bytes: int, time: float) -> dict[str, Any]:
    return {
        "model": "residual",
        "budget": budget,
        "budget_bytes": 100 << 20,
        "predicted_peak_bytes": 90 << 20,
        "measured_peak_bytes": measured_bytes,
        "predicted_overhead": 0.05,
        "relative_step_time": time,
    }


def test_each_budget_has_a_line_of_medians() -> None:
    runs = [
        [line("60%", measured << 20, time), line("40%", 99 << 20, 1.5)]
        for measured, time in ((80, 1.02), (95, 1.1), (93, 0.97))
    ]
    text = written(runs).splitlines()

    assert text[0] == "# The demo, 3 runs"
    assert "\n".join(text[4:6]) == HEAD
    assert text[6] == "| residual | 60% | 100.0 | 0.90 | 0.93 | +5.0 % | +2.0 % | +2.0, +10.0, -3.0 |"
    assert text[7] == "| residual | 40% | 100.0 | 0.90 | 0.99 | +5.0 % | +50.0 % | +50.0, +50.0, +50.0 |"
