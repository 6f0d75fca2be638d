"""Calls of functions within a step: what they need in memory beside what they read and return, and their seconds.

In the graph a call is one op. A function that asks for XLA (``jit_compile=True``) becomes a program with one block of
scratch memory. That can be more than all that the function reads and writes: Keras computes convolutions in groups in
such a function, and their gradients hold a dense filter of all channels twice (220 MiB for 768 of 7 x 7). The program
of the inner function alone tells how much, on every device. The operations of other functions run as those of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

import tensorflow as tf

from remat.core.graph import Graph
from remat.core.simulator import simulate
from remat.tensorflow import _private
from remat.tensorflow.peak.compiled_memory import program_memory
from remat.tensorflow.trace.sizes import HANDLES, Sizes

_log = logging.getLogger("remat")

CALLS: Final = frozenset({"PartitionedCall", "StatefulPartitionedCall"})

_blocks_of: dict[bytes, int] = {}
"""Bytes of scratch memory of programs that have been compiled, by what the function computes, and of which shapes: the
layers of a model have functions of their own that are alike, and compiling one takes a quarter of a second."""


class Call:
    """One call of a function.

    Args:
        op: the call.
        outside: sizes of the tensors of the function that the call stands in.

    Attributes:
        body: the function that is called.
        sizes: sizes of its tensors.
        in_xla: does XLA compile it by itself?
    """

    def __init__(self, op: tf.Operation, outside: Sizes) -> None:
        self.op = op
        self.body = _private.function_of(op, "f")
        self.in_xla = _private.asks_for_xla(op)
        given = zip(self.body.inputs, op.inputs, strict=True)
        self._known = {inner.name: shape for inner, outer in given if (shape := outside.shape(outer)) is not None}
        self.sizes = Sizes(self.body, self._known)

    def compiled_bytes(self) -> int | None:
        """Bytes of scratch memory of the program that XLA makes of the function; None where that cannot be told."""
        key = _structure(self)
        if key not in _blocks_of:
            try:
                program = _private.compiled_program(self.body, self._known, lambda _: None, handed=self._handles())
            except (tf.errors.OpError, ValueError, TypeError, KeyError) as error:
                _log.debug("no program of %s: %s", self.op.name, error)
                return None
            _blocks_of[key] = sum(program_memory(program).temporary_bytes)
        return _blocks_of[key]

    def _handles(self) -> dict[str, tf.Tensor]:
        given = zip(self.body.inputs, self.op.inputs, strict=True)
        return {inner.name: outer for inner, outer in given if inner.dtype == tf.resource}

    @property
    def unknown(self) -> str:
        """What is said where the program's memory cannot be told."""
        return f"what XLA's program of {self.op.name!r} takes beside what it reads and returns is not known"


def scratch_bytes(body: Graph) -> int:
    """What the operations of a function hold at most beside its inputs and outputs, one after the other."""
    pinned = {body.roots[t] for t in body.inputs}
    returned = sum(body.tensors[root].size_bytes for root in {body.roots[t] for t in body.outputs} - pinned)
    return max(0, simulate(body, body.plain_schedule).peak_bytes - body.pinned_bytes - returned)


def _structure(call: Call) -> bytes:
    """What a function computes, of which shapes; whatever its operations are called, and in whatever order it captures.

    An operation is told by its kind, its attributes and what makes its inputs; an input by who reads it.
    """
    body = call.body
    readers: dict[str, list[tuple[str, int]]] = {}
    for op in body.get_operations():
        for place, tensor in enumerate(op.inputs):
            readers.setdefault(tensor.name, []).append((op.type, place))
    told: dict[str, bytes] = {}
    for op in body.get_operations():
        if op.type == "Placeholder":
            given = op.outputs[0]
            shape = () if given.dtype in HANDLES else call.sizes.shape(given)
            told[op.name] = _digest(given.dtype.name, shape, sorted(readers.get(given.name, ())))
        else:
            made_by = [(told[t.op.name], t.value_index) for t in op.inputs]
            told[op.name] = _digest(op.type, _attributes(op), made_by)
    returned = sorted((told[t.op.name], t.value_index) for t in body.outputs)
    return _digest(sorted(told.values()), returned)


def _attributes(op: tf.Operation) -> list[tuple[str, bytes]]:
    given: Mapping[str, Any] = op.node_def.attr
    return [(name, given[name].SerializeToString(deterministic=True)) for name in sorted(given) if name[0] != "_"]


def _digest(*parts: object) -> bytes:
    return sha256(repr(parts).encode()).digest()
