"""Does a Llama of 70 billion parameters train on 64 H100s? Asked of a laptop, from the configuration alone.

    remat plan examples.cluster_plan:llama_70b --mesh fsdp=8,tensor=8 --device h100 --max-batch

or ``python examples/cluster_plan.py`` for a small one. No weight is made: the model is on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.head, bias=False)
        self.v_proj = nn.Linear(width, groups * self.head, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # -1 in place of the number of heads: under tensor parallelism each device has a part of them.
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, groups: int) -> None:
        super().__init__()
        self.input_norm, self.self_attn = nn.RMSNorm(width), Attention(width, heads, groups)
        self.post_norm, self.mlp = nn.RMSNorm(width), MLP(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, inner: int, heads: int, groups: int, words: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, inner, heads, groups) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def _step(model: nn.Module, batch_size: int, length: int) -> tuple[Callable[..., Any], torch.Tensor]:
    """What remat takes: a loss function, and its arguments. The model is found in the function."""
    tokens = torch.empty(batch_size, length, dtype=torch.int64, device="meta")

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

    return loss, tokens


def llama_70b(batch_size: int = 1, length: int = 8192) -> tuple[Callable[..., Any], torch.Tensor]:
    """The shape of Llama 3 70B."""
    with torch.device("meta"):
        model = Llama(layers=80, width=8192, inner=28672, heads=64, groups=8, words=128256)
    return _step(model, batch_size, length)


def small_llama(batch_size: int = 1, length: int = 128, layers: int = 8) -> tuple[Callable[..., Any], torch.Tensor]:
    """The same with little in it."""
    with torch.device("meta"):
        model = Llama(layers=layers, width=256, inner=512, heads=8, groups=2, words=1024)
    return _step(model, batch_size, length)


if __name__ == "__main__":
    import remat.torch

    print(remat.torch.plan_mesh(small_llama, "fsdp=4,tensor=2", device="h100", optimizer="AdamW"))
