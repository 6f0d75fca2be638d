"""The models in PyTorch: written out here, since the machine may have no library of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Wrap = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Step:
    """A model's loss on a batch.

    Attributes:
        loss: of ``args``.
        args: the batch.
        parameters: what it is differentiated by.
        own_bytes: of the batch, the parameters and the buffers.
    """

    loss: Callable[..., torch.Tensor]
    args: tuple[torch.Tensor, ...]
    parameters: list[nn.Parameter]
    own_bytes: int


def step_of(name: str, dtype: str, device: str, small: bool, wrap: Wrap = lambda block: block) -> Step:
    """A model with random weights, dropout included.

    Args:
        name: "resnet50", "gpt2" or "llama".
        dtype: of weights and activations.
        device: as PyTorch names it.
        small: a few layers, for a machine without a GPU.
        wrap: goes around each block.
    """
    torch.manual_seed(0)
    model: nn.Module
    if name == "resnet50":
        model = ResNet((1, 1) if small else (3, 4, 6, 3), 8 if small else 64, wrap)
        batch, edge = (4, 32) if small else (64, 224)
        images = torch.randn(batch, 3, edge, edge, device=device, dtype=getattr(torch, dtype))
        args = (images, torch.randint(10, (batch,), device=device))
    else:
        size = Size(2, 64, 4, 32, 2, 101) if small else Size(12, 768, 12, 1024, 8, 50257)
        if name == "llama" and not small:
            size = Size(8, 2048, 16, 2048, 2, 32000)
        model = Decoder(size, name == "llama", wrap)
        ids = torch.randint(size.words, (size.batch, size.length + 1), device=device)
        args = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    model.to(device=device, dtype=getattr(torch, dtype))

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs = model(inputs)
        return F.cross_entropy(outputs.flatten(0, -2).float(), labels.flatten())

    own_bytes = sum(tensor.nbytes for tensor in (*args, *model.parameters(), *model.buffers()))
    return Step(loss, args, list(model.parameters()), own_bytes)


@dataclass(frozen=True)
class Size:
    """Layers, width of the residual stream, heads, tokens of a sample, samples, words."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    words: int


class Bottleneck(nn.Module):
    """Three convolutions with batch normalisation around a shortcut, as in He et al. 2016."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(inputs, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, 4 * width, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, 4 * width))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            hidden = norm(convolution(hidden))
            hidden = F.relu(hidden) if number < 2 else hidden
        return F.relu(hidden + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50 with (3, 4, 6, 3) blocks of 64 channels."""

    def __init__(self, depths: tuple[int, ...], width: int, wrap: Wrap) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inputs = [], width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                blocks.append(Bottleneck(inputs, width << stage, 2 if stage and not number else 1))
                inputs = 4 * (width << stage)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, 10)
        self._calls = [wrap(block) for block in blocks]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for call in self._calls:
            x = call(x)
        return self.head(x.mean((2, 3)))


class DecoderBlock(nn.Module):
    """Attention and a wide layer: GPT-2's, with dropout, or Llama's, with grouped heads and no biases."""

    def __init__(self, size: Size, is_llama: bool) -> None:
        super().__init__()
        width, self.heads, self.is_llama = size.width, size.heads, is_llama
        self.groups = max(1, size.heads // 4) if is_llama else size.heads
        head = width // size.heads
        norm: Any = nn.RMSNorm if is_llama else nn.LayerNorm
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        self.attention = nn.Linear(width, width + 2 * self.groups * head, bias=not is_llama)
        self.project = nn.Linear(width, width, bias=not is_llama)
        self.widen = nn.Linear(width, (6 if is_llama else 4) * width, bias=not is_llama)
        self.narrow = nn.Linear((3 if is_llama else 4) * width, width, bias=not is_llama)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = x.shape[-1] // self.heads
        parts = self.attention(self.norms[0](x)).split((x.shape[-1], self.groups * head, self.groups * head), -1)
        q, k, v = (part.unflatten(-1, (-1, head)).transpose(1, 2) for part in parts)
        drop = 0.0 if self.is_llama else 0.1
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop, enable_gqa=self.is_llama)
        x = x + F.dropout(self.project(attended.transpose(1, 2).flatten(2)), drop)
        wide = self.widen(self.norms[1](x))
        if self.is_llama:
            gate, up = wide.chunk(2, -1)
            wide = F.silu(gate) * up
        else:
            wide = F.gelu(wide, approximate="tanh")
        return x + F.dropout(self.narrow(wide), drop)


class Decoder(nn.Module):
    """A language model whose head shares the weights of its embedding."""

    def __init__(self, size: Size, is_llama: bool, wrap: Wrap) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.words, size.width), nn.Embedding(size.length, size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(DecoderBlock(size, is_llama) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self._calls = [wrap(block) for block in self.blocks]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for call in self._calls:
            x = call(x)
        return F.linear(self.norm(x), self.tokens.weight)
