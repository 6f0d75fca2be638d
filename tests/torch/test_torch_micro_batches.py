"""Micro-batches: the numbers of the whole batch, with true denominators, at less memory."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat.torch


def model(dtype=torch.float64, width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, 4)).to(dtype)


def masked(module):
    """A pair (sum, denominator), as a loss over tokens of which some are masked."""
    return lambda x, y, mask: ((F.cross_entropy(module(x), y, reduction="none") * mask).sum(), mask.sum())


def batch(samples=10, dtype=torch.float64):
    return torch.randn(samples, 16, dtype=dtype), torch.randint(4, (samples,))


def gradients(module):
    return [p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 20])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_numbers_of_the_whole_batch(count, reduction):
    module, (x, y) = model(), batch()
    loss = lambda x, y: F.cross_entropy(module(x), y, reduction=reduction)  # noqa: E731
    whole = loss(x, y)
    whole.backward()
    expected = gradients(module)
    module.zero_grad()
    value = remat.torch.micro_batches(loss, count, reduction=reduction)(x, y)

    torch.testing.assert_close(value, whole.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(module), expected, rtol=1e-10, atol=1e-15)


def test_ratios_divide_once_by_what_the_whole_batch_has():
    module, (x, y) = model(), batch()
    mask = torch.tensor([1.0, 0, 1, 1, 1, 0, 0, 0, 0, 1]).double()
    numerator, denominator = masked(module)(x, y, mask)
    (numerator / denominator).backward()
    expected = gradients(module)
    for count in (1, 3, 5):
        module.zero_grad()
        value = remat.torch.micro_batches(masked(module), count, reduction="ratio")(x, y, mask)
        # Pieces 3 and 4 of five hold nothing but masked samples.
        torch.testing.assert_close(value, (numerator / denominator).detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradients(module), expected, rtol=1e-10, atol=1e-15)
    module.zero_grad()
    assert remat.torch.micro_batches(masked(module), 2, reduction="ratio")(x, y, mask * 0) == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(module))


def test_it_adds_to_earlier_gradients_and_keeps_none():
    module, (x, y) = model(), batch()
    module.append(nn.Linear(4, 4).double())
    loss = lambda x, y: F.cross_entropy(module[:3](x), y)  # noqa: E731
    loss(x, y).backward()
    once = [p.grad.clone() for p in module[:3].parameters()]
    remat.torch.micro_batches(loss, 3)(x, y)
    torch.testing.assert_close([p.grad for p in module[:3].parameters()], [2 * g for g in once])
    assert all(p.grad is None for p in module[3].parameters())


def test_half_precision_is_accumulated_in_float32():
    module = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    x = torch.ones(1024, 4, dtype=torch.bfloat16)
    remat.torch.micro_batches(lambda x: module(x).sum(), 1024, reduction="sum")(x)
    # A bfloat16 sum of ones stalls at 256.
    assert module.weight.grad.dtype is torch.bfloat16
    assert module.weight.grad.tolist() == [[1024.0] * 4]


def test_a_grad_scaler_scales_the_loss_once():
    module, (x, y) = model(torch.float32), batch(dtype=torch.float32)
    loss = lambda x, y: F.cross_entropy(module(x), y)  # noqa: E731
    loss(x, y).backward()
    expected = gradients(module)
    module.zero_grad()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(module.parameters(), lr=0.0)
    value = remat.torch.micro_batches(loss, 3, scaler=scaler)(x, y)
    scaler.unscale_(optimizer)
    torch.testing.assert_close(gradients(module), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(value, loss(x, y).detach())
    scaler.step(optimizer)
    scaler.update()


def test_gradients_are_synchronised_with_the_last_piece_only():
    module, (x, y) = model(), batch()
    inside, seen = [], []

    @contextmanager
    def no_sync():
        inside.append(1)
        yield
        inside.pop()

    module[0].weight.register_hook(lambda gradient: seen.append(bool(inside)))
    remat.torch.micro_batches(lambda x, y: F.cross_entropy(module(x), y), 3, no_sync=no_sync)(x, y)
    assert seen == [True, True, False]


def test_a_budget_holds_and_changes_no_number():
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)])
    x = torch.randn(1030, 64)
    loss = lambda x: module(x).square().mean()  # noqa: E731
    plain_peak = remat.torch.measure(loss, x, repeats=1).peak_bytes
    remat.torch.micro_batches(loss, 4)(x)
    expected = gradients(module)
    module.zero_grad()
    step = remat.torch.micro_batches(loss, 4, budget="40%", planner="peak_greedy")
    step(x)
    assert all(torch.equal(a, b) for a, b in zip(gradients(module), expected, strict=True))
    assert len(step.plans) == 2  # Two pieces have a sample more.

    def whole_step(x):
        module.zero_grad()
        step(x)

    assert remat.torch.measure(whole_step, x, repeats=1).peak_bytes <= 0.4 * plain_peak


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: remat.torch.micro_batches(len, 0), ValueError, "at least 1, not 0"),
        (lambda: remat.torch.micro_batches(len, True), ValueError, "not True"),
        (lambda: remat.torch.micro_batches(len, 2, reduction="median"), ValueError, "median"),
        (
            lambda: remat.torch.micro_batches(len, 2)(torch.ones(3), torch.ones(4)),
            remat.UnsupportedStep,
            "argument 0 has 3 samples and argument 1 has 4",
        ),
        (
            lambda: remat.torch.micro_batches(len, 2)(torch.tensor(1.0)),
            remat.UnsupportedStep,
            r"argument 0 has the shape \(\), so it cannot be split",
        ),
        (lambda: remat.torch.micro_batches(len, 2)(torch.ones(0, 3)), ValueError, "no samples"),
        (lambda: remat.torch.micro_batches(len, 2)("x"), ValueError, "there is no tensor to split"),
        (lambda: remat.torch.micro_batches(len, 2, batch_argnums=[4])(torch.ones(3)), ValueError, "argument 4"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
