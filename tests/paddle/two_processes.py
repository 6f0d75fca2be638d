"""One of two processes that train the same static program on halves of a batch; prints what it left behind."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import paddle
import paddle.distributed as dist

import remat.paddle
from programs import values_in


def main(how: str) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    paddle.enable_static()
    paddle.seed(3)
    program, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(program, startup):
        x = paddle.static.data("x", [512, 64])
        h, kept = x, []
        for number in range(8):
            h = paddle.nn.functional.gelu(paddle.nn.Linear(64, 64)(h))
            if number in (2, 5):
                kept.append(f"hidden {number}")
                remat.paddle.named(h, kept[-1])
        loss = (h * h).mean()
        strategy = dist.fleet.DistributedStrategy()
        strategy.recompute = how == "planned"
        strategy.recompute_configs = {"checkpoints": kept}
        optimizer = remat.paddle.fleet.distributed_optimizer(paddle.optimizer.Adam(1e-3), strategy)
        optimizer.minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(startup)
    random = np.random.default_rng(dist.get_rank())
    losses = []
    for _ in range(3):
        feed = {"x": random.standard_normal((512, 64)).astype("float32")}
        losses.append(float(executor.run(program, feed=feed, fetch_list=[loss])[0]))
    values = values_in(paddle.static.global_scope(), program).values()
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    recomputed = optimizer.plan.recomputed if optimizer.plan is not None else 0
    print("RESULT", json.dumps({"rank": dist.get_rank(), "losses": losses, "digest": digest, "extra": recomputed}))


if __name__ == "__main__":
    main(sys.argv[1])
