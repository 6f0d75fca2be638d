"""The checks that run over every front end, over Paddle's: in this process, since Paddle cannot follow TensorFlow."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

import checks
from front_ends import Paddle, Step

VERBS = ("trace", "measure", "recompute")
ROOMS = ("_private", "api", "emit", "measure", "micro_batches", "recompute", "timed_ops", "trace", "workload")


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_front_end(check, tmp_path):
    logging.getLogger("remat").setLevel(logging.WARNING)
    check(Paddle(), tmp_path)


def test_the_same_rooms_and_verbs():
    module = Paddle().verbs
    folder = Path(module.__file__).parent
    assert [verb for verb in VERBS if not callable(getattr(module, verb, None))] == []
    assert [room for room in ROOMS if not any((folder / one).exists() for one in (room, f"{room}.py"))] == []


class _Ignoring(Step):
    def __init__(self, planned, plain):
        self._planned, self._plain = planned, plain

    def __call__(self, params, *batch):
        self._planned(params, *batch)
        return self._plain(params, *batch)

    @property
    def plan(self):
        return self._planned.plan


class IgnoredBudget(Paddle):
    """Reports a plan and runs the plain step."""

    def step(self, loss, *, budget=None, plan=None, **planning):
        return _Ignoring(super().step(loss, budget=budget, plan=plan, **planning), super().step(loss))


def test_a_broken_front_end_is_rejected(tmp_path):
    with pytest.raises(AssertionError):
        checks.a_budget_is_kept_with_the_same_numbers(IgnoredBudget(), tmp_path)
