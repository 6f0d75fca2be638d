"""A layer or function of Paddle as a training step that ``remat plan``, ``measure`` and ``check`` can use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import paddle

from remat.core.graph import Graph
from remat.paddle.measure import measure
from remat.paddle.micro_batches import value_and_grad
from remat.paddle.recompute import layers_of
from remat.paddle.tensors import tensors_in
from remat.paddle.trace.trace import trace
from remat.running.workload import Array, NotAStep, StepOptions, Training, Workload, nudge

_SEED: Final = 11  # Any number does: plain and planned steps start from the same random state.


def make_workload(made: Any, options: StepOptions) -> Workload:
    """The training step of a layer, or of ``(loss function, *arguments)``.

    A layer takes inputs of the shapes in ``options.inputs``, and ``options.loss`` names a function of
    ``paddle.nn.functional``; "mse_loss" against zeros if None. ``options.optimizer`` names a class of
    ``paddle.optimizer``, whose update is then part of the training that is measured and checked.

    Raises:
        NotAStep: for a layer without shapes, or a loss or an optimizer that Paddle does not have.
    """
    if isinstance(made, paddle.nn.Layer):
        made = _loss_of_layer(made, options)
    else:
        options.refuse("Paddle", "inputs", "loss")
    function, *args = made
    return PaddleFunction(function, args, options)


class PaddleFunction:
    """See ``remat.running.workload.Workload``; a step is the loss, its gradients and, with an optimizer, the update.

    Args:
        function: returns the loss.
        args: its arguments.
        options: batch size and name of the optimizer.
    """

    framework = "paddle"

    def __init__(self, function: Callable[..., Any], args: list[Any], options: StepOptions) -> None:
        self._function = function
        self._args = args
        self._options = options
        layers = list(dict.fromkeys(layers_of(function, args)))
        named = {f"{n}.{name}": p for n, layer in enumerate(layers) for name, p in layer.named_parameters()}
        own = {f"argument.{n}": a for n, a in enumerate(tensors_in(args)) if not a.stop_gradient}
        self._parameters = {name: p for name, p in (named | own).items() if not p.stop_gradient}
        buffers = {f"{n}.{name}": b for n, layer in enumerate(layers) for name, b in layer.named_buffers()}
        # The statistics of a batch normalisation are parameters that take no gradient.
        self._buffers = {**buffers, **{name: p for name, p in named.items() if p.stop_gradient}}
        self._first = [tensor.numpy().copy() for tensor in self._tensors()]

    @property
    def batch_size(self) -> int | None:
        """What the user said; arguments alone know otherwise."""
        return self._options.batch_size

    def graph(self, device: str) -> Graph:
        """The step, traced."""
        return trace(self._function, *self._args, device=device)

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run some steps on the same batch."""
        self._set_back(nudged)
        optimizer = self._optimizer()
        step_of = value_and_grad(self._function, list(self._parameters.values()), budget=budget)
        losses: list[float] = []
        times: list[float] = []

        def step() -> None:
            started = time.perf_counter()
            value, gradients = step_of(*self._args)
            if optimizer is not None:
                for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                optimizer.clear_grad()
            losses.append(float(value))
            times.append(time.perf_counter() - started)

        self._check_loss()
        paddle.seed(_SEED)
        for _ in range(steps):
            step()
        values = self._values(optimizer)
        kept = losses[:steps], times[1:steps] or times[:1]
        self._set_back(nudged)
        plan = step_of.plan
        peak_bytes = measure(step, repeats=3).peak_bytes
        graph = None if plan is None else plan.graph
        return Training(peak_bytes, float(np.median(kept[1])), tuple(kept[0]), values, plan, graph)

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """The gradients of the first step."""
        self._set_back(nudged)
        paddle.seed(_SEED)
        step = value_and_grad(self._function, list(self._parameters.values()), budget=budget)
        _, gradients = step(*self._args)
        pairs = zip(self._parameters, gradients, strict=True)
        return {f"gradient/{name}": _array(gradient) for name, gradient in pairs if gradient is not None}

    def restore(self) -> None:
        """Give parameters and buffers their first values."""
        self._set_back(nudged=False)

    def _tensors(self) -> list[Any]:
        return [*self._parameters.values(), *self._buffers.values()]

    def _check_loss(self) -> None:
        with paddle.no_grad():
            paddle.seed(_SEED)
            loss = self._function(*self._args)
        if not (isinstance(loss, paddle.Tensor) and loss.size == 1 and loss.is_floating_point()):
            is_tensor = isinstance(loss, paddle.Tensor)
            found = f"{loss.dtype}{list(loss.shape)}" if is_tensor else f"a {type(loss).__name__}"
            name = getattr(self._function, "__name__", type(self._function).__name__)
            raise NotAStep(
                f"the function {name!r} returns {found}, no loss: a "
                "loss is one floating-point number. Return the mean or the sum of it"
            )
        self._set_back(nudged=False, keep_parameters=True)

    def _optimizer(self) -> Any:
        name = self._options.optimizer
        if name is None:
            return None
        found = next((kind for known, kind in vars(paddle.optimizer).items() if known.lower() == name.lower()), None)
        if not isinstance(found, type) or not issubclass(found, paddle.optimizer.Optimizer):
            raise NotAStep(f"--optimizer {name}: paddle.optimizer has none of this name; such as AdamW or SGD")
        make: Any = found
        return make(learning_rate=1e-3, parameters=list(self._parameters.values()))

    def _set_back(self, nudged: bool, *, keep_parameters: bool = False) -> None:
        random = np.random.default_rng(_SEED)
        with paddle.no_grad():
            for number, (tensor, first) in enumerate(zip(self._tensors(), self._first, strict=True)):
                is_parameter = number < len(self._parameters)
                if is_parameter and keep_parameters:
                    continue
                moved = nudged and is_parameter and first.dtype in (np.float32, np.float64)
                tensor.set_value(nudge(first, random) if moved else first)
                if is_parameter:
                    tensor.clear_gradient(False)

    def _values(self, optimizer: Any) -> dict[str, Array]:
        found = {f"weight/{name}": _array(value) for name, value in self._parameters.items()}
        for name, value in self._buffers.items():
            found[f"{'statistic' if value.is_floating_point() else 'state'}/{name}"] = _array(value)
        for name, value in (optimizer.state_dict() if optimizer is not None else {}).items():
            if isinstance(value, paddle.Tensor) and value.size > 1:
                found[f"slot/{name}"] = _array(value)
        return found


def _loss_of_layer(layer: Any, options: StepOptions) -> tuple[Any, ...]:
    if not options.inputs:
        raise NotAStep(
            f"the layer {type(layer).__name__} does not say what it takes; give its input's shape (--input 3,224,224), "
            "or return (loss function, *arguments)"
        )
    name = options.loss or "mse_loss"
    loss = getattr(paddle.nn.functional, name, None)
    if not callable(loss):
        raise NotAStep(f"--loss {name}: paddle.nn.functional has no such loss; such as cross_entropy or mse_loss")
    random = np.random.default_rng(_SEED)
    inputs = [_random((options.samples, *i.shape), i.dtype or "float32", random) for i in options.inputs]
    was_training = layer.training
    layer.eval()  # The shape alone is wanted: no statistic moves.
    with paddle.no_grad():
        shape = layer(*inputs).shape
    if was_training:
        layer.train()
    if name in ("cross_entropy", "nll_loss"):
        target = paddle.to_tensor(random.integers(0, shape[-1], shape[:-1]))
    else:
        target = paddle.zeros(shape)

    def loss_fn(*args: Any) -> Any:
        return loss(layer(*args[:-1]), args[-1])

    return (loss_fn, *inputs, target)


def _random(shape: tuple[int, ...], dtype: str, random: np.random.Generator) -> Any:
    if dtype.startswith(("float", "bfloat")):
        return paddle.to_tensor(random.standard_normal(shape).astype("float32")).astype(dtype)
    return paddle.to_tensor(random.integers(0, 2, shape)).astype(dtype)


def _array(tensor: Any) -> Array:
    detached = tensor.detach()
    return np.array((detached.astype("float32") if detached.dtype == paddle.bfloat16 else detached).numpy())
