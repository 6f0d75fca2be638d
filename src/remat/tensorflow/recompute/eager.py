"""``recompute`` in eager mode: each call becomes a small graph, with one region in it.

A call runs its Python as in plain eager mode, so what the function closes over may change from call to call and its
side effects happen once per call. The graph that comes of it is then compared with those of earlier calls: where it is
the same, so are its forward and backward functions, and those that TensorFlow has built and optimized are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from remat.tensorflow import _private
from remat.tensorflow.recompute import structure
from remat.tensorflow.recompute.connections import Connections
from remat.tensorflow.recompute.in_graph import run_in_graph
from remat.tensorflow.recompute.keras_losses import collected_losses
from remat.tensorflow.recompute.region import is_differentiable
from remat.tensorflow.recompute.traced_calls import TracedCalls


class EagerCalls:
    """The eager calls of one function.

    Args:
        function: the user's.
        segmented: recompute it in pieces.
    """

    def __init__(self, function: Callable[..., Any], segmented: bool) -> None:
        self._function = function
        self._segmented = segmented
        self._known = TracedCalls()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
                    converted = _private.converted_by_autograph(self._function, always=True)
                    return converted(*symbolic_args, **symbolic_kwargs), losses.tensors()

                result, symbolic_losses = run_in_graph(call, self._segmented)
                outputs, rebuild_result = structure.flatten(result)
                rebuilt.append(rebuild_result)
                found = [structure.mask_of(t) for t in outputs]
                out_masks.extend(number for number, mask in enumerate(found) if mask is not None)
                return [*outputs, *(mask for mask in found if mask is not None), *symbolic_losses]

            flat = self._call(traced, [*leaves, *masks.values()])
            count = len(flat) - len(out_masks) - losses.count
            outputs = flat[:count]
            for number, mask in zip(out_masks, flat[count : count + len(out_masks)], strict=True):
                structure.set_mask(outputs[number], mask)
            losses.replace(flat[count + len(out_masks) :])
        return rebuilt[0](outputs)

    def _call(self, traced: Callable[..., list[tf.Tensor]], arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        concrete = tf.function(traced, autograph=False).get_concrete_function(*arguments)
        concrete = self._known.same_as(concrete)
        return Connections(concrete, [is_differentiable(t) for t in concrete.graph.outputs]).call(arguments)
