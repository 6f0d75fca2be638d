"""``RecomputeOptimizer``: any optimizer, by checkpoints or a budget, in one line."""

from __future__ import annotations

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
    optimizer = remat.paddle.RecomputeOptimizer(paddle.optimizer.SGD(), budget="60%")
    paddle.disable_static()
    with pytest.raises(remat.UnsupportedStep, match="limit_memory"):
        optimizer.minimize(None)
    with pytest.raises(ValueError, match="neither budget= nor checkpoints="):
        build("mlp", lambda loss, kept: remat.paddle.RecomputeOptimizer(paddle.optimizer.SGD()).minimize(loss))


def test_the_inner_optimizer_is_reached():
    paddle.enable_static()
    optimizer = remat.paddle.RecomputeOptimizer(paddle.optimizer.SGD(0.25), budget="60%")
    assert optimizer.get_lr() == 0.25


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


def test_a_program_under_autocast_is_planned_in_two_bytes_and_runs_where_the_plain_one_runs():
    def program(planned):
        paddle.enable_static()
        paddle.seed(7)
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            h = paddle.static.data("x", [512, 32])
            with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
                for _ in range(6):
                    h = paddle.nn.functional.gelu(paddle.nn.Linear(32, 32)(h))
            loss = (h.astype("float32") ** 2).mean()
            optimizer = decorated(paddle.optimizer.Adam(1e-3))
            if planned:
                optimizer = remat.paddle.RecomputeOptimizer(optimizer, "85%", planner="peak_greedy")
            optimizer.minimize(loss)
        return main, startup, loss, optimizer

    def run(main, startup, loss):
        executor = paddle.static.Executor(paddle.CPUPlace())
        with paddle.static.scope_guard(paddle.static.Scope()):
            executor.run(startup)
            feed = {"x": np.ones((512, 32), "float32")}
            try:
                return [float(executor.run(main, feed=feed, fetch_list=[loss])[0]) for _ in range(3)]
            except RuntimeError as error:  # No kernel for bfloat16 on this CPU.
                return str(error)

    main, startup, loss, optimizer = program(planned=True)
    plan = optimizer.plan
    assert plan.recomputed > 0
    products = [t for op in plan.graph.ops if op.kind == "matmul" for t in op.outputs]
    assert {plan.graph.tensors[t].dtype for t in products} == {"bfloat16"}
    assert {plan.graph.tensors[t].size_bytes for t in products} == {512 * 32 * 2}
    assert run(main, startup, loss) == run(*program(planned=False)[:3])
