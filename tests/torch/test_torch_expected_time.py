"""What a run under a plan is expected to take beside its operators, where that is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
import remat.torch
from remat.torch.api.plan import _CALL_S, _RERUN_S, _WATCHED_CALL_S

LAYERS = 12


def step():
    module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(LAYERS)))
    return lambda x: module(x).square().mean(), torch.randn(512, 64)


def test_an_eager_plan_on_a_cpu_knows_what_calls_take():
    loss, x = step()
    plain = remat.torch.plan(loss, x, budget="150%")
    planned = remat.torch.plan(loss, x, budget="60%")
    calls = planned.step.recording.forward_calls

    assert calls >= 2 * LAYERS
    assert planned.recomputed > 0
    for plan in (plain, planned):
        assert plan.baseline_expected_time_s == pytest.approx(plan.baseline_time_s + calls * _CALL_S)
        beside = plan.expected_time_s - plan.time_s
        assert beside == pytest.approx(calls * (_CALL_S + _WATCHED_CALL_S) + plan.recomputed * _RERUN_S)
        assert plan.with_schedule(plan.schedule).expected_time_s == pytest.approx(plan.expected_time_s)
    # Watching alone takes time, too.
    assert plain.overhead == 0 < plain.expected_overhead < planned.expected_overhead
    assert planned.expected_overhead > planned.overhead


def test_a_gpu_hides_what_calls_take():
    loss, x = step()
    plan = remat.torch.plan(loss, x, budget="60%", device="a100")
    assert plan.expected_time_s is None
    assert plan.expected_overhead == plan.overhead


def test_caches_are_not_set_against_the_roofline_of_another_cpu():
    loss, x = step()
    planned = remat.torch.compile(loss, budget="60%", backend="aten")
    planned(x).backward()
    assert planned.plan.recomputed > 0
    assert planned.plan.expected_time_s is None
    assert planned.plan.expected_overhead == planned.plan.overhead
