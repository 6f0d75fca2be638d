"""A GPT-2 shaped Transformer of six layers, eager and under ``to_static``, one thread; the processor's time of a step.

A plain step and one of the method take turns in the process of each line, and "against plain" is the median of their
ratios: on a machine that others use, the same step differs by a third between one process and the next.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

TITLE = "PaddlePaddle: a GPT-2 shaped Transformer of 6 layers, 8 x 128 tokens, loss and gradients, one thread"
FLEET = "fleet.utils.recompute, each block"
AUTO = "to_static, auto_recompute"
AUTO_FLAG = "FLAGS_enable_auto_recompute"
METHODS = (
    "plain",
    FLEET,
    "remat.paddle.recompute, each block",
    "to_static",
    AUTO,
    f"remat, bytes of {FLEET}",
    f"remat, bytes of {AUTO}",
    "remat, 50 % of plain",
    "remat, its smallest",
)
STEPS = 9


def run(method: str, small: bool, earlier: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Peak bytes, processor seconds, also relative to plain steps between them, and gradients of one method."""
    if method == AUTO:
        os.environ[AUTO_FLAG] = "1"  # Read when a program is made.
    import paddle

    import remat
    import remat.paddle

    paddle.set_device("cpu")
    layers, width, batch = (2, 64, 4) if small else (6, 256, 8)
    paddle.seed(0)
    plain = transformer(layers, width)
    paddle.seed(0)
    net = transformer(layers, width)
    paddle.seed(1)
    ids = paddle.randint(0, VOCABULARY, [batch, 128])
    prepared = prepare(method, net, earlier, ids)

    def gradients(of: Any, parameters: list[Any]) -> list[Any]:
        for parameter in parameters:
            parameter.clear_gradient(False)
        of(ids).backward()
        return [parameter.grad for parameter in parameters]

    def seconds(of: Any, parameters: list[Any]) -> float:
        started = time.process_time()
        gradients(of, parameters)
        return time.process_time() - started

    # Copies: on a CPU ``numpy()`` shares the bytes of a tensor, which would count in every peak from here on.
    found = [np.array(gradient.numpy()) for gradient in gradients(prepared, net.parameters())]
    seconds(plain, plain.parameters())
    pairs = [(seconds(prepared, net.parameters()), seconds(plain, plain.parameters())) for _ in range(STEPS)]
    for one in (plain, net):
        for parameter in one.parameters():
            parameter.grad = None
    held = sum(p.size * p.element_size() for p in plain.parameters())
    peak_bytes = remat.paddle.measure(prepared, ids, repeats=5).peak_bytes - held
    times = {"step_s": statistics.median(own for own, _ in pairs)}
    if method != "plain":
        times["relative_time"] = statistics.median(own / other for own, other in pairs)
    return {"peak_bytes": peak_bytes, **times}, found


def prepare(method: str, net: Any, earlier: dict[str, Any], ids: Any) -> Callable[..., Any]:
    """The model's loss as a method computes it."""
    import paddle
    from paddle.distributed.fleet.utils import recompute

    import remat
    import remat.paddle

    if method == FLEET:
        net.run_block = recompute
    elif method.startswith("remat.paddle.recompute"):
        for block in net.blocks:
            remat.paddle.recompute(block)
    elif method == "to_static":
        return paddle.jit.to_static(net, full_graph=True)
    elif method == AUTO:
        # The pass knows primitive operators only, so that every operator is taken apart into those.
        paddle.base.core._set_prim_all_enabled(True)
        return paddle.jit.to_static(net, full_graph=True)
    elif method.startswith("remat"):
        budget = budget_of(method, earlier)
        if "smallest" in method:
            try:
                remat.paddle.value_and_grad(net, budget=budget, time_limit_s=4)(ids)
            except remat.InfeasibleBudget as error:
                budget = error.minimum_bytes
        return remat.paddle.limit_memory(net, budget, time_limit_s=4)
    return net


def budget_of(method: str, earlier: dict[str, Any]) -> int:
    """What a line of remat's may take."""
    if "smallest" in method:
        return 1
    if "%" in method:
        return int(0.5 * earlier["plain"]["peak_bytes"])
    return int(earlier[method.partition("bytes of ")[2]]["peak_bytes"])


VOCABULARY = 1024


def transformer(layers: int, width: int) -> Any:
    """A layer that returns its loss on tokens."""
    import paddle
    import paddle.nn.functional as F
    from paddle import nn

    class Block(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.LayerList([nn.LayerNorm(width) for _ in range(2)])
            self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            joint = self.attention(self.norms[0](x)).reshape([0, 0, 3, 4, -1]).transpose([2, 0, 3, 1, 4])
            query, key, value = joint.unbind(0)
            mask = paddle.triu(paddle.full([x.shape[1], x.shape[1]], -1e4), 1)
            scores = paddle.matmul(query, key, transpose_y=True) * (width // 4) ** -0.5 + mask
            mixed = paddle.matmul(F.softmax(scores), value).transpose([0, 2, 1, 3]).flatten(2)
            x = x + self.project(mixed)
            return x + self.narrow(F.gelu(self.widen(self.norms[1](x)), approximate=True))

    class Transformer(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(128, width)
            self.blocks, self.norm = nn.LayerList([Block() for _ in range(layers)]), nn.LayerNorm(width)
            self.run_block: Any = None

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.places(paddle.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x) if self.run_block is None else self.run_block(block, x)
            logits = paddle.matmul(self.norm(x), self.tokens.weight, transpose_y=True)
            return F.cross_entropy(logits, ids.roll(-1, 1))

    return Transformer()
