"""A Keras model as a training step that ``remat plan``, ``measure`` and ``check`` can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from remat.core.errors import UnsupportedStep
from remat.keras.shared.compiling import compile_if_needed
from remat.running.workload import StepOptions, Workload


def make_workload(made: keras.Model, options: StepOptions, data: Sequence[tuple[Any, Any]] | None = None) -> Workload:
    """The training step of a model, compiled with the loss and the optimizer of ``options`` where it is not.

    Args:
        made: the model.
        options: batch size, shapes of the inputs, loss and optimizer.
        data: batches (inputs, targets) to train on; random ones if None.

    Raises:
        UnsupportedStep: for a backend of Keras that remat does not support.
    """
    compile_if_needed(made, options.loss, options.optimizer)
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from remat.keras.tensorflow.workload import TensorFlowWorkload

        return TensorFlowWorkload(made, options, data)
    if backend == "jax":
        from remat.keras.jax.workload import JaxWorkload

        return JaxWorkload(made, options, data)
    if backend == "torch":
        from remat.keras.torch.workload import TorchWorkload

        return TorchWorkload(made, options, data)
    raise UnsupportedStep(f"the active backend of Keras is {backend!r}; set KERAS_BACKEND=tensorflow, jax or torch")
