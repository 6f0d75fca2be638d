"""The values of tensors while a step is traced, where they follow from constants and from what the step is given.

Python asks for values: a seed, "is anything masked?". What is known has real memory, and operators on it run for real.
Results that are too large for that are computed when somebody asks, see ``late_values``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch

from remat.torch import _private
from remat.torch._private import OpOverload, Storage
from remat.torch.trace import op_facts
from remat.torch.trace.late_values import LateCall, LateValue, Pattern, Place, Read, compute
from remat.torch.trace.stand_ins import is_plain

_MOST_WHOLE_NUMBERS: Final = 1 << 20
"""Elements of a tensor of whole numbers or truth values that is followed: token ids, masks, positions. A judgement, not
measured: the mask of 8 sequences of 360 tokens has as many, and an operator on them takes a millisecond. What follows
from larger ones is computed when it is asked for; a larger limit costs memory and time while a step is traced."""
_MOST_OTHER_NUMBERS: Final = 1 << 14
"""The same of any other dtype. Branches hardly ever depend on such a value, and frozen weights and images are of this
kind, so that a larger limit would compute parts of the model. A judgement, too."""

# They make constants, whatever is in the tensor that they are given as a pattern.
_CONSTANTS: Final = frozenset(
    {f"aten::{name}" for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")}
)
# They make a tensor whose values are not defined.
_UNDEFINED: Final = frozenset(
    {f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")}
)


_T = TypeVar("_T")


class _ByStorage(Generic[_T]):
    """Something for each storage, as long as that lives: another may come to have its key."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Callable[[], Storage | None], _T]] = {}

    def get(self, tensor: torch.Tensor) -> _T | None:
        storage = tensor.untyped_storage()
        found = self._found.get(_private.storage_key(storage))
        return found[1] if found is not None and found[0]() is storage else None

    def set(self, tensor: torch.Tensor, value: _T) -> None:
        storage = tensor.untyped_storage()
        self._found[_private.storage_key(storage)] = (_private.weak(storage), value)

    def drop(self, tensor: torch.Tensor) -> None:
        self._found.pop(_private.storage_key(tensor.untyped_storage()), None)


@dataclass(frozen=True)
class _Held:
    """Where the values of a storage are.

    Attributes:
        copy: a tensor in another storage that has them; None where the storage itself does.
        is_given: was the storage there before the step, which must not write to it?
    """

    copy: torch.Tensor | None = None
    is_given: bool = False


class KnownValues:
    """Which storages hold the values that they have in the real step.

    A storage that the step makes and that is known is real. One from before the step, to which the step writes, has a
    copy, which the writes change.
    """

    def __init__(self) -> None:
        self._known: _ByStorage[_Held] = _ByStorage()
        # What will be in a storage, and what was in it when a late call read it.
        self._late: _ByStorage[LateValue] = _ByStorage()
        self._read_late: _ByStorage[LateValue] = _ByStorage()

    def pin(self, tensor: torch.Tensor, *, is_of_batch: bool = False) -> None:
        """Remember that the values of a tensor from before the step are known; of a batch, however large they are."""
        if tensor.device.type == "meta" or tensor.requires_grad or not is_plain(tensor):
            return
        if not _private.has_memory(tensor.untyped_storage()):
            return  # It stands for what an optimizer will have made.
        if _is_small(tensor):
            self._learn(tensor, _Held(is_given=True))
        elif is_of_batch:
            self._set_late(tensor, LateValue(None, 0, tensor))

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor with the values that another has in the real step; None where they are not known."""
        if not is_plain(tensor):
            return None
        known = self._known.get(tensor)
        if known is None or known.copy is None:
            return None if known is None else tensor
        return Place.of(tensor).within(known.copy)

    def found(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same, computed where that is still to be done; None where values are not known or take too much work."""
        known = self.of(tensor)
        late = self._late_of(tensor) if known is None else None
        if late is None:
            return known
        base = compute(late)
        if base is None:
            return None
        with _private.no_modes():
            value = Place.of(tensor).within(base)
            if _is_small(base):
                late.found = base
        return value

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of the storage of a tensor of whole numbers or truth values; None where it is not known.

        Such a tensor may be an index, and how much a mask selects is known by its values only.
        """
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.device.type == "meta":
            return None  # No operator on the meta device reads an index.
        value = self.found(tensor) if _lies_in_little(tensor) else self.of(tensor)
        if value is None:
            return None
        with _private.no_modes():
            return _private.copy_of_storage(value)

    def known_again(self, values: torch.Tensor, place: Any) -> torch.Tensor:
        """A tensor with known values, in a new storage.

        Args:
            values: what ``copy_of`` returned.
            place: where the tensor lies in its storage: shape, strides, offset.
        """
        shape, stride, offset = place
        with _private.no_modes():
            copied = _private.copy_of_storage(values)
            tensor = torch.empty(0, dtype=values.dtype, device=values.device)
            tensor.set_(copied.untyped_storage(), offset, shape, stride)
        self._learn(tensor, _Held())
        return tensor

    def may_run(self, func: OpOverload, inputs: list[torch.Tensor]) -> bool:
        """Do the results of an operator follow from values that are known?"""
        return _may_follow(func) and (
            op_facts.base_name(func) in _CONSTANTS or all(self.of(tensor) is not None for tensor in inputs)
        )

    def may_run_late(self, func: OpOverload, inputs: list[torch.Tensor]) -> bool:
        """Do they follow from values that are known or can be computed?"""
        return _may_follow(func) and all(self.of(one) is not None or self._late_of(one) is not None for one in inputs)

    def find(self, inputs: list[torch.Tensor]) -> bool:
        """Compute the values of an operator's arguments, so that ``run`` can be called; False where one is unknown."""
        for tensor in inputs:
            if self.of(tensor) is not None:
                continue
            value = self.found(tensor)
            if value is None:
                return False
            with _private.no_modes():
                own = _private.copy_of_storage(value)  # Others may read the one that was found.
            self._known.set(tensor, _Held(own))
        return True

    def note_late(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Remember how results follow from values that are known or can be computed.

        Args:
            func: an operator of which ``may_run`` or ``may_run_late`` is true.
            args: its arguments.
            kwargs: those by name.
            out: what it returned without memory.
        """
        inputs = [one for one in _private.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        outputs = [one for one in _private.tree_leaves(out) if isinstance(one, torch.Tensor)]
        changed = {id(one) for one in op_facts.written(func, args, kwargs)}
        written = tuple(place for place, tensor in enumerate(inputs) if id(tensor) in changed)
        if not all(is_plain(one) and not one.is_conj() and not one.is_neg() for one in (*inputs, *outputs)):
            self.forget(inputs[place] for place in written)
            return

        def read(tensor: torch.Tensor) -> Read | Pattern:
            value = self._value_to_read(tensor)
            device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
            return Pattern(Place.of(tensor), device) if value is None else Read(value, Place.of(tensor))

        arguments = _private.tree_map_only(torch.Tensor, read, (args, kwargs))
        if _is_on_meta(args, kwargs):
            arguments = _private.tree_map_only(torch.device, lambda device: torch.device("cpu"), arguments)
        size_bytes = sum(one.untyped_storage().nbytes() for one in outputs)
        call = LateCall(func, arguments, written, size_bytes)
        for slot, tensor in enumerate((*outputs, *(inputs[place] for place in written))):
            self._set_late(tensor, LateValue(call, slot))

    def _late_of(self, tensor: torch.Tensor) -> LateValue | None:
        return self._late.get(tensor) if is_plain(tensor) else None

    def _set_late(self, tensor: torch.Tensor, value: LateValue) -> None:
        self.forget([tensor])
        self._late.set(tensor, value)

    def _value_to_read(self, tensor: torch.Tensor) -> LateValue | None:
        """What a late call reads: a copy of values that are there, since a storage that is held is never freed."""
        late = self._late_of(tensor)
        value = self.of(tensor)
        if late is not None or value is None:
            return late
        found = self._read_late.get(tensor)
        if found is None:
            with _private.no_modes():
                found = LateValue(None, 0, _private.copy_of_storage(value))
            self._read_late.set(tensor, found)
        return found

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of which ``may_run`` is true on the values of its arguments; the results are known."""
        for tensor in op_facts.written(func, args, kwargs):
            self._copy_if_given(tensor)
            self._late.drop(tensor)
            self._read_late.drop(tensor)
        if _is_on_meta(args, kwargs):
            return self._run_beside(func, args, kwargs)
        originals: dict[int, torch.Tensor] = {}

        def value_of(tensor: torch.Tensor) -> torch.Tensor:
            value = self.of(tensor)
            if value is None:  # It is the pattern of a constant, and is not read.
                return tensor
            originals[id(value)] = tensor
            return value

        values, named = _private.tree_map_only(torch.Tensor, value_of, (args, kwargs))
        out = func(*values, **named)
        out = _private.tree_map_only(torch.Tensor, lambda made: originals.get(id(made), made), out)
        for made in _private.tree_leaves(out):
            if isinstance(made, torch.Tensor) and is_plain(made) and self.of(made) is None:
                self._learn(made, _Held())
        return out

    def _run_beside(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same on the meta device, whose tensors have no memory: their values are in copies on the CPU."""

        def value_of(tensor: torch.Tensor) -> torch.Tensor:
            value = self.of(tensor)
            return torch.empty_like(tensor, device="cpu") if value is None else value

        values, named = _private.tree_map_only(torch.Tensor, value_of, (args, kwargs))
        on_cpu = _private.tree_map_only(torch.device, lambda device: torch.device("cpu"), (values, named))
        out = func(*on_cpu[0], **on_cpu[1])
        results = [one for one in _private.tree_leaves(out) if isinstance(one, torch.Tensor)]
        if not results:
            return out  # A number.
        returned = func(*args, **kwargs)
        made = [one for one in _private.tree_leaves(returned) if isinstance(one, torch.Tensor)]
        for tensor, value in zip(made, results, strict=True):
            if is_plain(tensor) and self.of(tensor) is None:
                self._known.set(tensor, _Held(value))
        return returned

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Something that is not known was written to these tensors."""
        for tensor in tensors:
            if is_plain(tensor):
                for values in (self._known, self._late, self._read_late):
                    values.drop(tensor)

    def _learn(self, tensor: torch.Tensor, held: _Held) -> None:
        self.forget([tensor])
        self._known.set(tensor, held)

    def _copy_if_given(self, tensor: torch.Tensor) -> None:
        known = self._known.get(tensor) if is_plain(tensor) else None
        if known is not None and known.is_given:
            self._known.set(tensor, _Held(_private.copy_of_storage(tensor)))


def _is_on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does an operator compute on the meta device?"""
    given = _private.tree_leaves((args, kwargs))
    devices = (one.device if isinstance(one, torch.Tensor) else one for one in given)
    return any(isinstance(one, torch.device) and one.type == "meta" for one in devices)


def _may_follow(func: OpOverload) -> bool:
    """Can results of an operator follow from the values of its arguments?"""
    return func.namespace == "aten" and op_facts.base_name(func) not in _UNDEFINED and not op_facts.may_draw(func)


def are_small(result: Any) -> bool:
    """Are all tensors that an operator returns small enough to be followed?"""
    return all(_is_small(t) for t in _private.tree_leaves(result) if isinstance(t, torch.Tensor))


def _lies_in_little(tensor: torch.Tensor) -> bool:
    """Is the storage of whole numbers or truth values small enough to be followed?"""
    return is_plain(tensor) and tensor.untyped_storage().nbytes() <= _MOST_WHOLE_NUMBERS * tensor.element_size()


def _is_small(tensor: torch.Tensor) -> bool:
    is_other = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (_MOST_OTHER_NUMBERS if is_other else _MOST_WHOLE_NUMBERS)
