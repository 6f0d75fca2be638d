"""``RecomputeOptimizer``: any optimizer, by checkpoints or a budget, in one line."""

from __future__ import annotations

import copy

import numpy as np
import paddle
import pytest
from programs import build, train

import remat
import remat.paddle

OPTIMIZERS = {
    "adam": lambda: paddle.optimizer.Adam(1e-3),
    "clipped momentum with decay and a schedule": lambda: paddle.optimizer.Momentum(
        paddle.optimizer.lr.StepDecay(1e-2, 2),
        weight_decay=1e-2,
        grad_clip=paddle.nn.ClipGradByGlobalNorm(0.01),
    ),
}
EVERY = (
    *("SGD", "Momentum", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta"),
    *("RMSProp", "Lamb", "NAdam", "RAdam", "Rprop", "ASGD"),
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_trains_to_the_bit(name):
    made = []

    def planned(loss, kept):
        made.append(remat.paddle.RecomputeOptimizer(OPTIMIZERS[name]()))
        made[0]._set_checkpoints(kept)
        made[0].minimize(loss)

    expected = train(build("mlp", lambda loss, kept: OPTIMIZERS[name]().minimize(loss)))
    found = train(build("mlp", planned))
    assert made[0].plan.recomputed > 0
    assert found.equals(expected)
    assert found.peak_bytes < 0.9 * expected.peak_bytes
    assert found.peak_bytes == pytest.approx(made[0].plan.peak_bytes, rel=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_each_optimizer_of_paddle_keeps_a_budget_with_the_same_numbers(name):
    made = []

    def inner():
        return getattr(paddle.optimizer, name)(learning_rate=1e-3)

    def planned(loss, kept):
        made.append(remat.paddle.RecomputeOptimizer(inner(), "75%", planner="peak_greedy"))
        made[0].minimize(loss)

    expected = train(build("mlp", lambda loss, kept: inner().minimize(loss)))
    found = train(build("mlp", planned))
    assert made[0].plan.recomputed > 0
    assert found.equals(expected)
    assert found.highest_bytes <= made[0].plan.budget_bytes
    assert found.peak_bytes == pytest.approx(made[0].plan.peak_bytes, rel=0.01)


def test_a_program_of_unknown_size_is_planned_at_its_first_run():
    def trained(optimizer):
        paddle.enable_static()
        paddle.seed(7)
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            x = paddle.static.data("x", [None, 32])
            h = x
            for _ in range(6):
                h = paddle.nn.functional.gelu(paddle.nn.Linear(32, 32)(h))
            loss = (h * h).mean()
            optimizer.minimize(loss)
        executor = paddle.static.Executor(paddle.CPUPlace())
        scope = paddle.static.Scope()
        with paddle.static.scope_guard(scope):
            executor.run(startup)
            feed = {"x": np.random.default_rng(0).standard_normal((2048, 32)).astype("float32")}
            return [float(executor.run(main, feed=feed, fetch_list=[loss])[0]) for _ in range(3)]

    paddle.enable_static()
    optimizer = remat.paddle.RecomputeOptimizer(paddle.optimizer.Adam(1e-3), budget="60%", planner="peak_greedy")
    assert optimizer.plan is None
    assert trained(optimizer) == trained(paddle.optimizer.Adam(1e-3))
    assert optimizer.plan.recomputed > 0


def test_bad_requests_are_refused_in_one_line():
    paddle.enable_static()
    with pytest.raises(ValueError, match="budget= or checkpoints=, not both"):
        remat.paddle.RecomputeOptimizer(paddle.optimizer.SGD(), budget="60%", checkpoints=[])
    with pytest.raises(TypeError, match="list of values, not str"):
        remat.paddle.RecomputeOptimizer(paddle.optimizer.SGD())._set_checkpoints("fc")
    with pytest.raises(TypeError, match="wraps an optimizer of Paddle, not str"):
        remat.paddle.RecomputeOptimizer("adam", budget="60%")
    with pytest.raises(TypeError, match="DistributedStrategy, not str"):
        remat.paddle.fleet.distributed_optimizer(paddle.optimizer.SGD(), "recompute")
    optimizer = remat.paddle.RecomputeOptimizer(paddle.optimizer.SGD(), budget="60%")
    paddle.disable_static()
    with pytest.raises(remat.UnsupportedStep, match="limit_memory"):
        optimizer.minimize(None)
    with pytest.raises(ValueError, match="neither budget= nor checkpoints="):
        build("mlp", lambda loss, kept: remat.paddle.RecomputeOptimizer(paddle.optimizer.SGD()).minimize(loss))


def test_the_inner_optimizer_is_reached():
    paddle.enable_static()
    optimizer = remat.paddle.RecomputeOptimizer(paddle.optimizer.SGD(0.25), budget="60%")
    assert optimizer.get_lr() == copy.copy(optimizer).get_lr() == 0.25


def decorated(optimizer):
    """Mixed precision as far as a CPU has it in Paddle 3.3: without a loss scale that moves."""
    return paddle.static.amp.decorate(
        optimizer, level="O1", dtype="bfloat16", use_dynamic_loss_scaling=False, init_loss_scaling=1.0
    )


def test_an_optimizer_that_amp_decorated_is_wrapped():
    made = []

    def planned(loss, kept):
        made.append(remat.paddle.RecomputeOptimizer(decorated(paddle.optimizer.Adam(1e-3)), checkpoints=kept))
        made[0].minimize(loss)

    expected = train(build("mlp", lambda loss, kept: decorated(paddle.optimizer.Adam(1e-3)).minimize(loss)))
    found = train(build("mlp", planned))
    assert made[0].plan.recomputed > 0
    assert found.equals(expected)
    # Paddle takes nothing but its own optimizers, so that the other order is refused by Paddle.
    with pytest.raises(RuntimeError, match=r"expected to be paddle\.optimizer\.Optimizer"):
        decorated(remat.paddle.RecomputeOptimizer(paddle.optimizer.Adam(1e-3), budget="60%"))


def test_the_entry_for_several_processes_takes_an_optimizer_that_amp_decorated():
    made = []

    def planned(loss, kept):
        inner = decorated(paddle.optimizer.Adam(1e-3))
        made.append(remat.paddle.fleet.distributed_optimizer(inner, budget="80%", planner="peak_greedy"))
        made[0].minimize(loss)

    expected = train(build("mlp", lambda loss, kept: decorated(paddle.optimizer.Adam(1e-3)).minimize(loss)))
    found = train(build("mlp", planned))
    assert made[0].plan.recomputed > 0
    assert found.equals(expected)


def products_in(graph):
    return [graph.tensors[t] for op in graph.ops if op.kind == "matmul" for t in op.outputs]


def test_mixed_precision_is_planned_in_two_bytes_also_where_no_kernel_runs_it():
    """On a CPU without bfloat16 Paddle ends with an error at the first product, planned or not; so nothing runs."""

    def forward(h):
        with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
            for layer in layers:
                h = paddle.nn.functional.gelu(layer(h))
        return (h.astype("float32") ** 2).mean()

    layers = [paddle.nn.Linear(32, 32) for _ in range(6)]
    captured = remat.paddle.trace(forward, paddle.ones([512, 32]))
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        layers = [paddle.nn.Linear(32, 32) for _ in range(6)]
        loss = forward(paddle.static.data("x", [512, 32]))
        optimizer = remat.paddle.RecomputeOptimizer(
            decorated(paddle.optimizer.Adam(1e-3)), "85%", planner="peak_greedy"
        )
        optimizer.minimize(loss)
    assert optimizer.plan.recomputed > 0
    for graph in (captured, optimizer.plan.graph):
        assert {(one.dtype, one.size_bytes) for one in products_in(graph)} == {("bfloat16", 512 * 32 * 2)}


def test_a_loss_scaler_for_layers_is_used_as_ever():
    def trained(budget):
        paddle.disable_static()
        paddle.seed(7)
        net = paddle.nn.Sequential(
            *[paddle.nn.Sequential(paddle.nn.Linear(64, 64), paddle.nn.GELU()) for _ in range(6)]
        )
        if budget is not None:
            remat.paddle.limit_memory(net, budget, planner="peak_greedy")
        optimizer = paddle.optimizer.SGD(1e-2, parameters=net.parameters())
        scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
        losses = []
        for _ in range(3):
            loss = net(paddle.ones([256, 64])).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
            losses.append(float(loss))
        return losses

    assert trained("70%") == trained(None)
