"""Small models of every kind, as a module, a loss function and its arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Case:
    module: nn.Module
    loss: Callable[..., torch.Tensor]
    args: tuple[Any, ...]


class Residual(nn.Module):
    """A residual block with activations in place, as torchvision writes it."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after))
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.second(self.relu(self.first(x)))
        out += identity
        return self.relu(out)


def resnet(width: int = 16, batch: int = 16, blocks: int = 2) -> Case:
    widths = [width, *(width << stage for stage in range(3) for _ in range(blocks))]
    body = [Residual(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)]
    module = nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    args = (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))
    return Case(module, lambda x, y: F.cross_entropy(module(x), y), args)


class Bottleneck(nn.Module):
    """The block of a ResNet-50, as torchvision writes it."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        sizes = [(before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1)]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        out = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            out = norm(convolution(out if out is x else self.relu(out)))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


def resnet50(batch: int = 32, size: int = 112) -> Case:
    blocks = []
    for stage, count in enumerate((3, 4, 6, 3)):
        for n in range(count):
            before = 64 if not blocks else blocks[-1].norms[-1].num_features
            blocks.append(Bottleneck(before, 64 << stage, 2 if stage and not n else 1))
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    module = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    args = (torch.randn(batch, 3, size, size), torch.randint(1000, (batch,)))
    return Case(module, lambda x, y: F.cross_entropy(module(x), y), args)


class UNet(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        sizes = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(self._block(a, b) for a, b in zip([3, *sizes], sizes[:-1], strict=False))
        self.middle = self._block(sizes[-2], sizes[-1])
        self.up = nn.ModuleList(self._block(sizes[n + 1] + sizes[n], sizes[n]) for n in reversed(range(depth)))
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        one = [nn.Conv2d(before, after, 3, 1, 1), nn.GroupNorm(4, after), nn.SiLU()]
        return nn.Sequential(*one, nn.Conv2d(after, after, 3, 1, 1), nn.GroupNorm(4, after), nn.SiLU())

    def forward(self, x):
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skipped.pop()], 1))
        return self.head(x)


def unet(width: int = 16, batch: int = 4) -> Case:
    module = UNet(width)
    return Case(module, lambda x: F.mse_loss(module(x), x), (torch.randn(batch, 3, 64, 64),))


def gpt2(layers: int = 4, width: int = 128, batch: int = 8, length: int = 128) -> Case:
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=512, n_positions=length, bos_token_id=0, eos_token_id=0
    )
    module = transformers.GPT2LMHeadModel(config)
    module.loss_type = "ForCausalLM"  # Where it is not told it logs so, which torch.compile refuses.
    ids = torch.randint(512, (batch, length))
    return Case(module.train(), lambda ids: module(input_ids=ids, labels=ids).loss, (ids,))


def bert(layers: int = 4, width: int = 128, batch: int = 8, length: int = 128, padded: bool = True) -> Case:
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=4, intermediate_size=4 * width, vocab_size=512
    )
    module = transformers.BertForMaskedLM(config)
    module.loss_type = "ForMaskedLM"
    ids = torch.randint(512, (batch, length))
    mask = torch.ones_like(ids)
    if padded:
        mask[:, length * 3 // 4 :] = 0
    loss = lambda ids, mask: module(input_ids=ids, attention_mask=mask, labels=ids).loss  # noqa: E731
    return Case(module.train(), loss, (ids, mask))


class ViT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(torch.zeros(1, 64, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2) + self.positions).mean(1))


def vit(width: int = 96, layers: int = 4, batch: int = 16) -> Case:
    module = ViT(width, layers)
    args = (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))
    return Case(module, lambda x, y: F.cross_entropy(module(x), y), args)


class LanguageModel(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(nn.LSTM(128, 128, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(128, 512)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)[0]), 0.1)
        return self.head(x)


def lstm(batch: int = 8, length: int = 128) -> Case:
    module = LanguageModel()
    ids = torch.randint(512, (batch, length))
    return Case(module, lambda ids: F.cross_entropy(module(ids).flatten(0, 1), ids.flatten()), (ids,))


def mlp(layers: int = 12, width: int = 64, batch: int = 256, dropout: float = 0.0) -> Case:
    body = []
    for _ in range(layers):
        body += [nn.Linear(width, width), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else [])]
    module = nn.Sequential(*body)
    return Case(module, lambda x: module(x).square().mean(), (torch.randn(batch, width),))


CASES = {"resnet": resnet, "resnet50": resnet50, "unet": unet, "gpt2": gpt2, "bert": bert, "vit": vit, "lstm": lstm}
