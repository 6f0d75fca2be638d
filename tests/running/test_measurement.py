"""What every front end's ``measure`` returns, and how a step is timed."""

from __future__ import annotations

import dataclasses

import pytest

from remat.running import measurement
from remat.running.measurement import Measurement, check_repeats, median_time_s


def test_measurement_is_a_frozen_pair() -> None:
    measured = Measurement(peak_bytes=4096, time_s=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        measured.peak_bytes = 1  # type: ignore[misc]
    assert measured == Measurement(4096, 0.5)


@pytest.mark.parametrize("repeats", [0, -1])
def test_nothing_is_run_to_measure_nothing(repeats: int) -> None:
    with pytest.raises(ValueError, match=f"repeats={repeats} measures nothing; give 1 or more"):
        check_repeats(repeats)
    with pytest.raises(ValueError, match=f"repeats={repeats}"):
        median_time_s(lambda _: pytest.fail("the step ran"), repeats, lambda: None)


def test_time_is_the_median_of_the_runs_without_their_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: clock[0])
    seconds = iter([9.0, 1.0, 3.0])

    def prepare() -> float:
        clock[0] += 100.0
        return next(seconds)

    def run(takes_s: float) -> None:
        clock[0] += takes_s

    assert median_time_s(run, 3, prepare) == 3.0
