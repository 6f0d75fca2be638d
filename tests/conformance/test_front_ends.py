"""The same checks over every front end, and front ends that are broken on purpose, which the checks must reject."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import checks
import numpy as np
import pytest
from front_ends import FRONT_ENDS, Jax, Step

import remat
from worker_process import worker

VERBS = ("trace", "measure", "recompute")
ROOMS = ("_private", "api", "emit", "measure", "micro_batches", "recompute", "timed_ops", "trace", "workload")
KERAS_BACKENDS = ("tensorflow", "jax", "torch")
# Paddle's checks run with its tests: it cannot be imported after TensorFlow.
IN_THIS_PROCESS = [name for name in FRONT_ENDS if name != "paddle"]
NOT_IN_KERAS = (
    checks.a_saved_plan_is_followed,  # limit_memory takes no plan.
    checks.a_plan_for_another_step_is_refused,
    checks.recompute_saves_memory_and_takes_any_arguments,  # Layers: tests/keras/test_keras_recompute.py.
    checks.the_environment_switches_recompute_off,  # Likewise.
    checks.nothing_is_measured_in_no_runs,  # Its models are measured by the backend's front end.
)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_front_end(name, check, tmp_path):
    check(FRONT_ENDS[name](), tmp_path)


@pytest.mark.parametrize("check", [c for c in checks.CHECKS if c not in NOT_IN_KERAS], ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", KERAS_BACKENDS)
def test_keras(backend, check, tmp_path):
    script = Path(__file__).with_name("keras_worker.py")
    worker(script, KERAS_BACKEND=backend).ask("check", check.__name__, str(tmp_path))


@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_the_same_rooms_and_verbs(name):
    module = FRONT_ENDS[name]().verbs
    folder = Path(module.__file__).parent
    assert [verb for verb in VERBS if not callable(getattr(module, verb, None))] == []
    assert [room for room in ROOMS if not any((folder / one).exists() for one in (room, f"{room}.py"))] == []


def test_every_front_end_has_an_adapter():
    """A folder with an ``emit`` room is a front end; the checks must not pass it by."""
    rooms = [*Path(remat.__file__).parent.glob("*/emit"), *Path(remat.__file__).parent.glob("*/emit.py")]
    assert {path.parent.name for path in rooms} == set(FRONT_ENDS)


class _Wrapped(Step):
    def __init__(self, step: Step) -> None:
        self.step = step

    def __call__(self, params: Any, *batch: Any) -> Any:
        return self.step(params, *batch)

    @property
    def plan(self) -> Any:
        return self.step.plan

    @property
    def lower(self) -> Any:
        return self.step.lower


class InexactGradients(Jax):
    def step(self, loss, *, budget=None, plan=None, **planning):
        class Scaled(_Wrapped):
            def __call__(self, params, *batch):
                value, gradients = self.step(params, *batch)
                return value, [g * (1.001 if budget else 1) for g in gradients]

        return Scaled(super().step(loss, budget=budget, plan=plan, **planning))


class IgnoredBudget(Jax):
    """Reports a plan and runs the plain step."""

    def step(self, loss, *, budget=None, plan=None, **planning):
        plain = super().step(loss)

        class Plain(_Wrapped):
            def __call__(self, params, *batch):
                self.step(params, *batch)
                return plain(params, *batch)

            @property
            def lower(self):
                return plain.lower

        return Plain(super().step(loss, budget=budget, plan=plan, **planning))


class FreshDraws(Jax):
    def step(self, loss, *, budget=None, plan=None, **planning):
        class Redrawn(_Wrapped):
            def __call__(self, params, x, *source):
                if budget and source:
                    source = [self.random.fold_in(key, 1) for key in source]
                return self.step(params, x, *source)

        Redrawn.random = self.jax.random
        return Redrawn(super().step(loss, budget=budget, plan=plan, **planning))


class MeanOfMeans(Jax):
    def micro_batched(self, values, count, reduction, **planning):
        whole = self.whole(values, reduction)

        def run(params, *data):
            pieces = [whole(params, *one) for one in zip(*(np.array_split(d, count) for d in data), strict=True)]
            return self.jax.tree.map(lambda *parts: sum(parts) / count, *pieces)

        return run


class CheckpointThatSavesNothing(Jax):
    @property
    def verbs(self):
        def recompute(function):
            def called(x, a, *rest, **options):
                return self.jax.checkpoint(lambda x, a: function(x, a, *rest, **options))(x, a)

            return called

        return types.SimpleNamespace(**{**vars(super().verbs), "recompute": recompute})


def slow(broken, check):
    return pytest.param(broken, check, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (IgnoredBudget, checks.a_budget_is_kept_with_the_same_numbers),
        slow(InexactGradients, checks.a_budget_is_kept_with_the_same_numbers),
        slow(FreshDraws, checks.random_draws_are_those_of_the_plain_step),
        slow(MeanOfMeans, checks.micro_batches_give_the_numbers_of_the_whole_batch),
        (CheckpointThatSavesNothing, checks.recompute_saves_memory_and_takes_any_arguments),
    ],
    ids=lambda part: part.__name__,
)
def test_a_broken_front_end_is_rejected(broken, check, tmp_path):
    with pytest.raises(AssertionError):
        check(broken(), tmp_path)
