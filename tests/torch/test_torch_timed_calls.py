"""Graph mode on this machine: ``device="measured"`` times the calls of a step by themselves."""

from __future__ import annotations

import pytest
import torch
from steps import QUICK, outcome
from torch import nn

import remat.torch
from remat.running import cost_model, step_time
from remat.running.step_time import missed_bytes
from remat.torch.graph_mode.timed_calls import TimedCalls

pytestmark = pytest.mark.usefixtures("no_compiled_code")


@pytest.fixture(autouse=True)
def no_saved_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(cost_model, "measured_path", lambda: tmp_path / "none.json")


def chain():
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))])


def times_of(plan, kind):
    return [op.time_s for op in plan.graph.ops if op.kind.startswith(kind)]


def test_a_plan_has_the_times_that_calls_took(monkeypatch):
    def timed(function, target, args, kwargs):
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        assert all(one.device.type != "meta" for one in tensors)
        return {"tanh": 5.0, "addmm": 1.0}.get(function.__name__, 0.25)

    monkeypatch.setattr(TimedCalls, "_timed", staticmethod(timed))
    module, x = chain(), torch.randn(512, 64)
    planned = remat.torch.compile(lambda x: module(x).square().mean(), device="measured", backend="aten", **QUICK)
    planned(x).backward()
    plan = planned.plan
    assert set(times_of(plan, "aten.tanh.")) == {5.0}
    # The transpose of the weight is a view, made for the product.
    assert set(times_of(plan, "aten.addmm.")) == {1.25}
    extra = [plan.graph.ops[op].kind for op in plan.schedule]
    for op in plan.graph.ops:
        extra.remove(op.kind)
    assert extra
    assert plan.overhead * plan.graph.time_s == pytest.approx(sum(op_time(plan, kind) for kind in extra), rel=0.01)
    # What saves as much and takes less is run again.
    assert not any(kind.startswith("aten.tanh.") for kind in extra)


def test_what_a_run_is_expected_to_take_knows_of_caches(monkeypatch):
    """Calls that are timed by themselves find in a cache what they read; in a step that depends on the schedule."""
    monkeypatch.setattr(TimedCalls, "_timed", staticmethod(lambda *args: 1e-4))
    monkeypatch.setattr(step_time, "cache_bytes", lambda: 1 << 20)
    module, x = chain(), torch.randn(512, 64)
    planned = remat.torch.compile(lambda x: module(x).square().mean(), device="measured", backend="aten", **QUICK)
    planned(x).backward()
    plan = planned.plan
    rate = cost_model.get_profile("cpu").memory_rate
    ours, plain = (missed_bytes(plan.graph, one, 1 << 20) for one in (plan.schedule, plan.graph.plain_schedule))
    assert ours < plain
    assert plan.expected_time_s == pytest.approx(plan.time_s + ours / rate)
    assert plan.baseline_expected_time_s == pytest.approx(plan.baseline_time_s + plain / rate)


def test_a_plan_for_a_gpu_expects_nothing_of_caches():
    module, x = chain(), torch.randn(512, 64)
    planned = remat.torch.compile(lambda x: module(x).square().mean(), device="a100", backend="aten", **QUICK)
    planned(x).backward()
    assert planned.plan.expected_time_s is None
    assert planned.plan.expected_overhead == planned.plan.overhead


def op_time(plan, kind):
    return next(op.time_s for op in plan.graph.ops if op.kind == kind)


def test_timing_changes_no_numbers():
    module, x = chain(), torch.randn(512, 64)
    loss_fn = lambda x: module(x).square().mean()  # noqa: E731
    expected = outcome(module, loss_fn, x)
    planned = remat.torch.compile(loss_fn, device="measured", backend="aten", **QUICK)
    for _ in range(2):
        assert outcome(module, planned, x).same_as(expected)
    assert planned.plan.recomputed > 0
    assert all(one > 0 for one in times_of(planned.plan, "aten."))


def test_what_may_do_more_than_compute_is_not_run():
    ran = []

    @torch.library.custom_op("remat_tests::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.clone()

    noted.register_fake(torch.empty_like)
    noted.register_autograd(lambda ctx, grad: grad)
    module, x = chain(), torch.randn(512, 64)
    planned = remat.torch.compile(
        lambda x: module(noted(module(x))).square().mean(), budget="100%", device="measured", backend="aten", **QUICK
    )
    planned(x).backward()
    assert len(ran) == 1
    assert all(one > 0 for one in times_of(planned.plan, "remat_tests."))
