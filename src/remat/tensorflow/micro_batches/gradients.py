"""Sums gradients over micro-batches: dense ones in accumulators, the rows of sparse ones one after the other.

The gradient of an embedding is sparse: rows, and the numbers of the variable's rows that they belong to. Optimizers of
Keras work on each row by itself, so that a word that occurs twice is two rows. A sum over the micro-batches would be
another update. The rows of the whole batch are those of its micro-batches, one after the other, so they are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.tensorflow.micro_batches.loop import accumulator_dtype, added, empty_accumulators

_PASS_ON: Final = frozenset({"Identity", "Reshape", "Squeeze", "Cast", "ExpandDims"})
"""Operations between the indices that a lookup was given and those of its gradient, as TensorFlow 2.21 writes them.

Where another stands between them, two losses that go through the same lookup count as two lookups, and a word of theirs
as two words.
"""

_LOOKUPS: Final = frozenset({"Gather", "GatherNd", "GatherV2", "ResourceGather", "ResourceGatherNd"})
"""Operations of TensorFlow whose gradient is sparse."""


def may_be_sparse(graph: tf.Graph) -> bool:
    """Can a function have a sparse gradient? Only then is it worth tracing its gradients twice."""
    return any(op.type in _LOOKUPS for op in graph.get_operations())


@dataclass(frozen=True)
class _Slot:
    """One tensor of the sums.

    Attributes:
        variable: number of the variable.
        loss: number of the loss whose gradient it is; None for the indices of a lookup, which all losses share.
        lookup: number of the lookup, None for a dense accumulator.
        rows: how many rows the lookup has where that does not depend on the samples, else None.
    """

    variable: int
    loss: int | None
    lookup: int | None = None
    rows: int | None = None

    @property
    def is_carried(self) -> bool:
        """Is it handed from one micro-batch to the next? Otherwise each micro-batch has rows of its own."""
        return self.lookup is None or self.rows is not None


class GradientSums:
    """The gradients of a batch by several losses, summed up over its micro-batches.

    ``carried`` and ``rows`` are what :func:`remat.tensorflow.micro_batches.loop.for_each_micro_batch` hands on and
    joins.

    Args:
        variables: what is differentiated by.
        gradients: by each loss (outer) and variable (inner) what ``tape.gradient`` of a trace aside returned; None
            where nothing was sparse there.
        losses: how many losses there are.
        samples: the tensors of that trace that hold the batch.

    Attributes:
        joined: what each micro-batch adds rows to, as specs.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        losses: int,
        gradients: Sequence[Sequence[Any]] | None = None,
        samples: Sequence[tf.Tensor] = (),
    ) -> None:
        self._variables = list(variables)
        self._losses = losses
        self._has_gradient = [[False] * len(self._variables) for _ in range(losses)]
        # By variable, loss and place in that loss's gradient: the number of the lookup.
        self._lookups: dict[tuple[int, int, int], int] = {}
        slots: list[_Slot] = []
        for variable in range(len(self._variables)):
            by_loss = [one[variable] for one in gradients] if gradients is not None else [None] * losses
            slots += self._slots_of(variable, by_loss, samples)
        self._carried = [slot for slot in slots if slot.is_carried]
        self._joined = [slot for slot in slots if not slot.is_carried]
        self.joined = [self._spec(slot) for slot in self._joined]

    def initial(self) -> list[tf.Tensor]:
        """What the first micro-batch is handed: zeros.

        Raises:
            UnsupportedStep: for a variable of an unknown shape.
        """
        zeros = empty_accumulators(self._variables)
        return [zeros[slot.variable] if slot.lookup is None else _zeros(self._spec(slot)) for slot in self._carried]

    def add(
        self, carried: Sequence[tf.Tensor], gradients: Sequence[Sequence[Any]]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The sums with one micro-batch more, and the rows that it adds.

        Args:
            carried: the sums before it.
            gradients: by loss and variable.

        Raises:
            UnsupportedStep: where a gradient is sparse for the whole batch and is not for this micro-batch.
        """
        found: dict[tuple[int, int | None, int], tf.Tensor] = {}
        for loss, by_variable in enumerate(gradients):
            for variable, gradient in enumerate(by_variable):
                self._has_gradient[loss][variable] |= gradient is not None
                if (variable, loss, 0) in self._lookups:
                    for place, (values, indices) in enumerate(self._parts(variable, loss, gradient)):
                        lookup = self._lookups[variable, loss, place]
                        found[variable, loss, lookup] = values
                        found.setdefault((variable, None, lookup), tf.cast(indices, tf.int32))
        sums = []
        for slot, total in zip(self._carried, carried, strict=True):
            if slot.lookup is None:
                assert slot.loss is not None
                sums.append(added(total, gradients[slot.loss][slot.variable]))
            elif slot.loss is None:
                sums.append(tf.ensure_shape(found[slot.variable, None, slot.lookup], total.shape))
            else:
                sums.append(total + tf.cast(found[slot.variable, slot.loss, slot.lookup], total.dtype))
        rows = [
            tf.cast(found[slot.variable, slot.loss, slot.lookup], spec.dtype)
            for slot, spec in zip(self._joined, self.joined, strict=True)
            if slot.lookup is not None
        ]
        return sums, rows

    def totals(
        self, carried: Sequence[tf.Tensor], rows: Sequence[tf.Tensor], factors: Sequence[tf.Tensor | None]
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """One gradient per variable: the losses' gradients times their factors, added up; None where there is none.

        Args:
            carried: the sums after the last micro-batch.
            rows: those of all micro-batches, joined.
            factors: one per loss, None for 1.
        """
        scaled: dict[tuple[int, int | None, int | None], tf.Tensor] = {}
        for slot, value in [*zip(self._carried, carried, strict=True), *zip(self._joined, rows, strict=True)]:
            factor = None if slot.loss is None else factors[slot.loss]
            scaled[slot.variable, slot.loss, slot.lookup] = (
                value if factor is None else value * tf.cast(factor, value.dtype)
            )
        return [self._total(number, variable, scaled) for number, variable in enumerate(self._variables)]

    def _total(
        self, number: int, variable: Any, scaled: dict[tuple[int, int | None, int | None], tf.Tensor]
    ) -> tf.Tensor | tf.IndexedSlices | None:
        lookups = sorted({lookup for (v, _, _), lookup in self._lookups.items() if v == number})
        if not lookups:
            parts = [scaled[number, loss, None] for loss in range(self._losses) if self._has_gradient[loss][number]]
            return tf.cast(tf.add_n(parts), variable.dtype) if parts else None
        values = [
            tf.add_n([scaled[key] for loss in range(self._losses) if (key := (number, loss, lookup)) in scaled])
            for lookup in lookups
        ]
        indices = [scaled[number, None, lookup] for lookup in lookups]
        return tf.IndexedSlices(
            tf.cast(values[0] if len(values) == 1 else tf.concat(values, 0), variable.dtype),
            indices[0] if len(indices) == 1 else tf.concat(indices, 0),
            tf.constant(tuple(variable.shape), tf.int32),
        )

    def _slots_of(self, variable: int, by_loss: Sequence[Any], samples: Sequence[tf.Tensor]) -> list[_Slot]:
        """What the gradients of one variable are summed in."""
        dense = [_Slot(variable, loss) for loss in range(self._losses)]
        present = [gradient for gradient in by_loss if gradient is not None]
        if not present or not all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
            return dense
        numbers: dict[tuple[str, int], int] = {}
        places: dict[tuple[int, int, int], int] = {}
        slots: list[_Slot] = []
        for loss, gradient in enumerate(by_loss):
            occurrences: dict[str, int] = {}
            for place, (values, indices) in enumerate(_parts_of(gradient)):
                source = _source(indices)
                key = (source.name, occurrences.setdefault(source.name, 0))
                occurrences[source.name] += 1
                rows = None
                if not _depends_on(source, samples):
                    rows = values.shape[0]
                    if rows is None:
                        return dense  # How many rows to add up is not known before the loop.
                is_new = key not in numbers
                lookup = places[variable, loss, place] = numbers.setdefault(key, len(numbers))
                slots += [_Slot(variable, None, lookup, rows)] * is_new + [_Slot(variable, loss, lookup, rows)]
        self._lookups |= places
        return slots

    def _spec(self, slot: _Slot) -> tf.TensorSpec:
        """Of a lookup's rows, or of the numbers of the variable's rows that they belong to."""
        variable = self._variables[slot.variable]
        if slot.loss is None:
            return tf.TensorSpec([slot.rows], tf.int32)
        return tf.TensorSpec([slot.rows, *variable.shape[1:]], accumulator_dtype(variable.dtype))

    def _parts(self, variable: int, loss: int, gradient: Any) -> list[tuple[tf.Tensor, tf.Tensor]]:
        parts = _parts_of(gradient) if isinstance(gradient, tf.IndexedSlices) else []
        expected = sum(1 for v, one, _ in self._lookups if (v, one) == (variable, loss))
        if len(parts) != expected:
            raise UnsupportedStep(
                f"the gradient of {self._variables[variable].name!r} has the rows of {expected} lookups for a whole "
                f"batch and those of {len(parts)} for a part of it; let the model take the same way for every batch, "
                "or leave micro_batches at 1"
            )
        return parts


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros(spec.shape, spec.dtype)


def _parts_of(gradient: tf.IndexedSlices | None) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Values and indices of each lookup in a sparse gradient; TensorFlow joins those of several lookups by Concat."""
    if gradient is None:
        return []
    values, indices = _concatenated(gradient.values), _concatenated(gradient.indices)
    if len(values) != len(indices):
        return [(gradient.values, gradient.indices)]
    return list(zip(values, indices, strict=True))


def _concatenated(tensor: tf.Tensor) -> list[tf.Tensor]:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    if tensor.op.type != "ConcatV2":
        return [tensor]
    return [part for one in tensor.op.inputs[:-1] for part in _concatenated(one)]


def _source(indices: tf.Tensor) -> tf.Tensor:
    """The indices that a lookup was given, from those of its gradient."""
    while indices.op.type in _PASS_ON:
        indices = indices.op.inputs[0]
    return indices


def _depends_on(tensor: tf.Tensor, samples: Iterable[tf.Tensor]) -> bool:
    """May what a tensor holds be another one for other samples? How long a sample is does not count."""
    names = {sample.name for sample in samples}
    waiting, seen = [tensor], set()
    while waiting:
        one = waiting.pop()
        if one.name in names or one.op.op_def.is_stateful:
            return True
        if one.op.name not in seen and not _is_length_of_a_sample(one.op):
            seen.add(one.op.name)
            waiting += one.op.inputs
    return False


def _is_length_of_a_sample(op: tf.Operation) -> bool:
    """Does an operation read a dimension behind the first one of a shape?"""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape" or op.get_attr("begin_mask"):
        return False
    begin = tf.get_static_value(op.inputs[1])
    return begin is not None and int(begin[0]) > 0
