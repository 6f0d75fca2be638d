"""What slices of a language model's head save and cost in PyTorch's graph mode: ``python -m benchmarks.split``.

Two models of two layers with a small width and the full vocabularies of GPT-2 and Llama 3, so that the head binds. Each
is run plainly, with the smallest peak by recomputation alone, with the smallest peak by recomputation and slices, and
beside two heads that people write by hand: one computes gradients chunk by chunk in its forward pass, as fused linear
cross-entropies do; the other runs each chunk under ``torch.utils.checkpoint``. Graph mode is then given the bytes that
each of them takes. Peaks are measured. Times are the least processor time of several steps, all ways in turns.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
import remat.torch
from benchmarks.split_table import table

RESULT = Path(__file__).parent / "results" / "torch-split.md"
CHUNKS, STEPS, UPDATES = 8, 4, 5
LEVERS = ("recompute", "split")


class Block(nn.Module):
    """A layer of a decoder, with GPT-2's inner layer or Llama's."""

    def __init__(self, width: int, heads: int, *, gated: bool) -> None:
        super().__init__()
        self.heads, self.gated = heads, gated
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=not gated)
        self.out = nn.Linear(width, width, bias=not gated)
        self.up = nn.Linear(width, 4 * width, bias=not gated)
        self.gate = nn.Linear(width, 4 * width, bias=False) if gated else None
        self.down = nn.Linear(4 * width, width, bias=not gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        samples, length, width = x.shape
        parts = self.queries_keys_values(self.norm_1(x)).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        y = self.norm_2(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(inner)


class Decoder(nn.Module):
    """A language model without its head's product."""

    def __init__(self, words: int, width: int, *, gated: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, 4, gated=gated) for _ in range(2)))
        self.norm = nn.RMSNorm(width) if gated else nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if not gated:
            self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the head reads, a line for each token."""
        return self.norm(self.blocks(self.embedding(tokens))).flatten(0, 1)


class InForward(torch.autograd.Function):
    """The head by hand: each chunk's gradients are computed behind its loss, and scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        loss = x.new_zeros(())
        x_gradient, weight_gradient = torch.empty_like(x), torch.zeros_like(weight)
        for part, label, out in zip(x.chunk(CHUNKS), labels.chunk(CHUNKS), x_gradient.chunk(CHUNKS), strict=True):
            logarithms = torch.log_softmax(part @ weight.t(), -1)
            loss += F.nll_loss(logarithms, label, reduction="sum")
            logarithms.exp_()
            logarithms[torch.arange(len(label)), label] -= 1
            logarithms /= len(labels)
            torch.mm(logarithms, weight, out=out)
            weight_gradient.addmm_(logarithms.t(), part)
        ctx.gradients = x_gradient, weight_gradient
        return loss / len(labels)

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        """The gradients, scaled."""
        x_gradient, weight_gradient = ctx.gradients
        del ctx.gradients
        return x_gradient.mul_(gradient[0]), weight_gradient.mul_(gradient[0]), None


def plainly(model: Decoder, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss as anyone writes it."""
    return F.cross_entropy(model.head(model(tokens)), labels)


def in_forward(model: Decoder, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss with ``InForward``."""
    return InForward.apply(model(tokens), model.head.weight, labels)  # type: ignore[no-any-return, no-untyped-call]


def by_checkpoints(model: Decoder, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each chunk under a checkpoint."""

    def summed(part: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(part), label, reduction="sum")

    x = model(tokens)
    parts = zip(x.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
    losses = [checkpoint(summed, part, label, use_reentrant=False) for part, label in parts]
    return torch.stack(losses).sum() / len(labels)


def smallest(model: Decoder, args: tuple[Any, ...], levers: tuple[str, ...], time_limit_s: float) -> Any:
    """Graph mode with the smallest peak."""
    options = {"backend": "aten", "levers": levers, "time_limit_s": time_limit_s}
    try:
        remat.torch.compile(plainly, budget=1, **options)(model, *args)
    except remat.InfeasibleBudget as error:
        return compiled(model, args, error.minimum_bytes, levers, time_limit_s)
    raise AssertionError("no step takes one byte")


def compiled(model: Decoder, args: tuple[Any, ...], budget: int, levers: tuple[str, ...], time_limit_s: float) -> Any:
    """Graph mode within a budget, captured."""
    torch._dynamo.reset()
    options = {"backend": "aten", "levers": levers, "time_limit_s": time_limit_s}
    made = remat.torch.compile(plainly, budget=budget, **options)
    made(model, *args).backward()
    model.zero_grad()
    return made


def after_updates(model: Decoder, step: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The parameters after some steps of AdamW, from the model's present ones, which are put back."""
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        step(model, *args).backward()
        optimizer.step()
    found = [p.detach().clone() for p in model.parameters()]
    model.zero_grad()
    model.load_state_dict(before)
    return found


def lines_of(
    name: str, words: int, width: int, tokens: int, *, gated: bool, time_limit_s: float
) -> list[dict[str, Any]]:
    """A line for each way to run one model."""
    torch.manual_seed(0)
    model = Decoder(words, width, gated=gated)
    data = torch.randint(0, words, (tokens // 256, 256))
    args = (data, torch.randint(0, words, (tokens,)))
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "plain": plainly,
        f"by hand, gradients in the forward pass, {CHUNKS} chunks": in_forward,
        f"by hand, {CHUNKS} checkpointed chunks": by_checkpoints,
    }
    peaks = {way: remat.torch.measure(step, model, *args, repeats=1).peak_bytes for way, step in ways.items()}
    ways["graph mode, smallest peak by recomputation"] = smallest(model, args, ("recompute",), time_limit_s)
    ways["graph mode, smallest peak with slices"] = smallest(model, args, LEVERS, time_limit_s)
    for way, step in list(ways.items())[1:3]:
        label = "the first's bytes" if step is in_forward else "the second's bytes"
        ways[f"graph mode, within {label}"] = compiled(model, args, peaks[way], LEVERS, time_limit_s)
    for way in list(ways)[3:]:
        peaks[way] = remat.torch.measure(ways[way], model, *args, repeats=1).peak_bytes
    times = dict.fromkeys(ways, float("inf"))
    for _ in range(STEPS):
        for way, step in ways.items():
            gc.collect()
            started = time.process_time()
            step(model, *args).backward()
            times[way] = min(times[way], time.process_time() - started)
            model.zero_grad()
    expected = after_updates(model, plainly, args)
    lines = []
    for way, step in ways.items():
        found = after_updates(model, step, args)
        difference = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
        plan = getattr(step, "plan", None)
        split = None if plan is None else plan.split
        lines.append(
            {
                "model": name,
                "way": way,
                "peak_bytes": peaks[way],
                "time_s": times[way],
                "slices": "" if split is None else str(split.slices),
                "recomputed": "" if plan is None else str(plan.recomputed),
                "difference": difference,
            }
        )
    return lines


def written(lines: list[dict[str, Any]], threads: int) -> str:
    """The table as Markdown."""
    about = (
        f"{threads} thread; torch {torch.__version__}; float32. Difference: of the parameters after {UPDATES} steps of "
        "AdamW from plain, relative, the largest one."
    )
    return table("Slices of the head in PyTorch's graph mode", about, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small vocabularies; keeps no result")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    words = (5000, 8000) if quick else (50_257, 128_256)
    tokens, width, limit_s = (512, 32, 1.0) if quick else (1024, 128, 5.0)
    lines = lines_of("GPT-2's head, 50,257 words", words[0], width, tokens, gated=False, time_limit_s=limit_s)
    lines += lines_of("Llama's head, 128,256 words", words[1], width, tokens, gated=True, time_limit_s=limit_s)
    text = written(lines, torch.get_num_threads())
    if not quick:
        RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
