"""What a machine without a GPU says of a step on this one: the kernels of attention, and the peak of plain steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

import remat.torch
from benchmarks.gpu.cases import DTYPES, MODELS
from benchmarks.gpu.torch_models import step_of
from remat.core.graph import Graph
from remat.core.simulator import simulate
from remat.torch.trace.gpu_attention import AttentionCall, choose
from remat.torch.trace.trace import default_profile

KERNELS = ("math", "flash", "efficient", "cudnn")
"""By the numbers of ``torch.nn.attention.SDPBackend``."""

BATCH, HEADS = 2, 8


def lines(device: str, small: bool) -> Iterator[dict[str, Any]]:
    """A line for the rules of attention, and one for each model."""
    if device == "cuda":
        yield attention_rules()
    profile = default_profile("cuda")
    for name, dtype in product(MODELS, DTYPES):
        elsewhere = step_of(name, dtype, "meta", small)
        graph = remat.torch.trace(elsewhere.loss, *elsewhere.args, device=profile)
        del elsewhere
        line = {"name": f"{name} {dtype}", "elsewhere_bytes": peak_bytes(graph), "elsewhere_ops": len(graph.ops)}
        if device == "cuda":
            step = step_of(name, dtype, device, small)
            here = remat.torch.trace(step.loss, *step.args)
            kinds = [Counter(op.kind for op in one.ops) for one in (graph, here)]
            line |= {"here_bytes": peak_bytes(here), "here_ops": len(here.ops)}
            line["differ"] = dict((kinds[0] - kinds[1]) + (kinds[1] - kinds[0]))
            line["peak_bytes"] = remat.torch.measure(step.loss, *step.args, repeats=1).peak_bytes
        yield line


def peak_bytes(graph: Graph) -> int:
    """Of the plain step, in the simulator."""
    return simulate(graph, graph.plain_schedule).peak_bytes


def attention_rules() -> dict[str, Any]:
    """How often the rules of ``trace/gpu_attention.py`` name the kernel that PyTorch takes on this GPU."""
    capability = torch.cuda.get_device_capability()
    examples: list[str] = []
    calls = others = 0
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    masks: tuple[tuple[str, torch.dtype | None], ...] = (("none", None), ("bool", torch.bool), ("own", None))
    for dtype, head, lengths, groups, (mask, kind), causal, dropout, grad in product(
        dtypes,
        (32, 64, 72, 80, 96, 128, 192, 256),
        ((128, 128), (125, 125), (1, 128), (64, 128)),
        (1, 4),
        masks,
        (False, True),
        (0.0, 0.1),
        (False, True),
    ):
        if mask != "none" and causal:
            continue  # Not both.
        rows, columns = lengths
        query = torch.empty(BATCH, HEADS, rows, head, device="cuda", dtype=dtype, requires_grad=grad)
        key = torch.empty(BATCH, HEADS // groups, columns, head, device="cuda", dtype=dtype, requires_grad=grad)
        value = torch.empty_like(key, requires_grad=grad)
        given = None if mask == "none" else torch.ones(rows, columns, device="cuda", dtype=kind or dtype)
        taken = KERNELS[
            torch._fused_sdp_choice(query, key, value, given, dropout, causal, scale=None, enable_gqa=groups > 1)
        ]
        call = AttentionCall(
            dtypes=(dtype, dtype, dtype),
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            mask=None if given is None else tuple(given.shape),
            mask_is_differentiated=False,
            is_dense=True,
            dropout=dropout,
            is_causal=causal,
            has_groups=groups > 1,
            is_differentiated=grad,
            capability=capability,
        )
        calls += 1
        if (named := choose(call)) != taken:
            others += 1
            at = f"{str(dtype)[6:]}, heads of {head}, {rows} x {columns}, groups of {groups}, mask {mask}"
            examples.append(f"{named} named, {taken} taken: {at}, causal {causal}, dropout {dropout}, gradient {grad}")
    return {"name": "attention", "calls": calls, "others": others, "examples": examples[:: max(1, len(examples) // 8)]}
