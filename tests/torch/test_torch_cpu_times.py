"""What operators take on a CPU where a roofline is far off."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
from remat.running.cost_model import get_profile
from remat.torch.trace import cpu_times, op_facts

_ATEN = torch.ops.aten


def _flops(func: torch._ops.OpOverload, *args: object, **kwargs: object) -> tuple[float, float]:
    out = func(*args, **kwargs)
    counted = op_facts.flops(func, args, kwargs, out)
    return counted, cpu_times.flops(func, args, kwargs, out, counted)


def test_a_maximum_over_windows_is_dear_where_channels_are_not_last() -> None:
    picture = torch.randn(4, 32, 56, 56)
    func = _ATEN.max_pool2d_with_indices.default
    window = ([3, 3], [2, 2], [1, 1])
    made = 4 * 32 * 28 * 28
    _, first = _flops(func, picture, *window)
    _, last = _flops(func, picture.to(memory_format=torch.channels_last), *window)
    assert first == 2500 * made
    assert last == 150 * made


def test_a_dropout_and_an_approximate_gelu_are_dear_and_a_sum_is_not() -> None:
    x = torch.randn(64, 64)
    assert _flops(_ATEN.native_dropout.default, x, 0.1, True)[1] == 660 * 4096
    assert _flops(_ATEN.gelu.default, x, approximate="tanh")[1] == 170 * 4096
    assert _flops(_ATEN.bernoulli_.float, x.clone(), 0.5)[1] == 580 * 4096
    assert _flops(_ATEN.pow.Tensor_Scalar, x, 1.7)[1] == 260 * 4096
    norm = _ATEN.linalg_vector_norm.default
    assert _flops(norm, x, 2, [0])[1] == 130 * 4096
    for func, args in (
        (norm, (x, 2, [1])),
        (norm, (x, 2, [0, -1])),
        (_ATEN.add.Tensor, (x, x)),
        (_ATEN.pow.Tensor_Scalar, (x, 2)),
        (_ATEN.relu.default, (x,)),
    ):
        counted, on_cpu = _flops(func, *args)
        assert on_cpu == counted


def test_convolutions_of_one_channel_each_take_longer_than_their_products() -> None:
    picture = torch.randn(2, 16, 14, 14)
    for size, forward, backward in ((3, 3.6, 3.6), (7, 1.8, 20.0)):
        weight = torch.randn(16, 1, size, size)
        rest = ([1, 1], [size // 2, size // 2], [1, 1], False, [0, 0], 16)
        counted, on_cpu = _flops(_ATEN.convolution.default, picture, weight, None, *rest)
        assert on_cpu == pytest.approx(forward * counted)
        mask = [True, True, False]
        counted, on_cpu = _flops(_ATEN.convolution_backward.default, picture, picture, weight, None, *rest, mask)
        assert on_cpu == pytest.approx(backward * counted)
    weight = torch.randn(16, 16, 3, 3)
    counted, on_cpu = _flops(_ATEN.convolution.default, picture, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert on_cpu == counted


class _Squashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def _graph_of(mode: str, device: str) -> remat.Graph:
    model, x = _Squashed(), torch.randn(4096, 64)
    if mode == "eager":
        return remat.torch.trace(model, x, device=device)
    planned = remat.torch.compile(model, budget="90%", device=device, backend="aten")
    planned(x).backward()
    return planned.plan.graph


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_cpu_s_graph_knows_them_and_a_gpu_s_does_not(mode: str) -> None:
    for device, times in (("cpu", 2.6 * 100 / 230.4), ("a100", None)):
        profile = get_profile(device)
        tanh = [op for op in _graph_of(mode, device).ops if "tanh" in op.kind and "backward" not in op.kind]
        assert len(tanh) == 4
        traffic_s = 2 * 4 * 4096 * 64 / (profile.bytes_per_s * profile.bandwidth_efficiency)
        expected_s = traffic_s if times is None else times * 1e-9 * 4096 * 64
        assert tanh[0].time_s - profile.overhead_s == pytest.approx(expected_s)


@pytest.mark.parametrize(("groups", "channels"), [(1, 8), (2, 8), (8, 8)])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_gradient_of_a_convolution_in_groups_takes_what_the_convolution_takes(
    groups: int, channels: int, transposed: bool
) -> None:
    picture = torch.randn(2, channels, 9, 9)
    weight = torch.randn(channels, channels // groups, 3, 3)
    how = ([2, 2], [1, 1], [1, 1], transposed, [0, 0], groups)
    made = _ATEN.convolution.default(picture, weight, None, *how)
    forward = op_facts.flops(_ATEN.convolution.default, (picture, weight, None, *how), {}, made)
    for mask in ([True, True, False], [True, False, True], [False, True, False]):
        args = (made, picture, weight, [channels], *how, mask)
        assert op_facts.flops(_ATEN.convolution_backward.default, args, {}, None) == (mask[0] + mask[1]) * forward
