"""Keras on TensorFlow: a checkpoint is a tensor of the traced step, named by its layer or by TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.keras.shared.kept_layers import NamedLayers

_SHOWN: Final = 8  # Names in an error: enough to see how they look; more would bury the message.


class KeptLayers(NamedLayers):
    """What named layers return while a training step is traced.

    Args:
        model: the model.
        wanted: names of layers, layers, or names of tensors; a tensor's name may leave out leading scopes and ``:0``.

    Raises:
        ValueError: where the model has no layer of a name.
    """

    def __init__(self, model: Any, wanted: Sequence[Any]) -> None:
        super().__init__(model, wanted)
        self._outputs: dict[int, list[tf.Tensor]] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the layers return inside."""
        self._outputs = {number: [] for number in range(len(self.layers))}
        with self._calls_pass(self._note):
            yield

    def tensors_in(self, graph: Any) -> list[tf.Tensor]:
        """The tensors of a traced step that were named.

        Raises:
            UnsupportedStep: where a layer was not called, or no tensor has a name.
        """
        found = []
        for number in range(len(self.layers)):
            own = [t for t in self._outputs[number] if t.graph is graph]
            if not own:
                raise self._not_called(number)
            found += own
        return found + [_tensor_named(graph, name) for name in self.tensor_names]

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
