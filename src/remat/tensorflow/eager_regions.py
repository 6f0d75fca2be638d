"""``recompute`` in eager mode: each call becomes a small graph, with one region in it.

A call is traced anew, so what the function closes over may change from call to call, and its Python side effects happen
once per call, as in plain eager mode. Give ``recompute`` a ``tf.function`` to trace once instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from remat.tensorflow import _private, structure
from remat.tensorflow.connections import Connections
from remat.tensorflow.keras_losses import collected_losses
from remat.tensorflow.regions import is_differentiable, run_in_graph


def run_eagerly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ``function(*args, **kwargs)``, recorded on the active tapes as one region."""
    leaves, rebuild = structure.flatten((args, kwargs))
    masks = {number: mask for number, t in enumerate(leaves) if (mask := structure.mask_of(t)) is not None}
    rebuilt: list[Callable[..., Any]] = []
    out_masks: list[int] = []

    with collected_losses() as losses:

        def traced(*symbols: tf.Tensor) -> list[tf.Tensor]:
            _private.seed_as_in_eager_mode(tf.compat.v1.get_default_graph())
            inputs = list(symbols[: len(leaves)])
            for number, mask in zip(masks, symbols[len(leaves) :], strict=True):
                structure.set_mask(inputs[number], mask)
            symbolic_args, symbolic_kwargs = rebuild(inputs)

            def call() -> tuple[Any, list[tf.Tensor]]:
                result = _private.converted_by_autograph(function, always=True)(*symbolic_args, **symbolic_kwargs)
                return result, losses.tensors()

            result, symbolic_losses = run_in_graph(call)
            outputs, rebuild_result = structure.flatten(result)
            rebuilt.append(rebuild_result)
            found = [structure.mask_of(t) for t in outputs]
            out_masks.extend(number for number, mask in enumerate(found) if mask is not None)
            return [*outputs, *(mask for mask in found if mask is not None), *symbolic_losses]

        arguments = [*leaves, *masks.values()]
        concrete = tf.function(traced, autograph=False).get_concrete_function(*arguments)
        flat = Connections(concrete, [is_differentiable(t) for t in concrete.graph.outputs]).call(arguments)
        count = len(flat) - len(out_masks) - losses.count
        outputs = flat[:count]
        for number, mask in zip(out_masks, flat[count : count + len(out_masks)], strict=True):
            structure.set_mask(outputs[number], mask)
        losses.replace(flat[count + len(out_masks) :])
    return rebuilt[0](outputs)
