"""Static programs that tests train, and how they train them."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from remat.paddle import _private
from remat.paddle.emit.fences import settled_bytes

F = paddle.nn.functional


def mlp() -> tuple[dict[str, Any], Any, list[Any]]:
    x = paddle.static.data("x", [1024, 64])
    h, kept = x, []
    for number in range(12):
        h = F.gelu(paddle.nn.Linear(64, 64)(h))
        if number % 4 == 3:
            kept.append(h)
    return {"x": x}, (h * h).mean(), kept[:-1]


def convolutions() -> tuple[dict[str, Any], Any, list[Any]]:
    """Batch normalisation and dropout, whose second runs must change nothing."""
    x = paddle.static.data("x", [8, 3, 24, 24])
    h, kept = x, []
    for number in range(5):
        h = paddle.nn.Conv2D(3 if number == 0 else 16, 16, 3, padding=1)(h)
        h = F.dropout(F.relu(paddle.nn.BatchNorm2D(16)(h)), 0.3)
        kept.append(h)
    return {"x": x}, (h * h).mean(), kept[1:3]


def attention() -> tuple[dict[str, Any], Any, list[Any]]:
    """Lists of tensors (split and concat), and gradients that are added up."""
    x = paddle.static.data("x", [32, 48, 32])
    h, kept = x, []
    for _ in range(3):
        query, key, value = paddle.split(paddle.nn.Linear(32, 96)(paddle.nn.LayerNorm(32)(h)), 3, axis=-1)
        h = h + F.dropout(paddle.matmul(F.softmax(paddle.matmul(query, key, transpose_y=True) / 5.0), value), 0.1)
        h = h + paddle.nn.Linear(128, 32)(F.gelu(paddle.nn.Linear(32, 128)(paddle.nn.LayerNorm(32)(h))))
        h = paddle.concat([h[:, :, :16], h[:, :, 16:]], axis=-1)
        kept.append(h)
    return {"x": x}, (h * h).mean(), kept[:-1]


PROGRAMS = {"mlp": mlp, "convolutions": convolutions, "attention": attention}


@dataclass
class Built:
    """A program with its update, not run yet."""

    main: Any
    startup: Any
    inputs: dict[str, Any]
    loss: Any
    kept: list[Any]


def build(name: str, minimize: Any = None) -> Built:
    """A fresh program; ``minimize(loss, kept)`` appends the backward pass and the update, plain Adam if None."""
    paddle.enable_static()
    paddle.seed(7)
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        inputs, loss, kept = PROGRAMS[name]()
        if minimize is None:
            paddle.optimizer.Adam(1e-3).minimize(loss)
        else:
            minimize(loss, kept)
    return Built(main, startup, inputs, loss, kept)


@dataclass
class Trained:
    """What training left behind.

    Attributes:
        losses: of the steps.
        values: of the parameters and statistics afterwards.
        peak_bytes: the smallest peak of a step: where nothing waits for it, Paddle's thread that frees may be late.
        highest_bytes: the largest peak of a step.
    """

    losses: list[float]
    values: dict[str, np.ndarray]
    peak_bytes: int
    highest_bytes: int

    def equals(self, other: Trained) -> bool:
        same = self.losses == other.losses and self.values.keys() == other.values.keys()
        return same and all(np.array_equal(value, other.values[name]) for name, value in self.values.items())


def train(built: Built, steps: int = 5) -> Trained:
    """Run some steps from the start."""
    random = np.random.default_rng(0)
    feed = {name: random.standard_normal(value.shape).astype("float32") for name, value in built.inputs.items()}
    scope = paddle.static.Scope()
    losses, peaks = [], []
    with paddle.static.scope_guard(scope):
        gc.collect()  # What an earlier program left in circles would be freed in the midst of this one.
        before = settled_bytes()
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(built.startup)
        for _ in range(steps):
            _private.reset_peak()
            losses.append(float(executor.run(built.main, feed=feed, fetch_list=[built.loss])[0]))
            peaks.append(_private.peak_bytes() - before)
        values = values_in(scope, built.main)
    return Trained(losses, values, min(peaks), max(peaks))


def values_in(scope: Any, program: Any) -> dict[str, np.ndarray]:
    """The parameters and statistics of a program, by name."""
    # The operators that wait for Paddle to free have attributes that Python cannot read.
    ops = [op for op in program.global_block().ops if op.has_attr("parameter_name")]
    return {name: np.array(scope.find_var(name).get_tensor()) for name in (op.attrs()["parameter_name"] for op in ops)}
