"""A Keras model as a training step, on every backend: how it is compiled, what it trains on, what training leaves."""

from __future__ import annotations

import contextlib
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.keras import _private
from remat.keras.limit import graph_of, limit_memory, plan_of
from remat.keras.shared.backend import of_backend
from remat.keras.shared.variables import Variables
from remat.running.workload import Array, InputShape, StepOptions, Training

_FEWEST: Final = 2
"""Words and classes of a model that does not say how many it knows. Every such model knows two."""


class ModelWorkload(ABC):
    """What every backend's ``Workload`` begins with; see ``remat.running.workload.Workload``.

    Args:
        model: compiled.
        options: batch size and shapes of the inputs; on PyTorch also the mode.
        data: batches (inputs, targets) to train on, random ones if None.
    """

    framework = "keras"

    def __init__(self, model: keras.Model, options: StepOptions, data: Sequence[tuple[Any, Any]] | None = None) -> None:
        self._model = model
        self._options = options
        self._mode: Any = options.mode or "auto"
        self._data = data
        self._variables: Variables | None = None

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch."""
        return self._options.samples

    def graph(self, device: str) -> Graph:
        """The step, traced."""
        spec = batch_spec(self._model, self._options.samples, self._options.inputs)
        graph: Graph = of_backend("trace", "trace_model").graph_of_step(self._model, spec, device)
        return graph

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run some steps by ``train_on_batch``."""
        model, own = self._model, self._batches(steps)
        variables = self._reset(own[0], nudged)
        limit_memory(model, budget, mode=self._mode)
        losses, times = [], []
        try:
            for batch in own:
                started = time.perf_counter()
                losses.append(self._run(batch))
                times.append(time.perf_counter() - started)
            values = variables.named(v.value for v in variables.all)
            plan = None if budget is None else plan_of(model)
            graph = None if budget is None else graph_of(model)
            peak_bytes = self._peak_bytes(own[0])
        finally:
            limit_memory(model, None)
        return Training(peak_bytes, float(np.median(times[1:] or times)), tuple(losses), values, plan, graph)

    @abstractmethod
    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """What the optimizer is handed in the first step; empty where the backend does not give it out."""

    def restore(self) -> None:
        """Give the variables their first values."""
        self._set_back(nudged=False)

    @abstractmethod
    def _build_for(self, batch: tuple[Any, Any]) -> None:
        """Make every variable of the model and its optimizer."""

    @abstractmethod
    def _peak_bytes(self, batch: tuple[Any, Any]) -> int:
        """The largest measured peak of a step like those that have just been run."""

    def _run(self, batch: tuple[Any, Any]) -> float:
        """One step; returns its loss."""
        return float(self._model.train_on_batch(*batch, return_dict=True)["loss"])

    def _assign(self, variable: keras.Variable, value: Array) -> None:
        variable.assign(value)

    def _set_back(self, nudged: bool) -> None:
        if self._variables is not None:
            for variable, value in zip(self._variables.all, self._variables.first_values(nudged), strict=True):
                self._assign(variable, value)
        gc.collect()

    def _reset(self, batch: tuple[Any, Any], nudged: bool) -> Variables:
        if self._variables is None:
            self._build_for(batch)
            self._variables = Variables(self._model)
        self._set_back(nudged)
        return self._variables

    def _batches(self, steps: int) -> list[tuple[Any, Any]]:
        """One batch a step: the user's own, over and over, or random ones."""
        if self._data is not None:
            return [self._data[step % len(self._data)] for step in range(steps)]
        spec = batch_spec(self._model, self._options.samples, self._options.inputs)
        return [random_batch(self._model, spec, seed) for seed in range(steps)]


@contextlib.contextmanager
def gradients_shown(model: keras.Model, show: Callable[[str, Any], None]) -> Iterator[None]:
    """Within the block ``show`` gets each variable's path and the gradient that the optimizer is handed for it."""
    optimizer = model.optimizer
    own_apply = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        for gradient, variable in zip(grads, trainable_variables or model.trainable_variables, strict=True):
            if gradient is not None:
                show(variable.path, gradient)
        return own_apply(grads, trainable_variables)

    optimizer.apply = apply
    try:
        yield
    finally:
        del optimizer.apply


def compile_if_needed(model: keras.Model, loss: str | None = None, optimizer: str | None = None) -> None:
    """Compile a model that is not compiled, or that is to have another loss or optimizer.

    Args:
        model: the model.
        loss: name of a Keras loss; None keeps the model's own, else takes cross-entropy after a softmax and mean
            squared error otherwise.
        optimizer: name of a Keras optimizer; None keeps the model's own, else takes Adam.
    """
    if model.compiled and loss is None and optimizer is None:
        return
    on_jax = keras.backend.backend() == "jax"
    model.compile(
        optimizer=optimizer or (model.optimizer if model.compiled else "adam"),
        loss=loss or (model.loss if model.compiled else _default_loss(model)),
        jit_compile=on_jax,
    )


def _default_loss(model: keras.Model) -> Any:
    if len(getattr(model, "outputs", None) or ()) == 1 and _ends_in_softmax(model):
        return "sparse_categorical_crossentropy"
    return "mean_squared_error"


def _ends_in_softmax(model: keras.Model) -> bool:
    last = model.layers[-1]
    return isinstance(last, keras.layers.Softmax) or getattr(last, "activation", None) is keras.activations.softmax


def batch_spec(model: keras.Model, batch_size: int, inputs: Sequence[InputShape] = ()) -> tuple[Any, Any]:
    """The structure of a batch (inputs, targets), as ``keras.KerasTensor``.

    Args:
        model: compiled, so that its loss tells what the targets are.
        batch_size: samples.
        inputs: shapes without the batch; needed for a model that does not say what it takes, or leaves a size open.

    Raises:
        UnsupportedStep: where a size stays unknown, or the number of inputs is another.
    """
    x = _inputs(model, batch_size, inputs)
    outputs = _outputs(model, x, batch_size)
    name = model.loss if isinstance(model.loss, str) else getattr(model.loss, "name", "")
    if isinstance(outputs, keras.KerasTensor) and str(name).startswith("sparse_"):
        outputs = keras.KerasTensor(outputs.shape[:-1], "int64")
    return x, outputs


def random_batch(model: keras.Model, spec: tuple[Any, Any], seed: int) -> tuple[Any, Any]:
    """Arrays of the structure of ``batch_spec``: token ids below the vocabulary, class numbers below the classes."""
    random = np.random.default_rng(seed)
    x_spec, y_spec = spec
    words = min((layer.input_dim for layer in _embeddings(model)), default=_FEWEST)
    x = keras.tree.map_structure(lambda t: _values(random, t, words), x_spec)
    name = str(model.loss if isinstance(model.loss, str) else getattr(model.loss, "name", ""))
    classes = model.outputs[0].shape[-1] if getattr(model, "outputs", None) else _FEWEST

    def target(t: keras.KerasTensor) -> Array:
        if "categorical_crossentropy" in name and not name.startswith("sparse_"):
            return np.asarray(np.eye(t.shape[-1], dtype=t.dtype)[random.integers(0, t.shape[-1], t.shape[:-1])])
        if "crossentropy" in name and not name.startswith("sparse_"):
            return np.asarray(random.integers(0, 2, t.shape), dtype=t.dtype)
        return _values(random, t, classes)

    return x, keras.tree.map_structure(target, y_spec)


def _inputs(model: keras.Model, batch_size: int, given: Sequence[InputShape]) -> Any:
    known = getattr(model, "inputs", None)  # A subclassed model has no such attribute before it is built.
    if not known:
        if not given:
            raise UnsupportedStep(
                f"{model.name!r} does not say what it takes; build it from keras.Input, call it once on data, or give "
                "its input's shape (--input 224,224,3)"
            )
        specs = [keras.KerasTensor((batch_size, *i.shape), i.dtype or keras.config.floatx()) for i in given]
        return specs[0] if len(specs) == 1 else specs
    if given and len(given) != len(known):
        raise UnsupportedStep(f"{model.name!r} takes {len(known)} inputs, and the shapes of {len(given)} were given")
    wanted = iter(given)

    def spec(tensor: keras.KerasTensor) -> keras.KerasTensor:
        override = next(wanted, None)
        shape = (batch_size, *(tensor.shape[1:] if override is None else override.shape))
        if None in shape:
            raise UnsupportedStep(
                f"{tensor.name!r} of {model.name!r} has the shape {tensor.shape}; give every dimension but the first "
                "(--input 224,224,3)"
            )
        return keras.KerasTensor(shape, (override.dtype if override else None) or tensor.dtype, name=tensor.name)

    structure = getattr(model, "_inputs_struct", None)
    x = keras.tree.map_structure(spec, known if structure is None else structure)
    return x[0] if isinstance(x, list) and len(x) == 1 else x


def _outputs(model: keras.Model, x: Any, batch_size: int) -> Any:
    made = model.compute_output_spec(x) if not getattr(model, "outputs", None) or _is_open(model) else model.outputs
    outputs = keras.tree.map_structure(lambda t: keras.KerasTensor((batch_size, *t.shape[1:]), t.dtype), made)
    return outputs[0] if isinstance(outputs, list) and len(outputs) == 1 else outputs


def _is_open(model: keras.Model) -> bool:
    return any(None in tensor.shape[1:] for tensor in model.outputs)


def _values(random: np.random.Generator, spec: keras.KerasTensor, below: int) -> Array:
    if "int" in spec.dtype:
        return np.asarray(random.integers(0, below, spec.shape), dtype=spec.dtype)
    if spec.dtype == "bool":
        return np.ones(spec.shape, dtype=bool)
    return np.asarray(random.normal(size=spec.shape), dtype="float32" if spec.dtype == "bfloat16" else spec.dtype)


def _embeddings(model: keras.Model) -> list[Any]:
    return [layer for layer in _private.all_layers(model) if isinstance(layer, keras.layers.Embedding)]
