"""The shapes and bytes of a program's values, also where it leaves the batch open (``static.data("x", [None, 8])``).

Paddle writes -1 for every dimension that it does not know, and a reshape hides what such a dimension was. So the given
sizes are followed through the program, operator by operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from remat.core.errors import UnsupportedStep
from remat.paddle import _private
from remat.paddle.trace import op_facts
from remat.paddle.trace.scratch import bytes_unsaid

_SAME_ELEMENTS: Final = frozenset(
    {"reshape", "reshape_", "flatten", "flatten_", "squeeze", "squeeze_", "unsqueeze", "unsqueeze_", "transpose"}
)
_INPUTS: Final = frozenset({"pd_op.data", "pd_op.feed"})


class Sizes:
    """The shapes of all values of a program's main block.

    Args:
        program: the program.
        feeds: for inputs of the program, by name, their shapes.
        batch_size: what an open first dimension of an input is, where ``feeds`` says nothing.

    Raises:
        UnsupportedStep: where an input has an open dimension of which nobody says how large it is.
    """

    def __init__(self, program: Any, feeds: Mapping[str, Sequence[int]] | None = None, batch_size: int | None = None):
        self._batch_size = batch_size
        self._feeds = dict(feeds or {})
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._unsaid: dict[str, int] = {}
        for op in program.global_block().ops:
            for value in op.results():
                if value.initialized() and (shape := _static_shape(value)) is not None and -1 in shape:
                    self._shapes[value.id] = self._followed(op, value, shape)
            operands = op.operands_source()
            first = self.shape_of(operands[0]) if operands and operands[0].initialized() else None
            for place, size_bytes in bytes_unsaid(op, first).items():
                self._unsaid[op.results()[place].id] = size_bytes

    def shape_of(self, value: Any) -> tuple[int, ...] | None:
        """The shape of a value; None for a list of tensors, or what is no dense tensor."""
        return self._shapes.get(value.id) or _static_shape(value)

    def bytes_of(self, value: Any) -> int:
        """Bytes of a value, those of all its tensors for a list."""
        if (unsaid := self._unsaid.get(value.id)) is not None:
            return unsaid
        elements = self.elements_of(value)
        if elements is not None:
            return sum(elements)
        shape = self.shape_of(value)
        return 0 if shape is None else math.prod(shape) * op_facts.element_bytes(value.dtype)

    def dtype_of(self, value: Any) -> str | None:
        """The short name of the data type of a tensor."""
        return op_facts.dtype_name(value.dtype) if _static_shape(value) is not None else None

    def elements_of(self, value: Any) -> list[int] | None:
        """Bytes of each tensor of a list; None for what is no list."""
        types = _private.types_in_list(value)
        if types is None:
            return None
        return [math.prod(self._closed(shape)) * op_facts.element_bytes(dtype) for shape, dtype in types]

    def _closed(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._batch_size or 1 if size < 0 else size for size in shape)

    def _followed(self, op: Any, value: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a result that has open dimensions."""
        name = str(op.name())
        if name in _INPUTS:
            return self._of_input(str(op.attrs().get("name", "")), shape)
        operands = [v for v in op.operands_source() if v.initialized() and _static_shape(v) is not None]
        kind = op_facts.kind(op)
        known = [(_static_shape(v) or (), self.shape_of(v) or ()) for v in operands]
        if kind in _SAME_ELEMENTS and known:
            if kind == "transpose":
                return tuple(known[0][1][axis] for axis in op.attrs()["perm"])
            return _with_elements(shape, math.prod(known[0][1]))
        for static, real in known:
            if static == shape:
                return real
        return tuple(self._dimension(place, size, known) for place, size in enumerate(shape))

    def _dimension(self, place: int, size: int, known: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
        if size >= 0:
            return size
        for static, real in known:
            if place < len(static) and static[place] == -1:
                return real[place]
        return next((real[n] for static, real in known for n, s in enumerate(static) if s == -1), self._batch_size or 1)

    def _of_input(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        given = self._feeds.get(name)
        if given is not None:
            if len(given) != len(shape) or any(s not in (-1, g) for s, g in zip(shape, given, strict=True)):
                raise UnsupportedStep(
                    f"the feed {name!r} has the shape {list(given)}, and the program's input has {list(shape)}; give "
                    "feed shapes that fit"
                )
            return tuple(int(size) for size in given)
        if -1 in shape[1:] or self._batch_size is None:
            raise UnsupportedStep(
                f"the input {name!r} of the program has the open shape {list(shape)}; say how large a step is: "
                f"batch_size=32 for an open first dimension, or feed_shapes={{{name!r}: (32, ...)}}"
            )
        return (self._batch_size, *shape[1:])


def _static_shape(value: Any) -> tuple[int, ...] | None:
    """The shape as the program has it, -1 for an open dimension."""
    if not value.is_dense_tensor_type():
        return None
    return tuple(int(size) for size in value.shape)


def _with_elements(shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """A shape whose open dimensions hold so many elements together; all of them in the first."""
    known = math.prod(size for size in shape if size >= 0)
    first = shape.index(-1)
    rest = tuple(1 if size < 0 else size for size in shape)
    return (*rest[:first], elements // max(1, known), *rest[first + 1 :])


def has_open_sizes(program: Any) -> bool:
    """Does some input of a program leave a dimension open?"""
    inputs = (op for op in program.global_block().ops if op.name() in _INPUTS)
    return any(-1 in (_static_shape(value) or ()) for op in inputs for value in op.results())
