"""Keras as a front end: the losses of the common checks become models, which ``limit_memory`` makes keep a budget.

One process holds one backend of Keras, so the checks run in a worker for each: ``keras_worker.py``.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import keras
from front_ends import PLANNING, FrontEnd, Loss, Step, Values

import remat.keras

ACCURACY = {"tensorflow": 0.2, "jax": 0.0, "torch": 0.05}  # As of the backend's own front end.
LEARNING_RATE = 2.0**14  # Large, so that the weights' own digits do not hide the gradient's.


class Keras(FrontEnd):
    name = "keras"

    def __init__(self) -> None:
        self.backend = keras.backend.backend()
        self.accuracy = ACCURACY[self.backend]
        if self.backend == "tensorflow":
            # A step of a dozen blocks of one size: below, TensorFlow's allocator may round one block more than is left.
            self.kept_share = "75%"
        self.seeds: list[Any] = []

    def array(self, value: Any) -> Any:
        return keras.ops.convert_to_tensor(value)

    def numpy(self, value: Any) -> Any:
        return keras.ops.convert_to_numpy(value)

    def tanh(self, x: Any) -> Any:
        return keras.ops.tanh(x)

    def mean(self, x: Any) -> Any:
        return keras.ops.mean(x)

    def sum(self, x: Any, axis: int | None = None) -> Any:
        return keras.ops.sum(x, axis)

    def dropout(self, seed: int) -> tuple[Callable[[Any, Any], Any], tuple[Any, ...]]:
        generator = keras.random.SeedGenerator(seed)
        self.seeds = [generator]
        return lambda x, _=None: keras.random.dropout(x, 0.2, seed=generator), ()

    def step(self, loss: Loss, *, budget: int | str | None = None, plan: Any = None, **planning: Any) -> Step:
        assert plan is None, "limit_memory follows no saved plans"
        return _KerasStep(self, loss, "added", 1, budget, planning)

    def micro_batched(
        self, values: Values, count: int, reduction: str, *, budget: int | str | None = None, **planning: Any
    ) -> Step:
        return _KerasStep(self, values, reduction, count, budget, planning)

    def whole(self, values: Values, reduction: str) -> Step:
        return _KerasStep(self, values, reduction, 1, None, {})

    def traced(self, loss: Loss, params: Sequence[Any], *batch: Any) -> Any:
        step = self.step(loss, budget="100%")
        step(params, *batch)
        return remat.keras.graph_of(step.model)

    def peak_bytes(self, step: Step, params: Sequence[Any], *batch: Any) -> int:
        assert isinstance(step, _KerasStep)
        step(params, *batch)
        gc.collect()  # A plain model of the same check holds constants until it is collected.
        return _PEAK_BYTES[self.backend](step.model, step.data_of(batch))


class _Model(keras.Model):
    """A chain's weights, and what the check computes from them and a batch."""

    def __init__(self, function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], seeds: Sequence[Any]) -> None:
        super().__init__(name="chain")
        self.function = function
        self.seeds = list(seeds)
        self.kernels = [self.add_weight(shape=shape, name=f"w{n}") for n, shape in enumerate(shapes)]
        self.adds_loss = False

    def build(self, *_: Any) -> None:
        self.built = True

    def call(self, x: Any) -> Any:
        result = self.function([keras.ops.convert_to_tensor(kernel) for kernel in self.kernels], x)
        if self.adds_loss:
            self.add_loss(result)
        return result


class _ValuesAsTheyAre(keras.losses.Loss):
    """What the model returns is the loss of each sample."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred


class _KerasStep(Step):
    """One update by plain gradient descent, from which the gradients can be read."""

    def __init__(
        self,
        front_end: Keras,
        function: Callable[..., Any],
        reduction: str,
        count: int,
        budget: int | str | None,
        planning: dict[str, Any],
    ) -> None:
        self._made = functools.partial(_Model, function)
        self._seeds = front_end.seeds
        self._reduction = reduction
        self._count = count
        self._budget = budget
        self._planning = {**PLANNING, **planning}
        self.model: Any = None

    def __call__(self, params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
        before = [keras.ops.convert_to_numpy(value) for value in params]
        if self.model is None:
            self.model = self._compiled([value.shape for value in before])
        self.model.set_weights([*before, *self.model.get_weights()[len(before) :]])
        self.model.reset_metrics()
        x, y, sample_weight = self.data_of(batch)
        logs = self.model.train_on_batch(x, y, sample_weight=sample_weight, return_dict=True)
        after = [keras.ops.convert_to_numpy(kernel) for kernel in self.model.kernels]
        gradients = [(old - new) / LEARNING_RATE for old, new in zip(before, after, strict=True)]
        return logs["loss"], gradients

    @property
    def plan(self) -> Any:
        return None if self.model is None or self._budget is None else remat.keras.plan_of(self.model)

    def data_of(self, batch: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Inputs, targets and weights, as Keras takes them."""
        x, *mask = batch
        targets = None if self._reduction == "added" else keras.ops.zeros(x.shape[:1])
        return x, targets, mask[0] if mask else None

    def _compiled(self, shapes: Sequence[tuple[int, ...]]) -> Any:
        model = self._made(shapes, self._seeds)
        model.adds_loss = self._reduction == "added"
        kinds = {"mean": "sum_over_batch_size", "sum": "sum", "ratio": "mean_with_sample_weight"}
        loss = None if model.adds_loss else _ValuesAsTheyAre(reduction=kinds[self._reduction])
        # Without it Keras on JAX divides a missing loss's log by no samples.
        model.compile(keras.optimizers.SGD(LEARNING_RATE), loss)
        if self._budget is not None or self._count > 1:
            # Graph mode, which takes seconds to capture each model, has tests of its own.
            mode = "eager" if keras.backend.backend() == "torch" else "auto"
            remat.keras.limit_memory(model, self._budget, micro_batches=self._count, mode=mode, **self._planning)
        return model


def _peak_in_tensorflow(model: Any, data: tuple[Any, Any, Any]) -> int:
    from remat.tensorflow import measure

    return int(measure(lambda: _train(model, data), repeats=1).peak_bytes)


def _peak_in_torch(model: Any, data: tuple[Any, Any, Any]) -> int:
    from remat.torch import measure

    return int(measure(lambda: _train(model, data), repeats=1).peak_bytes)


def _peak_in_jax(model: Any, data: tuple[Any, Any, Any]) -> int:
    import jax

    from remat.jax.peak import peak_of
    from remat.keras.limit import _limit_on

    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([variable.value for variable in group] for group in groups)
    limit: Any = _limit_on(model)
    step: Any = jax.jit(model.train_step, donate_argnums=0) if limit is None else limit._step_for(state, data)
    if not hasattr(step, "lower"):
        step = step._for((state, data))
    return int(peak_of(step.lower(state, data).compile().memory_analysis()))


def _train(model: Any, data: tuple[Any, Any, Any]) -> None:
    x, y, sample_weight = data
    model.train_on_batch(x, y, sample_weight=sample_weight)


_PEAK_BYTES = {"tensorflow": _peak_in_tensorflow, "jax": _peak_in_jax, "torch": _peak_in_torch}
