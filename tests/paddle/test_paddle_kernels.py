"""What the graph of a program says of each operator, against Paddle's counter: its results, takeovers and scratch."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from models import runs_half_products
from op_bytes import op_bytes
from paddle import nn

F = nn.functional

ROUNDING = 64
"""Bytes by which a small operator may differ: constants of a few elements are made when they are first read."""


def weight(*shape):
    return paddle.create_parameter(list(shape), "float32")


def heads(h):
    query, key = (h.reshape([4, 16, 4, 8]).transpose(axes) for axes in ([0, 2, 1, 3], [0, 2, 3, 1]))
    return F.softmax(paddle.matmul(query, key))


# What reads a tensor, and the shape of that.
READERS = {
    "linear": ((4, 16, 32), lambda h: F.gelu(nn.Linear(32, 48)(h))),
    "attention": ((4, 16, 32), heads),
    "spread matrices": ((4, 16, 32), lambda h: paddle.matmul(h, weight(1, 32, 8))),
    "dropout": ((48, 64), lambda h: F.dropout(h, 0.1)),
    "layer norm": ((48, 64), lambda h: nn.LayerNorm(64)(h)),
    "batch norm": ((8, 64, 10, 10), lambda h: F.relu(nn.BatchNorm2D(64)(h))),
    "group norm": ((8, 16, 10, 10), lambda h: nn.GroupNorm(4, 16)(h)),
    "cross-entropy": ((48, 64), lambda h: F.cross_entropy(h, paddle.ones([48], "int64"))),
    "max pool": ((8, 16, 10, 10), lambda h: F.max_pool2d(h, 2)),
    "convolution": ((4, 6, 24, 24), lambda h: nn.Conv2D(6, 8, 3, stride=2, padding=1)(h)),
    "convolution of pixels": ((4, 6, 24, 24), lambda h: nn.Conv2D(6, 8, 1)(h)),
    "convolution in groups": ((4, 6, 24, 24), lambda h: nn.Conv2D(6, 6, 3, groups=2)(h)),
    "depthwise convolution": ((4, 6, 24, 24), lambda h: nn.Conv2D(6, 6, 3, groups=6)(h)),
    "convolution of volumes": ((2, 3, 8, 8, 8), lambda h: nn.Conv3D(3, 6, 3, padding=1)(h)),
    "transposed convolution": ((4, 8, 12, 12), lambda h: nn.Conv2DTranspose(8, 4, 3, stride=2, padding=1)(h)),
    "transposed, in groups": ((4, 8, 12, 12), lambda h: nn.Conv2DTranspose(8, 4, 2, stride=2, groups=2)(h)),
    "transposed, volumes": ((2, 3, 8, 8, 8), lambda h: nn.Conv3DTranspose(3, 6, 2, stride=2)(h)),
    "LSTM": ((8, 20, 16), lambda h: nn.LSTM(16, 24)(h)[0]),
    "LSTM of an input": ((8, 20, 16), lambda h: nn.LSTM(16, 24)(h.detach())[0]),
    "LSTM, 2 layers, 2 directions": ((8, 20, 16), lambda h: nn.LSTM(16, 24, 2, "bidirect")(h)[0]),
    "GRU, 3 layers": ((8, 20, 16), lambda h: nn.GRU(16, 24, 3)(h)[0]),
    "simple cells": ((8, 20, 16), lambda h: nn.SimpleRNN(16, 24, 2, "bidirect")(h)[0]),
    "sum, spread outside": ((4, 16, 32), lambda h: h + weight(16, 32)),
    "sum, spread inside": ((4, 16, 32), lambda h: h + weight(4, 1, 1)),
    "sum, spread in the middle": ((4, 16, 32), lambda h: h + weight(4, 1, 32)),
    "product, spread in the middle": ((4, 16, 32), lambda h: h * weight(1, 16, 1)),
    "quotient, both spread": ((4, 16, 1), lambda h: h / weight(1, 1, 32)),
    "parts of a list": ((48, 64), lambda h: F.relu(paddle.concat([F.relu(h), h], 1))),
    "where": ((48, 64), lambda h: paddle.where(h > 0, h, 2.0 * h)),
    "products in half precision": ((4, 16, 32), lambda h: h.astype("bfloat16") @ weight(32, 8).astype("bfloat16")),
    "half precision": ((48, 64), lambda h: _sum_of_halves(h.astype("bfloat16"))),
}


def _sum_of_halves(h):
    return (h * h).astype("float32") + (2.0 * h).astype("float32") + h.astype("float32")


@pytest.mark.parametrize("name", READERS)
def test_an_operator_takes_what_the_graph_says(name):
    if name == "products in half precision" and not runs_half_products():
        with pytest.raises(RuntimeError):  # Paddle's own, on a CPU without AVX-512: there is nothing to count.
            differences(*READERS[name])
        return
    assert differences(*READERS[name]) == []


@pytest.mark.parametrize(
    ("shape", "reader"),
    [
        ((4, 24, 24, 3), lambda h: nn.Conv2D(3, 8, 3, padding=1, data_format="NHWC")(h)),
        ((4, 12, 12, 8), lambda h: nn.Conv2DTranspose(8, 4, 2, stride=2, data_format="NHWC")(h)),
        ((4, 16, 4, 8), lambda h: paddle.einsum("bqhd,bkhd->bhqk", h, 2.0 * h)),
    ],
    ids=["channels last", "transposed, channels last", "einsum"],
)
def test_an_operator_takes_no_more_than_the_graph_says(shape, reader):
    assert [one for one in differences(shape, reader) if one.during[1] > one.during[0] + ROUNDING] == []


@pytest.mark.parametrize("optimizer", ["Momentum", "AdamW", "Lamb"])
def test_an_update_takes_what_the_graph_says(optimizer):
    paddle.enable_static()
    clip = nn.ClipGradByGlobalNorm(1.0)
    made = getattr(paddle.optimizer, optimizer)(0.1, grad_clip=clip)
    assert differences((16, 64), lambda h: nn.Linear(64, 32)(h), made) == []


def differences(shape, reader, optimizer=None):
    """The operators of forward pass, backward pass and update of which the graph says something else."""
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        x = paddle.static.data("x", list(shape))
        if optimizer is None:
            x.stop_gradient = False
        loss = (reader(1.5 * x).astype("float32") * 3.0).mean()
        if optimizer is None:
            paddle.static.append_backward(loss)
        else:
            optimizer.minimize(loss)
    found = op_bytes(main, startup, {"x": np.ones(shape, "float32")}, [loss])
    assert len(found) > 5
    return [
        one for one in found for said, counted in (one.during, one.after) if not -ROUNDING <= counted - said <= ROUNDING
    ]
