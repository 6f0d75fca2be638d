"""Every private Keras symbol that remat needs, in one place; those that Dynamo needs: ``torch/_for_dynamo.py``.

Keras has no public way to learn what a loss divided by, or whether a layer's call is part of another layer's.
``tests/keras/test_keras_private.py`` fails with a clear message when a release moves one of these.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.losses import loss as _loss
from keras.src.ops.function import Function
from keras.src.ops.symbolic_arguments import SymbolicArguments
from keras.src.trainers.compile_utils import CompileLoss

__all__ = [
    "MASK",
    "OPTIONS_OF_LOSS",
    "RAW_VALUE",
    "CompileLoss",
    "Reduction",
    "additional_loss",
    "all_layers",
    "call_in_training",
    "calls_inside",
    "clear_losses",
    "compile_loss_of",
    "constants_of",
    "constants_replaced",
    "give_state_back",
    "is_trained_itself",
    "jit_options_of_distribution",
    "losses_of",
    "losses_replaced",
    "of_one_replica",
    "outputs_released",
    "reductions_recorded",
    "stateless_call_in_training",
    "sums_activity_losses",
    "unbuilt_parts",
    "update_loss_tracker",
    "updated_alike",
    "whole_tracebacks",
]


MASK = "_keras_mask"
"""The attribute of a tensor in which layers hand masks on to layers, losses and metrics."""

OPTIONS_OF_LOSS = "_fn_kwargs"
"""Where a loss of Keras' own holds what its function is called with, such as Huber's ``delta``."""

RAW_VALUE = "_value"
"""Where a variable holds its tensor, whatever its layer's policy makes of it for a computation."""


@dataclass(frozen=True)
class Reduction:
    """One reduction of a loss's values to one number.

    Attributes:
        kind: Keras' name of the reduction, or None.
        values: the loss per sample (and time step), before weights.
        sample_weight: the weights, or None.
        mask: which values count, or None.
    """

    kind: str | None
    values: Any
    sample_weight: Any
    mask: Any

    def weights(self) -> Any:
        """Weights and mask in one, as Keras multiplies the values by them."""
        dtype = self.values.dtype
        # A copy: on PyTorch Keras multiplies it in place.
        weight = None if self.sample_weight is None else keras.ops.copy(keras.ops.cast(self.sample_weight, dtype))
        mask = None if self.mask is None else keras.ops.cast(self.mask, dtype)
        return _loss.apply_mask(weight, mask, dtype=dtype, reduction=self.kind)


def sums_activity_losses() -> bool:
    """Is the loss of an activity regulariser a sum over the batch, as in Keras 3.12 and 3.13, and not a mean?"""
    major, minor = keras.__version__.split(".")[:2]
    return (int(major), int(minor)) < (3, 14)


def is_trained_itself(layer: Any) -> bool:
    """Is ``layer``, whose ``call`` runs now, a compiled model that is no part of another call?"""
    return bool(getattr(layer, "compiled", False)) and layer._get_call_context().entry_layer is layer


@contextlib.contextmanager
def reductions_recorded() -> Iterator[list[Reduction]]:
    """The reductions that Keras' losses do inside the block."""
    own = _loss.reduce_weighted_values
    found: list[Reduction] = []

    def recording(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        values = keras.ops.convert_to_tensor(values, dtype=dtype)
        found.append(Reduction(reduction, values, sample_weight, mask))
        return own(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)

    _loss.reduce_weighted_values = recording
    try:
        yield found
    finally:
        _loss.reduce_weighted_values = own


def compile_loss_of(model: keras.Model) -> CompileLoss | None:
    """What ``compile(loss=...)`` became, or None."""
    return model._compile_loss


@contextlib.contextmanager
def losses_replaced(compile_loss: CompileLoss, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """``compile_loss`` with each of its losses replaced by ``wrap(loss)``, its own metrics left alone."""
    losses, metrics = compile_loss._flat_losses, compile_loss._metrics
    compile_loss._flat_losses = [entry._replace(loss=wrap(entry)) for entry in losses]
    # Keras pairs losses with metrics and stops at the shorter list.
    compile_loss._metrics = [None] * len(losses)
    try:
        yield
    finally:
        compile_loss._flat_losses, compile_loss._metrics = losses, metrics


def additional_loss(model: keras.Model, losses: Sequence[Any] | None = None) -> Any:
    """The sum of what ``add_loss`` and the regularisers contribute, None where they contribute nothing."""
    losses = [model._aggregate_additional_loss(loss) for loss in (model.losses if losses is None else losses)]
    return keras.ops.sum(keras.ops.stack(losses)) if losses else None


class _OutputsInUse:
    """Of one call of a functional model: by the address of a symbolic tensor, how many operations will still read it.

    Args:
        function: the model.
    """

    def __init__(self, function: Any) -> None:
        reads = (node.arguments for nodes in function._nodes_by_depth.values() for node in nodes if not node.is_input)
        self._readers = Counter(address for arguments in reads for address in _addresses(arguments))
        self._readers.update(id(output) for output in function.outputs)

    def read_by(self, arguments: Any, values: dict[int, Any]) -> None:
        """An operation has its arguments: take those out of the values that no other will read."""
        for address in _addresses(arguments):
            self._readers[address] -= 1
            if not self._readers[address]:
                values.pop(address, None)


def _addresses(arguments: Any) -> set[int]:
    return {id(tensor) for tensor in arguments.keras_tensors}


@contextlib.contextmanager
def _trees_let_go() -> Iterator[None]:
    """Inside, what PyTorch flattens for Keras does not stay until Python looks for circles.

    ``tree_flatten`` defines a function that refers to itself and to ``is_leaf``, in which Keras refers to the tensors.
    """
    from torch.utils import _pytree

    own = _pytree.tree_flatten

    def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
        if is_leaf is None:
            return own(tree)
        asked = [is_leaf]
        try:
            return own(tree, is_leaf=lambda node: asked[0](node))
        finally:
            asked.clear()

    _pytree.tree_flatten = flatten
    try:
        yield
    finally:
        _pytree.tree_flatten = own


@contextlib.contextmanager
def outputs_released() -> Iterator[None]:
    """Inside, on PyTorch, what a layer returned is let go of as soon as the last layer that reads it has it.

    Keras holds the outputs of all layers until the call of a functional model ends, whatever autograd needs of them.
    """
    calls: list[_OutputsInUse] = []
    run, fill_in = Function._run_through_graph, SymbolicArguments.fill_in

    def running(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(_OutputsInUse(self))
        try:
            return run(self, *args, **kwargs)
        finally:
            calls.pop()

    def filling_in(self: Any, tensor_dict: dict[int, Any]) -> Any:
        filled = fill_in(self, tensor_dict)
        if calls:
            calls[-1].read_by(self, tensor_dict)
        return filled

    Function._run_through_graph, SymbolicArguments.fill_in = running, filling_in
    try:
        with _trees_let_go():
            yield
    finally:
        Function._run_through_graph, SymbolicArguments.fill_in = run, fill_in


def constants_of(part: Any, kind: type) -> Iterator[Any]:
    """The tensors of one type that a functional model was built with, as in ``inputs * keras.ops.sqrt(2.0)``."""
    function = getattr(part, "_functional", part)  # A Sequential has one of its own.
    if isinstance(function, Function):
        for nodes in function._nodes_by_depth.values():
            for node in nodes:
                yield from (one for one in node.arguments._flat_arguments if isinstance(one, kind))


@contextlib.contextmanager
def constants_replaced(instead: Mapping[int, Any]) -> Iterator[None]:
    """Inside, a functional model finds other tensors in place of those it was built with.

    Args:
        instead: of the address of a tensor, the other one.
    """
    own = SymbolicArguments.fill_in

    def filling_in(self: Any, tensor_dict: dict[int, Any]) -> Any:
        filled = own(self, tensor_dict)
        if not any(id(one) in instead for one in self._flat_arguments):
            return filled
        return keras.tree.map_structure(lambda leaf: instead.get(id(leaf), leaf), filled)

    SymbolicArguments.fill_in = filling_in
    try:
        yield
    finally:
        SymbolicArguments.fill_in = own


def call_in_training(model: keras.Model, x: Any) -> Any:
    """``model(x)`` as Keras' own training step calls it."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def clear_losses(model: keras.Model) -> None:
    """Forget the losses that layers added in the last step, as the next call of the model would."""
    model._clear_losses()


@contextlib.contextmanager
def calls_inside(context: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, each layer is called in a context of its own, which is made of the layer."""
    own = keras.layers.Layer.__call__

    def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with context(layer):
            return own(layer, *args, **kwargs)

    keras.layers.Layer.__call__ = called
    try:
        yield
    finally:
        keras.layers.Layer.__call__ = own


@contextlib.contextmanager
def whole_tracebacks() -> Iterator[None]:
    """Inside, an error in a layer says where it came about, and not only which layer was called with what."""
    filters = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if filters:
            keras.config.enable_traceback_filtering()


def losses_of(model: keras.Model) -> list[Any]:
    """What ``compile(loss=...)`` was given, as Keras calls it: objects, or functions."""
    compile_loss = model._compile_loss
    if compile_loss is None:
        return []
    return [compile_loss, *(entry.loss for entry in compile_loss._flat_losses or ())]


def stateless_call_in_training(model: keras.Model, trainable: Any, others: Any, x: Any) -> tuple[Any, Any, list[Any]]:
    """The same on JAX, for given values of the variables; returns the others' new values and the added losses, too."""
    options = {"training": True} if model._call_has_training_arg else {}
    y_pred, others, losses = model.stateless_call(trainable, others, x, return_losses=True, **options)
    return y_pred, others, losses


def give_state_back(model: keras.Model, state: Sequence[Sequence[Any]]) -> None:
    """Put the values of a step that failed on JAX back into the variables, unless the step has consumed them."""
    if any(value.is_deleted() for part in state for value in part):
        return
    names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    model._jax_state = dict(zip(names, state, strict=True))
    model._jax_state_synced = False
    model.jax_state_sync()


def jit_options_of_distribution(model: keras.Model) -> dict[str, Any]:
    """What Keras on JAX gives to ``jax.jit`` for a training step under ``keras.distribution``."""
    if keras.distribution.distribution() is None:
        return {}
    return {"out_shardings": (None, model._get_state_sharding_spec())}


def update_loss_tracker(model: keras.Model, loss: Any, batch_size: Any) -> None:
    """Count one batch's loss in what ``fit`` reports as "loss"."""
    model._loss_tracker.update_state(of_one_replica(loss), sample_weight=batch_size)


def of_one_replica(loss: Any) -> Any:
    """A loss before Keras divided it by the number of replicas, whose gradients are summed."""
    return _loss.unscale_loss_for_distribution(loss)


def all_layers(model: keras.Model) -> Sequence[Any]:
    """The layers of a model and of the models inside it."""
    return list(model._flatten_layers(include_self=False))


def unbuilt_parts(model: keras.Model) -> bool:
    """Are the model's variables, losses or metrics still to be made?"""
    parts = (model._compile_loss, model._compile_metrics) if model.compiled else ()
    return not model.built or any(part is not None and not part.built for part in parts)


def updated_alike(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The variables of a built optimizer of which ``apply`` does to one alone what it does to it among all.

    Their numbers are computed in the type of the first of them. Where all variables lose weight, one that does not
    fails alone. A constraint may need any memory.
    """
    found: list[Any] = [one for one in optimizer._trainable_variables if one.constraint is None]
    if optimizer.weight_decay is not None:
        found = [one for one in found if optimizer._use_weight_decay(one)]
    first = optimizer._trainable_variables[0].dtype
    return [one for one in found if one.dtype == first and not getattr(one, "overwrite_with_gradient", False)]
