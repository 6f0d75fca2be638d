"""Layers and models in ordinary loops: ``limit_memory``, ``recompute``, ``value_and_grad``, ``check``."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import numpy as np
import paddle
import pytest

import remat
import remat.paddle
from remat.fit.request import Request
from remat.paddle import _private
from remat.paddle.captured import Captured
from remat.paddle.emit.fences import settled_bytes

F = paddle.nn.functional


class Net(paddle.nn.Layer):
    """Linear layers with batch normalisation and dropout."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = paddle.nn.LayerList(
            [
                paddle.nn.Sequential(
                    paddle.nn.Linear(64, 64), paddle.nn.BatchNorm1D(64), paddle.nn.GELU(), paddle.nn.Dropout(0.2)
                )
                for _ in range(blocks)
            ]
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def batch(samples=4096):
    return paddle.to_tensor(np.random.default_rng(0).standard_normal((samples, 64)).astype("float32"))


def train(prepare, steps=5):
    """Losses, everything that training changed, and the smallest peak of a step."""
    paddle.seed(7)
    net = Net()
    net = prepare(net) or net
    optimizer = paddle.optimizer.Adam(1e-3, parameters=net.parameters())
    x = batch()
    paddle.seed(3)
    losses, peaks = [], []
    for _ in range(steps):
        gc.collect()
        before = _private.allocated_bytes()
        _private.reset_peak()
        loss = (net(x) ** 2).mean()
        loss.backward()
        peaks.append(_private.peak_bytes() - before)
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
        del loss
    values = {name: value.numpy() for name, value in net.state_dict().items()}
    return losses, values, min(peaks), net


def assert_equal(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in found[1].items():
        assert np.array_equal(value, expected[1][name]), name


@pytest.fixture(scope="module")
def plain():
    paddle.disable_static()
    return train(lambda net: None)


def test_a_limited_layer_trains_to_the_bit(plain):
    before = _private.flags(_private.IN_ORDER, _private.ONE_THREAD, _private.MERGES_COPIES)
    found = train(lambda net: remat.paddle.limit_memory(net, "65%", planner="peak_greedy"))
    assert_equal(found, plain)
    plan = remat.paddle.plan_of(found[3])
    assert plan.recomputed > 0
    assert plan.mode == "to_static"
    assert found[2] < 0.8 * plain[2]
    beside = sum(p.size * p.element_size() for p in found[3].parameters()) + batch().size * 4
    assert found[2] + beside <= plan.budget_bytes * 1.05
    assert _private.flags(_private.IN_ORDER, _private.ONE_THREAD, _private.MERGES_COPIES) == before


def test_each_signature_is_planned_and_evaluation_is_left_alone():
    net = remat.paddle.limit_memory(Net(2), "80%", planner="peak_greedy")
    assert remat.paddle.plan_of(net) is None
    net(batch(256)).mean().backward()
    first = remat.paddle.plan_of(net)
    net(batch(512)).mean().backward()
    second = remat.paddle.plan_of(net)
    assert second.baseline_peak_bytes > first.baseline_peak_bytes
    net.eval()
    with paddle.no_grad():
        net(batch(128))
    assert remat.paddle.plan_of(net) is second


def test_a_budget_that_nothing_keeps_is_refused_with_one_that_does():
    net = remat.paddle.limit_memory(Net(2), 1000, planner="peak_greedy")
    with pytest.raises(remat.InfeasibleBudget) as caught:
        net(batch(256))
    again = remat.paddle.limit_memory(Net(2), caught.value.minimum_bytes, planner="peak_greedy")
    again(batch(256)).mean().backward()
    assert remat.paddle.plan_of(again).peak_bytes <= caught.value.minimum_bytes


def test_fit_keeps_a_budget_with_the_same_numbers():
    class Data(paddle.io.Dataset):
        def __len__(self):
            return 1024

        def __getitem__(self, index):
            random = np.random.default_rng(index)
            return random.standard_normal(64).astype("float32"), random.standard_normal(64).astype("float32")

    def fitted(budget):
        paddle.seed(7)
        model = paddle.Model(Net(3))
        if budget:
            remat.paddle.limit_memory(model, budget, planner="peak_greedy")
        model.prepare(paddle.optimizer.Adam(1e-3, parameters=model.parameters()), paddle.nn.MSELoss())
        paddle.seed(3)
        model.fit(Data(), batch_size=512, epochs=2, verbose=0, shuffle=False)
        return {name: value.numpy() for name, value in model.network.state_dict().items()}, model

    expected, _ = fitted(None)
    found, model = fitted("70%")
    assert remat.paddle.plan_of(model).recomputed > 0
    assert all(np.array_equal(value, found[name]) for name, value in expected.items())


def test_recompute_moves_statistics_once_and_repeats_dropout(plain):
    def blocks(net):
        for block in net.blocks:
            remat.paddle.recompute(block)

    found = train(blocks)
    assert_equal(found, plain)
    assert found[2] < 0.8 * plain[2]


def test_recompute_inside_of_recompute_takes_names_and_trains_what_it_closes_over(plain):
    def nested(net):
        for block in net.blocks:
            remat.paddle.recompute(block)
        net.forward = remat.paddle.recompute(net.forward)

    assert_equal(train(nested), plain)
    layer = paddle.nn.Linear(4, 4)
    f = remat.paddle.recompute(lambda x, *, scale=1.0: paddle.tanh(layer(x)) * scale)
    f(paddle.ones([2, 4]), scale=3.0).sum().backward()  # No argument takes a gradient.
    gradient = layer.weight.grad.numpy()
    layer.clear_gradients()
    (paddle.tanh(layer(paddle.ones([2, 4]))) * 3.0).sum().backward()
    assert np.array_equal(gradient, layer.weight.grad.numpy())


def test_what_a_region_was_given_goes_with_its_backward_pass():
    """Paddle's graph, and what it holds, lives until the loss is gone."""
    blocks = [
        remat.paddle.recompute(paddle.nn.Sequential(paddle.nn.Linear(64, 64), paddle.nn.GELU())) for _ in range(6)
    ]
    x = h = batch(1024)
    for block in blocks:
        h = block(h)
    loss = h.mean()
    del h
    loss.backward()
    there = settled_bytes()
    del loss
    gc.collect()
    assert there - settled_bytes() < 2 * x.size * 4, "five inputs would be held"


def test_a_graph_that_is_kept_is_differentiated_again():
    def gradients(prepare, *keeps):
        paddle.seed(7)
        net = prepare(paddle.nn.Sequential(paddle.nn.Linear(64, 64), paddle.nn.GELU()))
        loss = net(batch(256)).mean()
        for keep in keeps:
            loss.backward(retain_graph=keep)
        return [p.grad.numpy() for p in net.parameters()]

    expected = gradients(lambda net: net, True, False)
    found = gradients(remat.paddle.recompute, True, False)
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    with pytest.raises(SystemError, match="retain_graph"):  # Paddle's own
        gradients(remat.paddle.recompute, False, False)


@pytest.mark.parametrize("limited", [False, True])
def test_recompute_inside_of_to_static_runs_as_it_is(plain, limited):
    """A program has its own way: there ``limit_memory`` plans every operator, and blocks marked by hand are no more."""

    def marked(net):
        for block in net.blocks:
            remat.paddle.recompute(block)
        if limited:
            return remat.paddle.limit_memory(net, "65%", planner="peak_greedy")
        return paddle.jit.to_static(net, full_graph=True)

    found = train(marked)
    assert_equal(found, plain)
    if limited:
        assert remat.paddle.plan_of(found[3]).mode == "to_static"
        assert found[2] < 0.8 * plain[2]


def test_gradients_that_the_caller_gives_are_never_made_again():
    """Between the halves of a captured program stand ones in their place; a copy of those would be other numbers."""
    traced = Captured(Net(2).forward, Request()).program_of(batch(64))
    cut, ops = traced.cut, list(traced.program.global_block().ops)
    between = {_private.op_id(op) for op in ops[cut.forward_end : cut.backward_start]}
    given = [n for n, unit in enumerate(traced.units) if _private.op_id(unit.op) in between]
    assert given
    assert not any(traced.graph.ops[n].recomputable for n in given)


class Chain(paddle.nn.Layer):
    """Returns a value on its way, too, which a plan would gladly drop and make again."""

    def __init__(self):
        super().__init__()
        self.wide = paddle.nn.Linear(64, 512)
        self.blocks = paddle.nn.LayerList([paddle.nn.Linear(512 if n == 0 else 128, 128) for n in range(6)])

    def forward(self, x):
        h = found = F.gelu(self.wide(x))
        for block in self.blocks:
            h = F.gelu(block(h))
        return found, h


def test_what_the_caller_holds_is_made_once():
    """Results of the layer and gradients of its parameters: the caller holds what the first run made."""
    paddle.seed(7)
    net, x = Chain(), batch(1024)
    graph = remat.paddle.trace(net, x)
    makers = [graph.ops[graph.producer[tensor]] for tensor in graph.outputs if graph.producer[tensor] is not None]
    assert len(makers) > 10
    assert [op.name for op in makers if op.recomputable] == []
    with pytest.raises(remat.InfeasibleBudget) as caught:
        remat.paddle.limit_memory(net, 1000, planner="peak_greedy")(x)
    net = Chain()
    remat.paddle.limit_memory(net, caught.value.minimum_bytes, planner="peak_greedy")
    for _ in range(2):
        held, result = net(x)
        (held.mean() + result.mean()).backward()
        del held, result
    plan = remat.paddle.plan_of(net)
    assert plan.recomputed > 0
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)


def test_a_backward_pass_without_a_plan_is_not_measured_with_one():
    """It reaches the same parameters, whose gradients say that a planned step goes on."""
    paddle.seed(7)
    net, x = Net(), batch(1024)
    plain = [type(layer).forward.__get__(layer) for layer in net.blocks]
    remat.paddle.limit_memory(net, "80%", planner="peak_greedy")
    net(x).mean().backward()
    plan = remat.paddle.plan_of(net)
    measured_bytes = plan.measured_peak_bytes
    _private.reset_peak()
    for _ in range(4):
        for block in plain:
            x = block(x)
    x.mean().backward()
    assert _private.peak_bytes() > measured_bytes
    assert plan.measured_peak_bytes == measured_bytes


def test_a_budget_that_was_refused_holds_nothing_of_the_step(caplog):
    """The error is kept for the next call. With its frames it would keep all results of whoever called."""
    paddle.seed(7)
    net = remat.paddle.limit_memory(Net(), 1000, planner="peak_greedy")
    x = batch(1024)

    def refused_bytes():
        held = x * 2.0  # noqa: F841 -- what the frame of a caller holds
        with contextlib.suppress(remat.InfeasibleBudget):
            net(x)

    refused_bytes()
    gc.collect()
    before = settled_bytes()
    for _ in range(3):
        refused_bytes()
        gc.collect()
    assert settled_bytes() - before < x.size * 4


def test_the_second_run_is_under_the_autocast_of_the_first(monkeypatch):
    """Paddle has no eager autocast on a CPU, so a stand-in says what is in force."""
    state, entered = {"level": "O1", "dtype": "bfloat16"}, []

    @contextlib.contextmanager
    def autocast_like(of_the_first_run):
        entered.append(of_the_first_run)
        yield

    monkeypatch.setattr(_private, "autocast_state", lambda: state)
    monkeypatch.setattr(_private, "autocast_like", autocast_like)
    x = batch()
    x.stop_gradient = False
    remat.paddle.recompute(lambda x: paddle.tanh(x) ** 2)(x).sum().backward()
    assert entered == [state]


def test_recompute_refuses_what_is_no_function():
    with pytest.raises(TypeError, match=r"a function or a paddle\.nn\.Layer, not 3"):
        remat.paddle.recompute(3)


def test_a_second_run_that_takes_another_branch_is_an_error():
    calls = []

    def f(x):
        calls.append(1)
        return paddle.tanh(x) if len(calls) == 1 else x * 1.0

    x = paddle.ones([3])
    x.stop_gradient = False
    with pytest.raises(Exception, match="it took another branch"):
        remat.paddle.recompute(f)(x).sum().backward()


def test_value_and_grad_leaves_earlier_gradients_alone():
    net = Net(1)
    net.blocks[0][0].weight.grad = paddle.ones([64, 64])
    value, gradients = remat.paddle.value_and_grad(lambda x: net(x).mean())(batch(64))
    assert value.stop_gradient
    assert len(gradients) == sum(1 for p in net.parameters() if not p.stop_gradient)
    assert np.array_equal(net.blocks[0][0].weight.grad.numpy(), np.ones((64, 64)))
    assert net.blocks[0][0].bias.grad is None
    with pytest.raises(remat.UnsupportedStep, match="no parameter was found"):
        remat.paddle.value_and_grad(lambda x: x.mean())(batch(4))


def test_check_compares_a_planned_step_with_the_plain_one():
    net = Net(2)

    def loss(x, target):
        return ((net(x) - target) ** 2).mean()

    before = {name: value.numpy() for name, value in net.state_dict().items()}
    result = remat.paddle.check(loss, batch(256), batch(256), budget="75%", steps=2)
    assert result.recomputed > 0
    assert result.is_repeatable
    assert all(one.is_equal for one in result.comparisons), str(result)
    assert all(np.array_equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_function_that_paddle_cannot_capture_is_refused_with_what_to_do():
    weight = paddle.to_tensor(np.ones((4, 4), "float32"), stop_gradient=False)
    other = paddle.ones([2, 4])
    step = remat.paddle.value_and_grad(lambda x: ((x @ weight) - other).mean(), [weight], budget="90%")
    with pytest.raises(remat.UnsupportedStep, match=r"cannot capture .*Give tensors as arguments"):
        step(paddle.ones([2, 4]))


def test_what_is_no_layer_is_refused():
    with pytest.raises(TypeError, match=r"a paddle\.nn\.Layer or a paddle\.Model, not function"):
        remat.paddle.limit_memory(lambda x: x)
    with pytest.raises(ValueError, match="is not limited"):
        remat.paddle.plan_of(Net(1))
    with pytest.raises(remat.InvalidBudget, match="plenty"):
        remat.paddle.limit_memory(Net(1), "plenty")


def test_arguments_in_one_tuple_get_a_line_that_says_what_to_write():
    from remat.cli.source import make_workload
    from remat.running.workload import NotAStep, StepOptions

    weight = paddle.ones([64, 64])
    weight.stop_gradient = False

    def loss(x):
        return paddle.matmul(x, weight).mean()

    with pytest.raises(NotAStep, match=r"return \(loss, batch\) in place of \(loss, \(batch,\)\)"):
        make_workload((loss, (batch(),)), StepOptions()).graph("cpu")


def test_a_layer_goes_with_its_last_user():
    """And with it what was captured: who trains one model after another must not run out of memory."""
    net = remat.paddle.limit_memory(Net(), "90%")
    net(batch()).square().mean().backward()
    assert remat.paddle.plan_of(net).recomputed > 0
    held = weakref.ref(net)
    del net
    gc.collect()
    assert held() is None


def test_a_copy_of_a_layer_runs_by_itself():
    """An average of a model's weights is often kept in a copy of it."""
    net = remat.paddle.limit_memory(Net(), "90%")
    net(batch()).square().mean().backward()
    copied = copy.deepcopy(net)
    with paddle.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()

    assert float(copied(batch()).abs().max()) == 0
    assert float(net(batch()).abs().max()) > 0
    with pytest.raises(ValueError, match="not limited"):
        remat.paddle.plan_of(copied)
