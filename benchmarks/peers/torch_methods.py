"""A GPT-2 shaped Transformer of six layers, eager and compiled, on one thread; a step's time is the processor's.

A plain step and one of the method take turns in the process of each line, and "against plain" is the median of their
ratios: on a machine that others use, the same step differs by a third between one process and the next.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

TITLE = "PyTorch: a GPT-2 shaped Transformer of 6 layers, 8 x 128 tokens, loss and gradients, one thread"
RATIOS = ("0.5", "0.2", "0")
METHODS = (
    "plain",
    "torch.utils.checkpoint, each block",
    "selective checkpoint, products kept",
    "remat, bytes of torch.utils.checkpoint, each block",
    "remat, bytes of selective checkpoint, products kept",
    "remat, 50 % of plain",
    "remat in graph mode, bytes of torch.utils.checkpoint, each block",
    "remat in graph mode, bytes of selective checkpoint, products kept",
    "remat in graph mode, 50 % of plain",
    "torch.compile",
    *(f"torch.compile, activation_memory_budget {ratio}" for ratio in RATIOS),
    *(f"remat compiled, bytes of torch.compile, activation_memory_budget {ratio}" for ratio in RATIOS),
    "remat compiled, 50 % of plain",
    "remat compiled, its smallest",
)
STEPS = 15


def run(method: str, small: bool, earlier: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Peak bytes, processor seconds, also relative to plain steps between them, and gradients of one method."""
    import torch
    import torch._functorch.config

    import remat
    import remat.torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers, width, batch = (2, 64, 4) if small else (6, 256, 8)
    plain, loss, parameters, ids = transformer(layers, width, batch, wrapping(method))
    step: Callable[..., Any] = loss
    if method.startswith("torch.compile"):
        ratio = method.partition("activation_memory_budget ")[2]
        with torch._functorch.config.patch(activation_memory_budget=float(ratio or 1)):
            step = torch.compile(loss, fullgraph=True, dynamic=False)
            step(ids).backward()
    elif method.startswith("remat compiled"):
        step = remat.torch.compile(loss, budget=budget_of(method, earlier), time_limit_s=4)
        try:
            step(ids).backward()
        except remat.InfeasibleBudget as error:
            if "smallest" not in method:
                raise
            step = remat.torch.compile(loss, budget=error.minimum_bytes, time_limit_s=4)
    elif method.startswith("remat in graph mode"):
        step = remat.torch.compile(loss, budget=budget_of(method, earlier), backend="aten", time_limit_s=4)
    elif method.startswith("remat"):
        applied = remat.torch.apply(remat.torch.plan(loss, ids, budget=budget_of(method, earlier), time_limit_s=4))

        def step(ids: Any) -> Any:
            with applied:
                return loss(ids)

    def gradients(step: Callable[..., Any]) -> list[Any]:
        for parameter in parameters:
            parameter.grad = None
        step(ids).backward()
        return [parameter.grad for parameter in parameters]

    def seconds(step: Callable[..., Any]) -> float:
        started = time.process_time()
        gradients(step)
        return time.process_time() - started

    found = gradients(step)
    seconds(plain)
    pairs = [(seconds(step), seconds(plain)) for _ in range(STEPS)]
    for parameter in parameters:
        parameter.grad = None
    peak_bytes = remat.torch.measure(step, ids, repeats=1).peak_bytes
    times = {"step_s": statistics.median(own for own, _ in pairs)}
    if method != "plain":
        times["relative_time"] = statistics.median(own / other for own, other in pairs)
    return {"peak_bytes": peak_bytes, **times}, [gradient.numpy() for gradient in found]


def budget_of(method: str, earlier: dict[str, Any]) -> int | str:
    """What a line of remat's may take."""
    if "smallest" in method:
        return 1
    if "%" in method:
        return int(0.5 * earlier["torch.compile" if "compiled" in method else "plain"]["peak_bytes"])
    return int(earlier[method.partition("bytes of ")[2]]["peak_bytes"])


def wrapping(method: str) -> Callable[[Any], Callable[..., Any]]:
    """What a method does to a block of the model."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default}
    products.add(aten._scaled_dot_product_flash_attention_for_cpu.default)

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if func in products else CheckpointPolicy.PREFER_RECOMPUTE

    if method.startswith("torch.utils.checkpoint"):
        return lambda block: partial(checkpoint, block, use_reentrant=False)
    if method.startswith("selective"):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return lambda block: partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    return lambda block: block


def transformer(
    layers: int, width: int, batch: int, wrap: Any
) -> tuple[Callable[..., Any], Callable[..., Any], list[Any], Any]:
    """The loss of a model, the loss of the same with its blocks wrapped, its parameters, and tokens."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    vocabulary, length = 1024, 128

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            parts = self.attention(self.norms[0](x)).chunk(3, -1)
            heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts]
            attended = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.project(attended.transpose(1, 2).flatten(2))
            return x + self.narrow(F.gelu(self.widen(self.norms[1](x)), approximate="tanh"))

    tokens, places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
    nn.init.normal_(tokens.weight, std=0.02)
    blocks, norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width)

    def loss_through(calls: list[Any]) -> Callable[..., Any]:
        def loss(ids: Any) -> Any:
            x = tokens(ids) + places
            for call in calls:
                x = call(x)
            logits = F.linear(norm(x), tokens.weight)
            return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())

        return loss

    parameters = [places, *(p for module in (tokens, blocks, norm) for p in module.parameters())]
    losses = loss_through(list(blocks)), loss_through([wrap(block) for block in blocks])
    return *losses, parameters, torch.randint(vocabulary, (batch, length))
