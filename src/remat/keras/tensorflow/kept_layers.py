"""Finds the tensors that a user names as checkpoints: by layer, or by the name that TensorFlow gave them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.keras.recompute import find_layers
from remat.keras.shared.layer_calls import calls_pass, is_tensor_name, not_called

_SHOWN = 8


class LayerOutputs:
    """What named layers return while a training step is traced.

    Args:
        model: the model.
        wanted: names of layers, layers, or names of tensors; a tensor's name may leave out leading scopes and ``:0``.

    Raises:
        ValueError: where the model has no layer of a name.
    """

    def __init__(self, model: Any, wanted: Sequence[Any]) -> None:
        self._tensor_names = [name for name in wanted if is_tensor_name(name)]
        self._layers = find_layers(model, [name for name in wanted if not is_tensor_name(name)])
        self._outputs: dict[int, list[tf.Tensor]] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the layers return inside."""
        self._outputs = {number: [] for number in range(len(self._layers))}
        with calls_pass(self._layers, self._note):
            yield

    def tensors_in(self, graph: Any) -> list[tf.Tensor]:
        """The tensors of a traced step that were named.

        Raises:
            UnsupportedStep: where a layer was not called, or no tensor has a name.
        """
        found = []
        for number, layer in enumerate(self._layers):
            own = [t for t in self._outputs[number] if t.graph is graph]
            if not own:
                raise not_called(layer)
            found += own
        for name in self._tensor_names:
            found.append(_tensor_named(graph, name))
        return found

    def _note(self, number: int, result: Any) -> Any:
        leaves = tf.nest.flatten(result)
        self._outputs[number] += [t for t in leaves if isinstance(t, tf.Tensor) and tf.is_symbolic_tensor(t)]
        return result


def _tensor_named(graph: Any, name: str) -> tf.Tensor:
    full = name if ":" in name else f"{name}:0"
    names = [t.name for op in graph.get_operations() for t in op.outputs]
    matching = [n for n in names if n == full or n.endswith(f"/{full}")]
    # Gradients carry the names of what they are gradients of.
    matching = [n for n in matching if "gradient" not in n.partition("/")[0]] or matching
    if len(matching) == 1:
        return graph.get_tensor_by_name(matching[0])
    last = full.partition(":")[0].rpartition("/")[2]
    alike = matching or [n for n in names if last in n]
    raise UnsupportedStep(
        f"the checkpoint {name!r} names {len(matching)} tensors of the training step; it has "
        f"{', '.join(alike[:_SHOWN] or names[:_SHOWN])}, ..."
    )
