"""Batches of ever other shapes: less work for each plan, plans that are let go of, and advice that is given once."""

from __future__ import annotations

import pytest
import torch
from torch_models import mlp

import remat
import remat.torch
from remat.torch import new_shapes
from remat.torch.api import eager_limit

pytestmark = pytest.mark.usefixtures("no_compiled_code")


def gradients(case, loss_fn, rows):
    x = torch.ones(rows, 64) / torch.arange(1, rows + 1)[:, None]
    case.module.zero_grad()
    loss = loss_fn(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in case.module.parameters())]


def limited_like_plain(case, limited, rows):
    plain, planned = (gradients(case, fn, rows) for fn in (case.loss, limited))
    return all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


@pytest.fixture
def asked(monkeypatch):
    """What the planner was asked for each plan, but for what every plan has."""
    found = []
    plan = eager_limit.plan

    def asking(*args, **options):
        found.append({name: options[name] for name in options if name in ("thorough", "planner", "time_limit_s")})
        return plan(*args, **options)

    monkeypatch.setattr(eager_limit, "plan", asking)
    return found


def test_the_fourth_combination_is_planned_with_less_work(asked):
    case = mlp(layers=8)
    limited = remat.torch.limit_memory(case.loss, "1MiB", mode="eager")
    for rows in (400, 390, 380, 370, 360, 400, 370):
        assert limited_like_plain(case, limited, rows)
    assert asked == [{}, {}, {}, {"thorough": False}, {"thorough": False}]
    assert all(plan.recomputed > 0 and plan.measured_peak_bytes <= 1 << 20 for plan in limited.plans)


@pytest.mark.parametrize("said", [{"planner": "peak_greedy"}, {"time_limit_s": 1.0}, {"thorough": True}])
def test_whoever_says_how_to_plan_is_obeyed(asked, said):
    case = mlp(layers=4)
    limited = remat.torch.limit_memory(case.loss, "4MiB", mode="eager", **said)
    for rows in (64, 60, 56, 52):
        limited(torch.ones(rows, 64)).backward()
    assert asked == [said] * 4


def test_what_little_work_does_not_find_is_sought_with_all(monkeypatch, asked):
    plan = eager_limit.plan

    def failing(*args, **options):
        found = plan(*args, **options)
        if options.get("thorough", True):
            return found
        raise remat.InfeasibleBudget("not found", budget_bytes=1 << 20, minimum_bytes=2 << 20, binding_op="one")

    monkeypatch.setattr(eager_limit, "plan", failing)
    case = mlp(layers=8)
    limited = remat.torch.limit_memory(case.loss, "1MiB", mode="eager")
    for rows in (400, 390, 380, 370):
        assert limited_like_plain(case, limited, rows)
    assert asked == [{}, {}, {}, {"thorough": False}, {}]


def test_plans_for_shapes_that_were_not_met_for_long_are_let_go(monkeypatch, asked):
    monkeypatch.setattr(eager_limit, "_MOST_SHAPES", 3)
    case = mlp(layers=8)
    limited = remat.torch.limit_memory(case.loss, "1MiB", mode="eager")
    met = (400, 390, 400, 380, 370, 400, 360)  # 400 is met now and then: 390, then 380 are the oldest.
    for rows in met:
        assert limited_like_plain(case, limited, rows)
    assert len(asked) == 5
    assert len(limited.plans) == 3
    for rows, plans in ((400, 5), (370, 5), (390, 6)):
        assert limited_like_plain(case, limited, rows)
        assert len(asked) == plans


def test_a_step_that_is_planned_no_more_is_planned_once_it_was_let_go(monkeypatch):
    monkeypatch.setattr(eager_limit, "_MOST_SHAPES", 1)
    case = mlp(layers=4)
    limit = eager_limit.EagerLimit(case.loss, "4MiB", True, False, {}, [])
    first, other = torch.ones(64, 64), torch.ones(60, 64)
    limit.applied_for((first,), {})
    limit._given_up |= limit._applied.keys()  # As where a step took a branch that cannot be planned.
    limit.applied_for((other,), {})
    assert limit.applied_for((first,), {}).plan is limit.plans[-1]


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_advice_is_given_once(monkeypatch, caplog, mode):
    monkeypatch.setattr(new_shapes, "_MANY", 3)
    case = mlp(layers=2)
    limited = remat.torch.limit_memory(case.loss, "8MiB", mode=mode)
    said = []
    for rows in (64, 60, 64, 56, 52):
        limited(torch.ones(rows, 64)).backward()
        said.append(sum("pad batches to a few lengths" in record.message for record in caplog.records))
    assert said == [0, 0, 0, 1, 1]


@pytest.fixture
def three_graphs(monkeypatch):
    """Dynamo captures three graphs of a function, and no more."""
    from remat.torch.graph_mode import _aot

    monkeypatch.setitem(_aot._WHILE_CAPTURING, "recompile_limit", 3)
    _aot._settings.cache_clear()
    yield
    _aot._settings.cache_clear()


@pytest.mark.parametrize("mode", ["graph", "auto"])
def test_more_shapes_than_graphs_run_eagerly(three_graphs, caplog, mode):
    case = mlp(layers=8)
    limited = remat.torch.limit_memory(case.loss, "1MiB", mode=mode)
    for rows in (400, 390, 380, 370, 400, 360, 370, 390):
        assert limited_like_plain(case, limited, rows)
    assert [plan.mode for plan in limited.plans] == ["graph"] * 3 + ["eager"] * 2
    assert all(plan.recomputed > 0 and plan.measured_peak_bytes <= 1 << 20 for plan in limited.plans)
    assert sum("has other shapes runs eagerly" in record.message for record in caplog.records) == 1


def test_other_models_of_one_function_do_not_count(three_graphs):
    """As in a search for parameters, whose trials share a function."""
    for _ in range(5):
        case = mlp(layers=2)
        x = torch.ones(8, 64)
        module, loss = case.module, lambda given, module: module(given).square().mean()
        limited = remat.torch.limit_memory(loss, "1MiB", mode="graph")
        limited(x, module).backward()
        assert [plan.mode for plan in limited.plans] == ["graph"]


@pytest.mark.thorough
def test_more_shapes_than_inductor_compiled_run_eagerly(caplog):
    case = mlp(layers=8)
    compiled = remat.torch.compile(case.loss, budget="1MiB")
    met = (400, 390, 380, 370, 390)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in met:
            plain, planned = (gradients(case, fn, rows) for fn in (case.loss, compiled))
            for one, own in zip(plain, planned, strict=True):
                torch.testing.assert_close(own, one)
    assert [plan.mode for plan in compiled.plans] == ["inductor"] * 2 + ["eager"] * 2
    assert all(plan.peak_bytes <= 1 << 20 for plan in compiled.plans)
    assert sum("Dynamo's limit is reached" in record.message for record in caplog.records) == 1
