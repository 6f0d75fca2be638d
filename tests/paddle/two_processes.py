"""One of two processes that train the same model on halves of a batch; prints what it left behind.

``python two_processes.py fleet|amp|layers plain|planned``: a static program through the Fleet-shaped entry, the same in
mixed precision, or a layer in ``DataParallel``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from models import NEED_FLOAT32, RUN_IN_BFLOAT16
from programs import values_in

import remat.paddle
from remat.paddle import _private

F = paddle.nn.functional
SHAPE = (512, 64)


def main(kind: str, is_planned: bool) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    paddle.seed(3)
    random = np.random.default_rng(dist.get_rank())
    batches = [random.standard_normal(SHAPE).astype("float32") for _ in range(3)]
    losses, values, plan, peak_bytes = {"fleet": fleet, "amp": amp, "layers": layers}[kind](batches, is_planned)
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    found = {"rank": dist.get_rank(), "losses": losses, "digest": digest, "peak_bytes": peak_bytes}
    print("RESULT", json.dumps({**found, "extra": plan.recomputed if plan is not None else 0}))


def amp(batches: list[Any], is_planned: bool) -> tuple[list[float], Iterable[Any], Any, int]:
    return fleet(batches, is_planned, is_half=True)


def fleet(batches: list[Any], is_planned: bool, is_half: bool = False) -> tuple[list[float], Iterable[Any], Any, int]:
    paddle.enable_static()
    program, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(program, startup):
        x = paddle.static.data("x", SHAPE)
        h, kept = x, []
        lists = {"custom_white_list": RUN_IN_BFLOAT16, "custom_black_list": NEED_FLOAT32}
        for number in range(8):
            with paddle.amp.auto_cast(enable=is_half, level="O1", dtype="bfloat16", **lists):
                h = F.dropout(F.gelu(paddle.nn.Linear(64, 64)(h)), 0.1)
            if number in (2, 5):
                kept.append(f"hidden {number}")
                remat.paddle.named(h, kept[-1])
        loss = h.astype("float32").square().mean()
        strategy = dist.fleet.DistributedStrategy()
        strategy.recompute = is_planned
        strategy.recompute_configs = {"checkpoints": kept}
        clip = paddle.nn.ClipGradByGlobalNorm(0.01)
        inner = paddle.optimizer.Adam(1e-3, grad_clip=clip)
        if is_half:
            inner = paddle.static.amp.decorate(
                inner, level="O1", dtype="bfloat16", use_dynamic_loss_scaling=False, init_loss_scaling=1.0
            )
        optimizer = remat.paddle.fleet.distributed_optimizer(inner, strategy)
        optimizer.minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(startup)
    before = _private.allocated_bytes()
    losses, peaks = [], []
    for batch in batches:
        _private.reset_peak()
        losses.append(float(executor.run(program, feed={"x": batch}, fetch_list=[loss])[0]))
        peaks.append(_private.peak_bytes() - before)
    return losses, values_in(paddle.static.global_scope(), program).values(), optimizer.plan, max(peaks)


def layers(batches: list[Any], is_planned: bool) -> tuple[list[float], Iterable[Any], Any, int]:
    def block() -> list[Any]:
        return [paddle.nn.Linear(64, 64), paddle.nn.BatchNorm1D(64), paddle.nn.GELU(), paddle.nn.Dropout(0.2)]

    net = paddle.nn.Sequential(*[part for _ in range(4) for part in block()])
    if is_planned:
        remat.paddle.limit_memory(net, "70%", planner="peak_greedy")
    parallel = paddle.DataParallel(net)
    optimizer = paddle.optimizer.Adam(1e-3, parameters=parallel.parameters())
    losses, peaks = [], []
    for batch in batches:
        x = paddle.to_tensor(batch)
        before = _private.allocated_bytes()
        _private.reset_peak()
        loss = parallel(x).square().mean()
        loss.backward()
        peaks.append(_private.peak_bytes() - before)
        losses.append(float(loss))
        optimizer.step()
        optimizer.clear_grad()
    plan = remat.paddle.plan_of(parallel) if is_planned else None
    # Each process has statistics of its own half of the batch: what they agree on is the parameters.
    return losses, [p.numpy() for p in net.parameters() if not p.stop_gradient], plan, min(peaks)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "planned")
