"""The first step under a plan tells what it took; a step that departs from its plan keeps its numbers, and says so."""

from __future__ import annotations

import pytest
import torch
from steps import peak_bytes, planned, run
from torch import nn
from torch_models import Case, bert, mlp

import remat
import remat.torch
from remat.torch import _backward_pass
from remat.torch.emit.first_step import StorageMeter, rounding_bytes
from remat.torch.trace import cpu_scratch


def test_another_shape_or_branch_keeps_everything_and_says_so_once(caplog):
    case = mlp()
    applied = planned(case)
    for rows in (100, 90):
        other = Case(case.module, case.loss, (torch.randn(rows, 64),))
        assert run(other, applied).same_as(run(other))
    case.module.insert(2, nn.Softplus())
    assert run(case, applied).same_as(run(case))
    assert applied.departures == 3
    assert caplog.text.count("departs from the plan") == 1
    assert "Plan again" in caplog.text


def test_a_small_branch_does_not_lose_the_plan():
    """A batch without padding takes another way through the mask, and then the same layers."""
    padded, full = bert(2, 64, 4, 64), bert(2, 64, 4, 64, padded=False)
    case = Case(padded.module, padded.loss, full.args)
    applied = planned(padded)
    assert run(case, applied).same_as(run(case))
    assert applied.departures == 0
    assert applied.plan.measured_peak_bytes <= applied.plan.peak_bytes + 3 * 4 * 4 * 64 * 64 * 4


class Branching(nn.Module):
    """Blocks of six operators, each behind a branch that runs one more, or not."""

    def __init__(self, more):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(mlp(layers=3).module[:6])) for _ in range(5))
        self.more = more

    def forward(self, x):
        for block in self.blocks:
            x = block(x.neg() if self.more else x)
        return x.square().mean()


@pytest.mark.parametrize("more", [False, True])
def test_getting_back_in_step_loses_no_operators(more):
    """Of the operators that tell where the plan goes on nothing is kept, either."""
    module, x = Branching(more), torch.randn(256, 64)
    case = Case(module, module, (x,))
    applied = planned(case)
    peak = peak_bytes(case, applied)
    module.more = not more
    assert run(case, applied).same_as(run(case))
    # The result of an operator that the plan does not have is kept where it is saved, and that is said.
    assert applied.departures == (not more)
    assert peak_bytes(case, applied) <= peak + (-2 if more else 5) * x.nbytes


def test_the_first_step_is_measured():
    case = mlp()
    applied = planned(case)
    assert applied.plan.measured_peak_bytes is None
    run(case, applied)
    measured = applied.plan.measured_peak_bytes
    # Results of a few bytes come to more in the allocator.
    assert measured == pytest.approx(peak_bytes(case, applied), abs=64)
    assert measured == applied.plan.peak_bytes
    assert "measured peak" in str(applied.plan)


def test_a_measured_peak_is_saved(tmp_path):
    case = mlp()
    plan = planned(case).plan
    plan.save(tmp_path / "before.json")
    assert remat.load_plan(tmp_path / "before.json").measured_peak_bytes is None
    run(case, remat.torch.apply(plan))
    plan.save(tmp_path / "after.json")
    assert remat.load_plan(tmp_path / "after.json").measured_peak_bytes == plan.measured_peak_bytes > 0


def test_a_broken_recipe_is_said_by_the_first_step(caplog, monkeypatch):
    case = mlp()
    applied = planned(case)
    broken = next(op for op in applied._planned.ops if op.repeats and op.func is torch.ops.aten.tanh.default)
    broken.repeats, broken.is_kept = False, (False,)
    assert run(case, applied).same_as(run(case))
    assert applied.departures == 1
    assert "tanh, has no recipe" in caplog.text


class Surprise(nn.Module):
    """Layers that save more in a real step than in the traced one: a truth value of the step says so."""

    def __init__(self):
        super().__init__()
        self.body = mlp(layers=8).module

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
            if (x.detach() > -9).all():
                x = x * x.sigmoid()
        return x.square().mean()


def test_a_step_over_its_budget_is_said_once_with_bytes_and_operator(caplog):
    module = Surprise()
    case = Case(module, module, (torch.randn(256, 64),))
    applied = planned(case)
    plan = applied.plan
    for _ in range(2):
        assert run(case, applied).same_as(run(case))
    assert plan.measured_peak_bytes > 1.01 * plan.budget_bytes
    assert caplog.text.count("more than the budget of") == 1
    assert "aten::sigmoid making [(256, 64)], the plan has" in caplog.text


def test_a_strict_step_over_its_budget_is_an_error():
    module = Surprise()
    case = Case(module, module, (torch.randn(256, 64),))
    with pytest.raises(remat.PlanMismatch, match="more than the budget of"):
        run(case, remat.torch.apply(planned(case).plan, strict=True))


def test_scratch_memory_that_no_trace_knows_is_heard_of(monkeypatch):
    monkeypatch.setattr(cpu_scratch, "workspace_bytes", lambda func, args, out: 0)
    layer, x = nn.Linear(4, 4), torch.randn(64, 4096)

    def loss():
        return layer(x.t().softmax(-1)[:4, :4]).sum()  # The kernel of softmax copies what is not contiguous.

    plan = remat.torch.plan(loss, budget="100%", planner="store_all")
    with remat.torch.apply(plan, strict=True):
        value = loss()
    with pytest.raises(remat.PlanMismatch, match=r"_softmax takes 1\.0\d MiB of scratch memory .* 0 B were predicted"):
        value.backward()
    assert plan.measured_peak_bytes >= plan.peak_bytes + x.nbytes


def test_scratch_memory_is_left_to_a_profiler_that_runs_already():
    with torch.autograd.profiler.profile(profile_memory=True), StorageMeter() as meter:
        torch.ones(1000).add(1)
    assert meter.peak_bytes >= 8000


def test_backward_passes_are_left_alone_once_the_first_step_was_measured():
    # Graph mode, if it ran before in this process, stays around them.
    own, around = torch.autograd._engine_run_backward, list(_backward_pass._around)
    case = mlp()
    applied = planned(case)
    with applied:
        loss = case.loss(*case.args)
    assert len(_backward_pass._around) == len(around) + 1
    assert torch.autograd._engine_run_backward is _backward_pass._run_surrounded
    loss.backward()
    assert _backward_pass._around == around
    assert torch.autograd._engine_run_backward is own


def test_a_forward_pass_that_nobody_follows_leaves_later_backward_passes_alone():
    own, around = torch.autograd._engine_run_backward, list(_backward_pass._around)
    case = mlp()
    applied = planned(case)
    with applied:
        loss = case.loss(*case.args)
    assert len(_backward_pass._around) == len(around) + 1
    del loss
    assert _backward_pass._around == around
    assert torch.autograd._engine_run_backward is own
    assert applied.plan.measured_peak_bytes is None
    # The next step is measured in its place.
    run(case, applied)
    assert applied.plan.measured_peak_bytes == applied.plan.peak_bytes


def test_a_step_is_measured_beyond_its_last_read():
    """Autograd lets go of what was saved as it reads it; here the largest gradient is made after that."""
    weight = torch.randn(100_000, requires_grad=True)

    def loss():
        return weight.narrow(0, 0, 8).sin().sum()

    plan = remat.torch.plan(loss, budget="100%", planner="store_all")
    with remat.torch.apply(plan):
        value = loss()
    other = torch.ones(3, requires_grad=True)
    (other * other).sum().backward()  # Reads nothing of the step.
    assert plan.measured_peak_bytes is None
    value.backward()
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, abs=200)


@pytest.mark.parametrize(
    ("sizes", "changes", "expected"),
    [
        ((1000,), [1024], 24),
        ((1000, 1000), [1024, 4096, 1024, -4096], 24),
        ((1 << 20,), [(1 << 20) + (1 << 19)], 1 << 19),
        ((1000,), [1024, 65 << 20], 1 << 20),  # A library keeps something: no part of the block.
        ((1000,), [512], 0),
        ((1000,), [], 0),
        ((1000,), None, 0),
        ((), [1024], 0),
    ],
)
def test_what_an_allocator_hands_out_beyond_a_storage_counts_up_to_its_rule(sizes, changes, expected):
    """A GPU's gives larger blocks: 10 to 18 MiB of an H200 in training steps of a ResNet-50."""
    storages = [torch.empty(size, dtype=torch.uint8).untyped_storage() for size in sizes]
    assert rounding_bytes(storages, changes) == expected
