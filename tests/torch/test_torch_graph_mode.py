"""Graph mode: the schedule as two straight functions, equal to eager PyTorch to the bit, memory as predicted."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from steps import QUICK, Outcome, made_again_at_every_read, made_again_once
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch_models import CASES, gpt2, mlp, resnet

import remat
import remat.torch
from remat.core.plan import plan_for_schedule
from remat.torch.graph_mode.candidate import GraphCandidate
from remat.torch.trace import cpu_scratch


@pytest.fixture(autouse=True)
def no_compiled_code():
    """Each test captures anew."""
    torch._dynamo.reset()


def outcome(module, loss_fn, *args, seed=7):
    """What a step leaves behind, from the module's present state, which is put back."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.zero_grad()
    torch.manual_seed(seed)
    loss = loss_fn(*args)
    loss.backward()
    found = Outcome(
        loss.detach(),
        {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None},
        {name: b.clone() for name, b in module.named_buffers()},
        torch.get_rng_state(),
    )
    module.zero_grad()
    module.load_state_dict(before)
    return found


@pytest.fixture
def under(monkeypatch):
    """Graph mode under a schedule of the test's own."""

    def compiled(loss_fn, schedule):
        monkeypatch.setattr(GraphCandidate, "fitted", lambda self, request: schedule(self.graph))
        return remat.torch.compile(loss_fn, backend="aten")

    return compiled


SLOW = {**CASES, "mlp": lambda: mlp(dropout=0.1)}


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["70%", "50%", "30%", "1%"], ids=["70", "50", "30", "minimum"])
@pytest.mark.parametrize("name", SLOW)
def test_every_model_at_every_budget(name, budget):
    case = SLOW[name]()
    plain = outcome(case.module, case.loss, *case.args)
    planned = remat.torch.compile(case.loss, budget=budget, backend="aten", time_limit_s=2)
    try:
        found = outcome(case.module, planned, *case.args)
    except remat.InfeasibleBudget as error:
        # Below what is possible: the smallest budget that it names must do.
        torch._dynamo.reset()
        planned = remat.torch.compile(case.loss, budget=error.minimum_bytes, backend="aten", time_limit_s=2)
        found = outcome(case.module, planned, *case.args)
    assert found.same_as(plain)
    assert planned.plan.mode == "graph"
    assert planned.plan.recomputed > 0
    case.module.zero_grad()
    measured = remat.torch.measure(planned, *case.args, repeats=1).peak_bytes
    plan = planned.plan
    print(f"{name} {budget}: plain {plan.baseline_peak_bytes}, budget {plan.budget_bytes}, ", end="")
    print(f"predicted {plan.peak_bytes}, measured {measured}, overhead {plan.overhead:.3f}")
    # What differs is scratch memory of kernels: of convolutions, mostly.
    assert measured <= 1.01 * plan.peak_bytes
    assert measured == pytest.approx(plan.peak_bytes, rel=0.04)


def check(module, loss_fn, args, under, schedule=made_again_once):
    plain = outcome(module, loss_fn, *args)
    planned = under(loss_fn, schedule)
    assert outcome(module, planned, *args).same_as(plain)
    assert outcome(module, planned, *args).same_as(plain)  # The second step is not measured, and takes another way.
    assert planned.reason is None
    assert planned.plan.mode == "graph"
    assert planned.plan.recomputed > 0
    assert planned.plan.measured_peak_bytes == pytest.approx(planned.plan.peak_bytes, rel=0.02)
    module.zero_grad()
    assert remat.torch.measure(planned, *args, repeats=1).peak_bytes == pytest.approx(planned.plan.peak_bytes, rel=0.01)
    return planned


class Mixed(nn.Module):
    """Views, a skip connection, BatchNorm, random draws, several results, writes in place, tied weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.gates[1].weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x).view(-1, 4, 8).transpose(0, 1)
            largest, _ = y.max(2, keepdim=True)
            x = x + F.dropout((y - largest).transpose(0, 1).reshape(x.shape), 0.2)
            x[:, :4] *= 2
            x = F.layer_norm(x, (32,))
        one, two = x.chunk(2, 1)
        x = torch.cat([one.clone().relu_() + two, F.dropout(two, 0.5).mul_(3)], 1)
        self.seen += 1
        noise = torch.rand_like(x) + torch.randn(32)
        x = torch.tanh(x * noise)
        return F.linear(self.gates[0](x) * self.gates[1](x), self.layers[0][0].weight)


@pytest.mark.parametrize("schedule", [made_again_once, made_again_at_every_read])
def test_a_step_of_everything_is_eager_pytorch_to_the_bit(under, schedule):
    module = Mixed()
    x = torch.randn(64, 32)
    loss_fn = lambda x: module(x).square().mean()  # noqa: E731
    plain = outcome(module, loss_fn, x)
    planned = under(loss_fn, schedule)
    assert outcome(module, planned, x).same_as(plain)
    assert outcome(module, planned, x).same_as(plain)
    assert plain.buffers["seen"] == 1
    assert planned.plan.recomputed > 20
    graph = planned.plan.graph
    assert {graph.tensors[n].role for n in graph.inputs} == {"parameter", "state", "batch"}
    assert any("layers.2" in op.layer for op in graph.ops)
    # Two passes run what the schedule says, and each draw is repeated in its own state.
    lines = planned.plan.forward_source.count("= f") + planned.plan.backward_source.count("= f")
    assert lines > len(planned.plan.schedule) / 2
    assert "note_state" in planned.plan.forward_source


MODELS = {
    "mlp": lambda: mlp(4, dropout=0.1),
    "resnet": lambda: resnet(8, 4, 1),
    "gpt2": lambda: gpt2(1, 32, 2, 32),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_under_a_fixed_schedule(under, name):
    case = MODELS[name]()
    check(case.module, case.loss, case.args, under)


def test_autocast(under):
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.Dropout(0.1))

    def loss_fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x).float().square().mean()

    planned = check(module, loss_fn, (torch.randn(64, 32),), under)
    assert any("bfloat16" in (t.dtype or "") for t in planned.plan.graph.tensors)


def test_autocast_around_the_call(under):
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    planned = under(lambda x: module(x).float().square().mean(), made_again_once)

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return planned(x)

    def plain(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x).float().square().mean()

    x = torch.randn(64, 32)
    assert outcome(module, inside, x).same_as(outcome(module, plain, x))


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


def test_a_function_of_the_users_own_with_hooks(under):
    module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    module[1].register_forward_hook(lambda module, inputs, output: output * 2)
    seen = []
    module[0].weight.register_hook(lambda gradient: gradient * 2)
    module[2].bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    # With that many rows, what the hooks themselves make (144 bytes) is no part of the prediction that matters.
    check(module, lambda x: Cubed.apply(module(x)).sum(), (torch.randn(256, 16),), under)
    assert len(seen) >= 3
    assert torch.equal(seen[0], seen[1])


def test_views_and_more_are_returned(under):
    layer = nn.Linear(16, 16)

    def step(x):
        y = layer(x).tanh()
        z = layer(y).tanh()
        return z.square().mean(), {"view": z[:4], "input": x, "number": 3, "wide": z.view(2, -1)}

    x = torch.randn(8, 16)
    plain_loss, plain_more = step(x)
    plain_loss.backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    loss, more = under(step, made_again_once)(x)
    assert torch.equal(more["view"], plain_more["view"])
    assert more["view"].untyped_storage().data_ptr() == more["wide"].untyped_storage().data_ptr()
    assert more["input"] is x
    assert more["number"] == 3
    loss.backward()
    assert torch.equal(layer.weight.grad, expected)


def test_what_is_returned_is_held_and_counts():
    """The caller holds it over the backward pass, so that dropping it would free nothing."""
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    def step(x):
        found = []
        for layer in layers:
            found.append(layer(x).tanh())
            x = found[-1]
        return x.square().mean(), found

    x = torch.randn(1024, 64)
    limited = remat.torch.compile(step, budget="100%", backend="aten", **QUICK)
    loss, _ = limited(x)
    loss.backward()
    graph, returned = limited.plan.graph, []
    for op in graph.ops:
        if op.kind.startswith("aten.tanh.") and op.phase == "forward":
            returned.append(op)
    assert len(returned) == 4
    assert not any(op.recomputable for op in returned)
    held_bytes = sum(graph.tensors[op.outputs[0]].size_bytes for op in returned)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        remat.torch.compile(step, budget=held_bytes, backend="aten", **QUICK)(x)
    assert caught.value.minimum_bytes > held_bytes


def test_gradients_through_a_second_output_and_kept_graphs(under):
    layer = nn.Linear(16, 16)

    def step(x):
        y = (layer(x) + 1).relu()
        return (layer(y) * 2).relu().mean(), y.sum()

    x = torch.randn(8, 16)
    planned = under(step, made_again_once)
    for run in (step, planned):
        one, two = run(x)
        (one + two).backward(retain_graph=True)
        first = layer.weight.grad.clone()
        (one + two).backward()
        found = (first, layer.weight.grad.clone())
        layer.zero_grad()
        if run is step:
            expected = found
    assert all(map(torch.equal, found, expected))


def activations_made_again(graph):
    """A plan that keeps products, and makes what is added to them and the relu again for the backward pass."""
    cheap = {
        tensor: index
        for index, op in enumerate(graph.ops)
        if op.phase == "forward" and op.kind.startswith(("aten.add.", "aten.relu"))
        for tensor in op.outputs
    }
    schedule, again = [], set()
    for index, op in enumerate(graph.ops):
        if op.phase == "backward":
            needed, waiting = set(), list(op.inputs)
            while waiting:
                maker = cheap.get(waiting.pop())
                if maker is not None and maker not in again | needed:
                    needed.add(maker)
                    waiting += graph.ops[maker].inputs
            schedule += sorted(needed)
            again |= needed
        schedule.append(index)
    return plan_for_schedule(graph, tuple(schedule), planner="by hand")


def test_what_was_saved_is_written_over_only_where_the_graph_is_not_kept(under):
    layer = nn.Linear(16, 16)

    def step(x):
        return (layer((layer(x) + 1).relu()) + 2).relu().square().mean()

    x = torch.randn(8, 16)
    planned = under(step, activations_made_again)
    found = []
    for run in (step, planned):
        loss = run(x)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(layer.weight.grad.clone())
        layer.zero_grad()
    assert torch.equal(*found)
    # What the second product made is saved, and the sum is written over it.
    assert "add_" in planned.plan.backward_source


def test_each_combination_of_shapes_has_a_plan():
    case = mlp(4)
    planned = remat.torch.compile(case.loss, budget="97%", backend="aten", **QUICK)
    (x,) = case.args
    for batch in (256, 224, 256):
        expected = outcome(case.module, case.loss, x[:batch])
        assert outcome(case.module, planned, x[:batch]).same_as(expected)
    assert [plan.mode for plan in planned.plans] == ["graph", "graph"]
    with torch.no_grad():
        assert torch.equal(planned(x), case.loss(x))
    assert len(planned.plans) == 2


def test_what_cannot_be_captured_runs_eagerly_and_says_why(caplog):
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def loss_fn(x):
        y = module(x)
        torch._dynamo.graph_break()
        return y.square().mean()

    x = torch.randn(256, 64)
    planned = remat.torch.compile(loss_fn, budget="90%", backend="aten", **QUICK)
    expected = outcome(module, loss_fn, x)
    with caplog.at_level(logging.WARNING, "remat"):
        assert outcome(module, planned, x).same_as(expected)
    (message,) = [record.getMessage() for record in caplog.records if "cannot be captured" in record.getMessage()]
    assert "loss_fn" in message
    assert "graph_break" in message
    assert "test_torch_graph_mode.py:" in message  # Where it broke.
    assert "Hint" not in message
    assert "\n" not in message
    assert planned.reason in message
    assert planned.plan.mode == "eager"
    assert "mode           eager" in str(planned.plan)


def test_a_budget_that_cannot_be_kept_names_one_that_can():
    case = mlp(4)
    planned = remat.torch.compile(case.loss, budget=1000, backend="aten", **QUICK)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        planned(*case.args)
    planned = remat.torch.compile(case.loss, budget=caught.value.minimum_bytes, backend="aten", **QUICK)
    planned(*case.args).backward()
    assert planned.plan.peak_bytes <= caught.value.minimum_bytes
    case.module.zero_grad()
    measured = remat.torch.measure(planned, *case.args, repeats=1).peak_bytes
    assert measured <= 1.01 * caught.value.minimum_bytes


def test_a_saved_plan_is_followed_again(tmp_path):
    case = mlp(4)
    first = remat.torch.compile(case.loss, budget="90%", backend="aten", **QUICK)
    first(*case.args)
    first.plan.save(tmp_path / "plan.json", first.plan.graph)
    torch._dynamo.reset()
    loaded = remat.load_plan(tmp_path / "plan.json")
    assert loaded.mode == "graph"
    again = remat.torch.compile(case.loss, plan=loaded, backend="aten")
    assert outcome(case.module, again, *case.args).same_as(outcome(case.module, case.loss, *case.args))
    assert again.plan.schedule == first.plan.schedule
    other = mlp(5)
    with pytest.raises(remat.PlanMismatch):
        remat.torch.compile(other.loss, plan=loaded, backend="aten")(*other.args)


def test_arguments_are_read_at_once():
    with pytest.raises(remat.InvalidBudget):
        remat.torch.compile(lambda x: x, budget="many", backend="aten")
    with pytest.raises(ValueError, match="inductor"):
        remat.torch.compile(lambda x: x, budget="60%", backend="triton")
    plan = remat.torch.plan(lambda x: x.sum(), torch.ones(3, requires_grad=True), budget="100%")
    with pytest.raises(ValueError, match="not both"):
        remat.torch.compile(lambda x: x, budget="60%", plan=plan, backend="aten")
    with pytest.raises(ValueError, match="aten"):
        remat.torch.compile(lambda x: x, plan=plan)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.2, bidirectional=True, batch_first=True)
        self.plain = nn.LSTM(32, 16, bias=False)
        self.gru = nn.GRU(16, 16)

    def forward(self, x):
        return self.gru(self.plain(self.lstm(x)[0])[0])[0]


def test_recurrent_layers(under):
    module = Recurrent()
    x = torch.randn(4, 6, 16)
    loss_fn = lambda x: module(x).square().mean()  # noqa: E731
    planned = under(loss_fn, made_again_once)
    assert outcome(module, planned, x).same_as(outcome(module, loss_fn, x))
    assert planned.plan.mode == "graph"
    kinds = [op.kind for op in planned.plan.graph.ops]
    assert sum("mkldnn_rnn_layer.default" in kind for kind in kinds) == 5


def test_a_limit_in_graph_mode():
    case = mlp(4)

    @remat.torch.limit_memory(budget="97%", mode="graph", **QUICK)
    def loss_fn(x):
        return {"loss": case.loss(x), "more": x}

    for batch in (256, 256, 128):
        (x,) = (case.args[0][:batch],)
        expected = outcome(case.module, case.loss, x)
        assert outcome(case.module, lambda x: loss_fn(x)["loss"], x).same_as(expected)
    assert [plan.mode for plan in loss_fn.plans] == ["graph", "graph"]
    # A share stays one of the first plan's step.
    assert loss_fn.plans[0].budget_bytes == loss_fn.plans[1].budget_bytes
    with pytest.raises(ValueError, match="keep"):
        remat.torch.limit_memory(case.loss, mode="graph", on_change="keep")
    with pytest.raises(ValueError, match="eager"):
        remat.torch.limit_memory(case.loss, mode="lazy")


def test_micro_batches_of_a_captured_loss():
    case = mlp(4, width=48, batch=512)
    captured = remat.torch.compile(case.loss, budget="97%", backend="aten", accumulates=True, **QUICK)
    step = remat.torch.micro_batches(captured, 4)
    plain = remat.torch.micro_batches(case.loss, 4)
    found = {}
    for name, run in (("plain", plain), ("captured", step)):
        case.module.zero_grad()
        loss = run(*case.args)
        found[name] = [loss, *(p.grad.clone() for p in case.module.parameters())]
    assert all(map(torch.equal, found["plain"], found["captured"]))
    plan = captured.plan
    gradients = sum(p.numel() * 4 for p in case.module.parameters())
    assert len(captured.plans) == 1
    assert plan.peak_bytes == remat.simulate(plan.graph, plan.schedule).peak_bytes + gradients

    def update(x):
        case.module.zero_grad()
        step(x)
        case.module.zero_grad()

    assert remat.torch.measure(update, *case.args, repeats=1).peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)


def test_an_optimizers_state_counts():
    case = mlp(4)
    optimizer = torch.optim.Adam(case.module.parameters())
    plain = remat.torch.compile(case.loss, budget="100%", backend="aten")
    plain(*case.args)
    torch._dynamo.reset()
    counted = remat.torch.compile(case.loss, budget="100%", backend="aten", optimizer=optimizer)
    counted(*case.args)
    parameters = sum(p.numel() * 4 for p in case.module.parameters())
    assert counted.plan.peak_bytes - plain.plan.peak_bytes == pytest.approx(2 * parameters, rel=0.01)
    assert not optimizer.state


@pytest.fixture
def scratch_memory(monkeypatch):
    """A step takes 20 kB more than its trace says: the scratch memory of operators."""
    knows = mock.Mock(wraps=cpu_scratch)
    knows.workspace_bytes = lambda func, args, out: 20_000
    monkeypatch.setattr("remat.torch.emit.first_step.cpu_scratch", knows)


def test_a_first_step_over_its_budget_is_planned_again(scratch_memory, caplog):
    case = mlp(4)
    expected = outcome(case.module, case.loss, *case.args)
    limited = remat.torch.limit_memory(case.loss, "90%", mode="graph", strict=True, **QUICK)
    with caplog.at_level(logging.WARNING, "remat"):
        for _ in range(3):
            assert outcome(case.module, limited, *case.args).same_as(expected)
    first, second = limited.plans
    assert first.measured_peak_bytes > 1.01 * first.budget_bytes
    assert second.budget_bytes == first.budget_bytes
    assert second.measured_peak_bytes <= second.budget_bytes
    # The excess counts as there from the start.
    excess = first.measured_peak_bytes - first.peak_bytes
    assert second.peak_bytes == remat.simulate(second.graph, second.schedule).peak_bytes + excess
    assert not caplog.records
    # Other shapes are planned by themselves, and those from before keep their plan.
    (x,) = case.args
    limited(x[:128]).backward()
    limited(x).backward()
    assert limited.plans[:2] == [first, second]
    assert len(limited.plans) == 3


def test_a_first_step_over_its_budget_where_no_plan_leaves_room(scratch_memory, caplog):
    case = mlp(4)
    tight = remat.torch.compile(case.loss, budget=1, backend="aten", **QUICK)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        tight(*case.args)
    smallest = caught.value.minimum_bytes
    torch._dynamo.reset()
    quiet = remat.torch.compile(case.loss, budget=smallest, backend="aten", **QUICK)
    with caplog.at_level(logging.WARNING, "remat"):
        for _ in range(3):
            quiet(*case.args).backward()
    assert len(quiet.plans) == 1
    (said,) = [one.getMessage() for one in caplog.records if one.name == "remat"]
    assert "no plan leaves so much room" in said
    torch._dynamo.reset()
    loud = remat.torch.compile(case.loss, budget=smallest, backend="aten", strict=True, **QUICK)
    loud(*case.args).backward()
    with pytest.raises(remat.InfeasibleBudget):
        loud(*case.args)


def test_a_first_step_over_the_budget_of_a_plan_that_was_given(scratch_memory, caplog):
    case = mlp(4)
    planned = remat.torch.compile(case.loss, budget="90%", backend="aten", **QUICK)
    planned(*case.args)
    torch._dynamo.reset()
    loud = remat.torch.compile(case.loss, plan=planned.plan, backend="aten", strict=True)
    with pytest.raises(remat.PlanMismatch, match="took"):
        loud(*case.args).backward()
    torch._dynamo.reset()
    quiet = remat.torch.compile(case.loss, plan=planned.plan, backend="aten")
    with caplog.at_level(logging.WARNING, "remat"):
        quiet(*case.args).backward()
        quiet(*case.args).backward()
    assert len([one for one in caplog.records if one.name == "remat" and "took" in one.getMessage()]) == 1


@pytest.mark.slow
def test_a_step_is_checked_in_graph_mode():
    case = mlp(3, dropout=0.2)
    result = remat.torch.check(case.loss, *case.args, budget="97%", steps=2, mode="graph")
    assert result.passed
    assert all(one.difference == 0 for one in result.comparisons)


def test_what_asks_for_values_runs_in_pieces(caplog):
    body = [m for _ in range(5) for m in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))]
    module = nn.ModuleList([nn.Sequential(*body), nn.Linear(64, 64), nn.Linear(64, 64)])

    def loss_fn(x):
        y = module[0](x)
        y = module[1 if y.sum().item() > 0 else 2](y)
        return torch.tanh(module[0](y)).square().mean()

    x = torch.randn(512, 64)
    expected = outcome(module, loss_fn, x)
    planned = remat.torch.compile(loss_fn, budget="80%", backend="aten", **QUICK)
    with caplog.at_level(logging.WARNING, "remat"):
        assert outcome(module, planned, x).same_as(expected)
        assert outcome(module, planned, x).same_as(expected)
    assert any("in pieces" in one.getMessage() for one in caplog.records)
    assert len(planned.plans) == 2
    assert all(plan.mode == "graph" and plan.recomputed for plan in planned.plans)
    fixed = remat.torch.compile(loss_fn, budget=10**6, backend="aten", **QUICK)
    with pytest.raises(remat.UnsupportedStep, match="share"):
        fixed(x)


def test_a_step_that_counts_its_calls_runs_eagerly_in_the_end(caplog):
    layer, calls = nn.Linear(8, 8), {"number": 0}

    def counting(x):
        calls["number"] += 1
        return layer(x).tanh().sum() + (0.0 if calls["number"] >= 0 else 1.0)

    limited = remat.torch.compile(counting, budget="1GiB", backend="aten", **QUICK)
    x = torch.randn(4, 8)
    with caplog.at_level(logging.WARNING, "remat"):
        for _ in range(6):
            loss = limited(x)
            loss.backward()
    assert torch.equal(loss, layer(x).tanh().sum())
    assert "captured 4 times" in limited.reason
    assert limited.plan.mode == "eager"
    assert sum("runs eagerly" in record.getMessage() for record in caplog.records) == 1


def test_a_sharded_module_is_refused_in_one_line():
    layer = nn.Linear(4, 4)
    layer.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    planned = remat.torch.compile(lambda x: layer(x).sum(), backend="aten")
    with pytest.raises(remat.UnsupportedStep, match=r"fully_shard.*remat.torch.apply"):
        planned(torch.ones(2, 4))


def test_captures_may_come_before_backward_passes(under):
    layer = nn.Linear(16, 16)
    loss_fn = lambda x: (layer(x) + 1).relu().square().mean()  # noqa: E731
    planned = under(loss_fn, made_again_once)
    found = []
    for run in (loss_fn, planned):
        losses = [run(torch.ones(rows, 16)) for rows in (4, 6, 4)]
        sum(losses).backward()
        found.append(layer.weight.grad.clone())
        layer.zero_grad()
    assert torch.equal(*found)


def test_code_that_asks_whether_it_is_compiled_takes_its_eager_branch(under):
    layer = nn.Linear(16, 16)

    def loss_fn(x):
        y = layer(x).tanh()
        scale = 2.0 if torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling() else 3.0
        return (layer(y) * scale).square().mean()

    x = torch.randn(8, 16)
    planned = under(loss_fn, made_again_once)
    assert outcome(layer, planned, x).same_as(outcome(layer, loss_fn, x))
    assert planned.plan.mode == "graph"
    # Whoever else compiles gets the answer that Dynamo gives.
    assert torch.compile(lambda: torch.compiler.is_compiling(), backend="eager")()
