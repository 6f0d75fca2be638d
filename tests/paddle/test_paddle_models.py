"""Whole models within budgets, in every way to train with Paddle: the same numbers to the bit, and the predicted peak.

The first case of each way runs always; the others, and ResNet-50's, take minutes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import pytest
from models import MODELS, loss_of, runs_here
from programs import values_in

import remat
import remat.fit.first_step
import remat.paddle
from remat.paddle import _private
from remat.paddle.emit.fences import settled_bytes
from remat.paddle.first_step import gradient_bytes
from remat.paddle.tensors import bytes_of, tensors_in
from said import said

STEPS = 5
BUDGETS = ("70%", "50%", "smallest")
QUICK = {("static", "gpt", "70%"), ("to_static", "lstm", "70%"), ("fit", "lstm", "70%")}
PLANNER = "peak_greedy"
ACCURACY = {"static": 0.01, "to_static": 0.01, "fit": 0.02}  # Under fit others allocate, too.


@dataclass(frozen=True)
class Trained:
    """Losses of all steps, what training left behind, and the smallest and the largest peak of a step."""

    losses: tuple[float, ...]
    values: dict[str, np.ndarray]
    peaks: tuple[int, int]
    plan: Any = None


def optimizer_of(parameters: Any = None) -> Any:
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    return paddle.optimizer.Momentum(1e-2, parameters=parameters, weight_decay=1e-4, grad_clip=clip)


def static(name: str, budget: int | str | None) -> Trained:
    """A static program; the budget covers the whole step, the update included."""
    model = MODELS[name]
    paddle.enable_static()
    paddle.seed(7)
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        inputs = paddle.static.data("inputs", list(model.shape), model.dtype)
        labels = paddle.static.data("labels", list(model.labels), "int64")
        loss = loss_of(model.make()(inputs), labels)
        optimizer = optimizer_of()
        if model.is_half:
            optimizer = paddle.static.amp.decorate(
                optimizer, level="O1", dtype="bfloat16", use_dynamic_loss_scaling=False, init_loss_scaling=1.0
            )
        optimizer.minimize(loss)
    plan = None
    if budget is not None:
        plan = remat.paddle.plan_program(main, budget, fetch_list=[loss], planner=PLANNER)
    losses, peaks = [], []
    with paddle.static.scope_guard(scope):
        before = _private.allocated_bytes()
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        for step in range(STEPS):
            feed = dict(zip(("inputs", "labels"), model.batch(step), strict=True))
            _private.reset_peak()
            losses.append(float(executor.run(main, feed=feed, fetch_list=[loss])[0]))
            peaks.append(_private.peak_bytes() - before)
        values = values_in(scope, main)
    return Trained(tuple(losses), values, (min(peaks), max(peaks)), plan)


class WithLoss(paddle.nn.Layer):
    """A model with its loss, so that a budget covers both."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Any, labels: Any) -> Any:
        return loss_of(self.net(inputs), labels)


def to_static(name: str, budget: int | str | None) -> Trained:
    """An ordinary loop; the budget covers forward and backward pass of the layer, its loss included."""
    model = MODELS[name]
    paddle.seed(7)
    net = WithLoss(model.make())
    if budget is not None:
        remat.paddle.limit_memory(net, budget, planner=PLANNER)
    elif model.is_half:
        capture(net)
    optimizer = optimizer_of(net.parameters())
    held = sum(p.size * p.element_size() for p in (*net.parameters(), *net.buffers()))
    losses, peaks = [], []
    for step in range(STEPS):
        inputs, labels = map(paddle.to_tensor, model.batch(step))
        gc.collect()
        batch_bytes = sum(one.size * one.element_size() for one in (inputs, labels))
        before = _private.allocated_bytes() - held - batch_bytes
        _private.reset_peak()
        loss = net(inputs, labels)
        loss.backward()
        peaks.append(_private.peak_bytes() - before)
        losses.append(float(loss))
        del loss
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    values = {key: value.numpy() for key, value in net.state_dict().items()}
    return Trained(tuple(losses), values, (min(peaks), max(peaks)), budget and remat.paddle.plan_of(net))


def capture(net: Any) -> None:
    """Let Paddle run a layer as a program, so that it obeys ``auto_cast`` in it."""
    captured = paddle.jit.to_static(net.forward, full_graph=True)

    # paddle.Model asks how many inputs a layer takes, and does not understand what ``to_static`` returns.
    def forward(_: Any, *inputs: Any) -> Any:
        return captured(*inputs)

    forward.__signature__ = inspect.signature(type(net).forward)  # type: ignore[attr-defined]
    net.forward = types.MethodType(forward, net)


class Batches(paddle.io.Dataset):
    """The samples of all steps."""

    def __init__(self, name: str) -> None:
        batches = [MODELS[name].batch(step) for step in range(STEPS)]
        self._parts = [np.concatenate(parts) for parts in zip(*batches, strict=True)]

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(part[index] for part in self._parts)


class Watched(paddle.callbacks.Callback):
    """Losses, and the peak of each step: what lies there before counts as far as the step reads it.

    Args:
        batch_bytes: of the inputs, which lie there when a step begins; its labels are no part of what remat counts.
    """

    def __init__(self, batch_bytes: int) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self._batch_bytes = batch_bytes

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        gc.collect()
        network, state = self.model.network, self.model._optimizer.state_dict()
        counted = [*network.parameters(), *network.buffers(), *tensors_in(state)]
        there_bytes = bytes_of(counted) + gradient_bytes(network.parameters()) + self._batch_bytes
        self._before = settled_bytes() - there_bytes
        _private.reset_peak()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.losses.append(float(np.asarray(logs["loss"]).reshape(-1)[0]))
        self.peaks.append(_private.peak_bytes() - self._before)


def fit(name: str, budget: int | str | None) -> Trained:
    """``paddle.Model.fit``; the budget covers the whole step: the loss, the optimizer's state and the update included.

    Peaks are those of the last two steps. The first ones are measured by remat, and planned for anew between.
    """
    paddle.seed(7)
    model = paddle.Model(MODELS[name].make())
    if budget is None and MODELS[name].is_half:
        capture(model.network)
    if budget is not None:
        remat.paddle.limit_memory(model, budget, planner=PLANNER)
    model.prepare(optimizer_of(model.parameters()), loss_of)
    watched = Watched(MODELS[name].batch()[0].nbytes)
    # A thread that fetches the batches of later steps would be counted with this one.
    batches = paddle.io.DataLoader(Batches(name), batch_size=MODELS[name].shape[0], use_buffer_reader=False)
    model.fit(batches, epochs=1, verbose=0, callbacks=[watched])
    values = {key: value.numpy() for key, value in model.network.state_dict().items()}
    peaks = watched.peaks[-2:]
    return Trained(tuple(watched.losses), values, (min(peaks), max(peaks)), budget and remat.paddle.plan_of(model))


WAYS = {"static": static, "to_static": to_static, "fit": fit}


def train(way: str, name: str, budget: int | str | None) -> Trained:
    paddle.disable_static()
    return WAYS[way](name, budget)


@functools.cache
def plain(way: str, name: str) -> Trained:
    return train(way, name, None)


@functools.cache
def smallest_of(way: str, name: str) -> int:
    """The smallest budget that is named; in ``fit`` after the first step, which shows what lies beside the layer."""
    with pytest.raises(remat.InfeasibleBudget) as caught:
        train(way, name, 1000)
    named = int(caught.value.minimum_bytes)
    while way == "fit":
        log = Log()
        with log.held():
            train(way, name, named)
        larger = named_in(log.lines)
        if larger is None:
            break
        named = larger
    return named


def named_in(lines: Iterable[str]) -> int | None:
    """The smallest budget that a warning names; None where there was none."""
    found = [int(text) for line in lines for text in re.findall(r"would do is (\d+) bytes", line)]
    return found[-1] if found else None


class Log(logging.Handler):
    """What remat says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        logger = logging.getLogger("remat")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


def cases() -> list[Any]:
    found = []
    for way in WAYS:
        for name in filter(runs_here, MODELS):
            for budget in BUDGETS:
                is_quick = (way, name, budget) in QUICK
                is_large = name in ("resnet50", "mobilenet_v2") or (
                    name.endswith(("_bfloat16", "_amp")) and way != "static"
                )
                # The smallest budget is found by training again and again there.
                is_large = is_large or (way, budget) == ("fit", "smallest")
                marks = () if is_quick else (pytest.mark.slow if is_large else pytest.mark.thorough,)
                found.append(pytest.param(way, name, budget, marks=marks))
    return found


@pytest.mark.parametrize(("way", "name", "budget"), cases())
def test_a_model_keeps_its_budget_with_the_same_numbers(way, name, budget, record_property, caplog):
    expected = plain(way, name)
    asked = smallest_of(way, name) if budget == "smallest" else budget
    caplog.clear()
    found = refused = None
    try:
        found = train(way, name, asked)
    except remat.InfeasibleBudget as error:
        refused = error
    if refused is not None:
        # Parameters, gradients and one block need more than half. The smallest budget is named, and has its own case.
        assert budget == "50%", refused
        smallest_bytes = smallest_of(way, name)
        # In fit a budget is refused before the first step, which shows what lies beside the layer.
        assert refused.minimum_bytes <= smallest_bytes if way == "fit" else refused.minimum_bytes == smallest_bytes
        record_property("smallest_bytes", smallest_bytes)
        return
    assert found is not None
    plan = found.plan
    told = said(caplog)
    assert found.losses == expected.losses
    assert found.values.keys() == expected.values.keys()
    for key, value in found.values.items():
        assert np.array_equal(value, expected.values[key]), key
    assert plan.recomputed > 0
    if way == "fit" and budget == "50%" and named_in(told) is not None:
        # Known only after the first step, which showed the optimizer's state; the step runs on.
        record_property("smallest_bytes", smallest_of(way, name))
        return
    figures = {
        "plain_bytes": plan.baseline_peak_bytes,
        "plain_measured_bytes": expected.peaks[0],
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": plan.measured_peak_bytes if way == "fit" else found.peaks[1],
        "overhead": plan.overhead,
    }
    for key, value in figures.items():
        record_property(key, value)
    if way == "fit":
        record_property("told", " ".join(told))
    assert plan.measured_peak_bytes <= plan.budget_bytes
    # Of the last two steps of fit one showed 192 KiB more, in one run of three: Paddle frees on other threads, too.
    assert found.peaks[0 if way == "fit" else 1] <= plan.budget_bytes
    assert figures["measured_bytes"] == pytest.approx(plan.peak_bytes, rel=ACCURACY[way])
