"""Plans of earlier runs: found by all that they were made from, followed only where they hold."""

from __future__ import annotations

import dataclasses
import logging

import pytest

import remat
from remat.fit import plan_cache
from remat.fit.candidate import Candidate
from remat.fit.fit import fit
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.testing import chain

GRAPH = chain(30)


class Traced(Candidate):
    """A step whose real peak is that of its trace, times ``factor``."""

    factor = 1.0
    finds = 0

    def __init__(self, graph=GRAPH):
        self._graph = graph

    @property
    def graph(self):
        return self._graph

    @property
    def plain_peak(self):
        return PeakRange.exactly(remat.simulate(self.graph, self.graph.plain_schedule).peak_bytes)

    def real_peak(self, plan):
        return PeakRange.exactly(int(self.factor * remat.simulate(self.graph, plan.schedule).peak_bytes))

    def find(self, budget_bytes, request):
        Traced.finds += 1
        return super().find(budget_bytes, request)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(plan_cache.ENVIRONMENT_VARIABLE, str(tmp_path / "plans"))
    monkeypatch.setattr(Traced, "finds", 0)
    return tmp_path / "plans"


def planned(candidate=None, **request):
    """The plan, and how often the planner was asked for it."""
    before = Traced.finds
    plan = fit(candidate or Traced(), Request(**{"budget": "60%", "planner": "peak_greedy", **request}))
    return plan, Traced.finds - before


def test_the_second_run_plans_nothing():
    first, asked = planned()
    assert asked > 0
    again, asked = planned()
    assert asked == 0
    assert again.overhead_lower_bound == first.overhead_lower_bound > 0
    assert dataclasses.replace(again, plan_seconds=0) == dataclasses.replace(first, plan_seconds=0)


def slower(graph):
    return dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, time_s=2 * op.time_s) for op in graph.ops))


class Otherwise(Traced):
    """The same step, carried out in another way."""


@pytest.mark.parametrize(
    ("candidate", "request_"),
    [
        (Traced(chain(31)), {}),
        (Traced(slower(GRAPH)), {}),
        (Otherwise(), {}),
        (None, {"budget": "80%"}),
        (None, {"planner": "sqrt_n"}),
        (None, {"planner": "auto", "options": {"thorough": False}}),
    ],
    ids=["step", "times", "carried out", "budget", "planner", "options"],
)
def test_what_differs_is_planned(candidate, request_):
    planned()
    assert planned(candidate, **request_)[1] > 0


def test_another_version_is_planned(monkeypatch):
    planned()
    monkeypatch.setattr(remat, "__version__", "99.0")
    assert planned()[1] > 0


def test_a_plan_that_breaks_the_budget_now_is_not_followed(monkeypatch):
    first, _ = planned(budget="80%")
    monkeypatch.setattr(Traced, "factor", 1.2)
    found, asked = planned(budget="80%")
    assert asked > 0
    assert found.schedule != first.schedule
    assert found.peak_bytes <= found.budget_bytes


@pytest.mark.parametrize("damage", [b"", b"no gzip", b"\x1f\x8b"])
def test_a_damaged_file_is_planned_again(cache, damage):
    planned()
    (file,) = cache.glob("*")
    file.write_bytes(damage)
    assert planned()[1] > 0
    assert planned()[1] == 0, "the new plan stands in its place"


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(plan_cache.ENVIRONMENT_VARIABLE, str(tmp_path / "file" / "plans"))
    with caplog.at_level(logging.DEBUG, "remat"):
        assert planned()[1] > 0
    assert "not kept for later runs" in caplog.text


@pytest.mark.parametrize("value", ["0", "off", "No", "false"])
def test_it_can_be_turned_off(monkeypatch, cache, value):
    monkeypatch.setenv(plan_cache.ENVIRONMENT_VARIABLE, value)
    assert planned()[1] > 0
    assert planned()[1] > 0
    assert not cache.exists()


def test_the_users_folder_is_the_default(monkeypatch):
    monkeypatch.delenv(plan_cache.ENVIRONMENT_VARIABLE)
    where = plan_cache.folder()
    assert where.name == "plans"
    assert "remat" in where.parts


def test_the_oldest_are_forgotten(monkeypatch, cache):
    monkeypatch.setattr(plan_cache, "_MOST_FILES", 3)
    for percent in (60, 65, 70, 75, 80):
        planned(budget=f"{percent}%")
    assert len(list(cache.glob("*"))) == 3
    assert planned(budget="80%")[1] == 0
    assert planned(budget="60%")[1] > 0


def test_what_runs_are_expected_to_take_is_worked_out_anew():
    """It depends on the machine, so that a plan of an earlier run brings the seconds of this one."""

    class Clocked(Traced):
        seconds = 1.0

        def expected_time_s(self, plan):
            return self.seconds if plan is None else 3 * self.seconds

    first, asked = planned(Clocked())
    assert asked > 0
    assert (first.expected_time_s, first.baseline_expected_time_s) == (3.0, 1.0)
    assert first.expected_overhead == 2.0

    quicker = Clocked()
    quicker.seconds = 0.5
    again, asked = planned(quicker)
    assert asked == 0
    assert (again.expected_time_s, again.baseline_expected_time_s) == (1.5, 0.5)
