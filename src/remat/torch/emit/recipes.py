"""How a storage of the forward pass is made again: the same operator on the same inputs, below autograd.

Read from the top: an ``Activation`` is one storage of the forward pass, a ``Recipe`` the call that makes it again, with
arguments that are ``Made`` by the step or ``Given`` to it. ``ActivationTable`` finds activations while the forward pass
runs, and writes recipes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import torch

from remat.torch import _private
from remat.torch.trace import draws, op_facts
from remat.torch.trace.draws import Draw

_STRIDED: Final = torch.strided

# Where a tensor lies in its storage: shape, strides, offset and dtype.
Geometry: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Where a tensor lies in its storage."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype  # type: ignore[return-value]


def tensor_at(geometry: Geometry, base: torch.Tensor) -> torch.Tensor:
    """The tensor that lies at a place in the storage of ``base``."""
    shape, stride, offset, dtype = geometry
    if base.dtype is dtype:
        return base.as_strided(shape, stride, offset)
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset, shape, stride)


class Activation:
    """One storage of the forward pass, as far as the backward pass may need it.

    Attributes:
        number: of the storage in the traced step.
        geometry: where ``value``, and whatever the recipe makes, lies in the storage. A tensor whose place is this very
            object needs no view of it.
        value: a tensor in the storage, or in one made again; None while there is neither.
        instance: how often it had been made again when ``value`` was set.
        recipe: how to make it again; None if it cannot be.
        has_own_count: does ``value`` count other writes than the step's tensors do? PyTorch's factories hand out a
            tensor that begins a count of its own, which what is held inside of the operator does not share.
        before_write: its content before a write that the plan does not know of; recipes read this.
        is_read: does a recipe read it?
        is_settled: has a write that the plan does not know of changed it? It is then kept, as plain PyTorch would.
    """

    __slots__ = (
        "before_write",
        "geometry",
        "has_own_count",
        "instance",
        "is_read",
        "is_settled",
        "number",
        "recipe",
        "value",
    )

    def __init__(self, number: int, made: torch.Tensor) -> None:
        self.number = number
        self.geometry = geometry_of(made)
        self.value: torch.Tensor | None = None
        self.has_own_count = False
        self.instance = 0
        self.recipe: Recipe | None = None
        self.before_write: torch.Tensor | None = None
        self.is_read = False
        self.is_settled = False

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the storage by a tensor that lies in it; called inside an operator."""
        self.value = _private.alias(tensor)
        self.geometry = geometry_of(tensor)
        self.has_own_count = False

    def count_with(self, tensor: torch.Tensor) -> None:
        """From now on ``value`` counts writes with this tensor of the step, which lies in the same storage."""
        shape, stride, offset, dtype = self.geometry
        if self.has_own_count and tensor.dtype is dtype:
            self.has_own_count = False
            if self.value is not None:
                self.value = _private.alias(tensor, (shape, stride, offset))

    def version_of(self, tensor: torch.Tensor) -> int:
        """How often this storage was written to so far, as the tensor counts it that keeps it, or else ``tensor``.

        Chunks that PyTorch hands out as tensors of their own (``unsafe_chunk``, in a GRU) lie in one storage, and each
        counts its own writes, so that the counts of two of them say nothing.
        """
        return (tensor if self.value is None else self.value)._version

    def place_of(self, tensor: torch.Tensor) -> Geometry:
        """Where a tensor lies in this storage."""
        geometry = geometry_of(tensor)
        return self.geometry if geometry == self.geometry else geometry

    def part(self, value: torch.Tensor, place: Geometry) -> torch.Tensor:
        """What lies at a place of the storage, given a value of this activation."""
        return value if place is self.geometry else tensor_at(place, value)


class Made:
    """An argument that the step made itself."""

    __slots__ = ("activation", "place", "version")

    def __init__(self, activation: Activation, tensor: torch.Tensor) -> None:
        activation.is_read = True
        activation.count_with(tensor)
        self.activation = activation
        self.place = activation.place_of(tensor)
        self.version = activation.version_of(tensor)

    def value(self, others: dict[int, torch.Tensor], func: Any) -> torch.Tensor:
        """The tensor, for a second run of ``func``."""
        activation = self.activation
        value = others.get(id(activation))
        if value is None and activation.before_write is not None:
            return tensor_at(self.place, activation.before_write)
        if value is None:
            value = activation.value
            assert value is not None, "the caller sees to it that every argument has a value"
            if activation.instance == 0 and value._version != self.version:
                raise _overwritten(self.place[0], func)
        return activation.part(value, self.place)


class Given:
    """An argument from outside of the step: a parameter, the batch."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A parameter is held as it is, which FSDP relies on; other tensors may come to have a history.
        is_own = type(tensor) is not torch.Tensor and tensor.grad_fn is None
        self.tensor = tensor if is_own else _private.alias(tensor)
        self.version = tensor._version

    def value(self, others: dict[int, torch.Tensor], func: Any) -> torch.Tensor:
        """The tensor, for a second run of ``func``."""
        tensor = self.tensor
        if not tensor.untyped_storage().nbytes() and tensor.numel():
            _private.gather(tensor)
        if tensor._version != self.version:
            raise _overwritten(tensor.shape, func)
        return tensor

    def keep(self, func: Any) -> None:
        """Hold a copy in place of the tensor, which is about to be written to; ``func`` will read it again.

        A kernel that goes number by number makes the same of them in whatever order they lie; for others the copy has
        the same place in a storage of the same size.
        """
        if self.tensor._version != self.version:
            return
        if func is torch.ops.aten.clone.default or torch.Tag.pointwise in func.tags:
            self.tensor = self.tensor.clone()
        else:
            self.tensor = tensor_at(geometry_of(self.tensor), _private.copy_of_storage(self.tensor))
        self.version = self.tensor._version


class Several:
    """An argument that is a list with tensors in it."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def value(self, others: dict[int, torch.Tensor], func: Any) -> list[Any]:
        """The list, for a second run of ``func``."""
        return [part.value(others, func) if isinstance(part, Made | Given) else part for part in self.parts]


def _overwritten(shape: tuple[int, ...], func: Any) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {tuple(shape)} was modified by an in-place operation after {func.name()} read it in the "
        "forward pass, and that operator has to run again. Run the backward pass before the modification (an optimizer "
        "step, say), or without remat"
    )


class Recipe:
    """A call that can be run again, with the in-place writes to what it made.

    Attributes:
        number: of the op; later ones have larger numbers.
        func: the operator.
        args: its positional arguments, None in place of tensors.
        kwargs: its keyword arguments, None in place of tensors.
        tensors: for each argument with tensors, its position or keyword, and what stands for it.
        draw: what it drew; None if it drew nothing.
        grad_mode: were gradients enabled when it ran?
        activations: the storages that it makes.
        outputs: for each of them, the position of a tensor in what the call returns that lies in it.
        writes: calls that write to the storages afterwards.
    """

    __slots__ = (
        "activations",
        "args",
        "draw",
        "func",
        "grad_mode",
        "kwargs",
        "number",
        "outputs",
        "tensors",
        "writes",
    )

    def __init__(
        self,
        number: int,
        func: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        tensors: list[tuple[int | str, Made | Given | Several]],
        draw: Draw | None,
    ) -> None:
        self.number = number
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.tensors = tensors
        self.draw = draw
        self.grad_mode = torch.is_grad_enabled()
        self.activations: list[Activation] = []
        self.outputs: list[int] = []
        self.writes: list[Recipe] = []

    def given(self) -> list[Given]:
        """The arguments from outside of the step, or of storages that are followed no further."""
        parts = (part for _, one in self.tensors for part in (one.parts if isinstance(one, Several) else (one,)))
        return [part for part in parts if isinstance(part, Given)]

    @property
    def last_number(self) -> int:
        """The number of the last call that writes to its results, or its own."""
        return max((self.number, *(write.number for write in self.writes)))

    def missing(self) -> list[Activation]:
        """The activations that have to be made before the call can run again; its own results do not count."""
        found = self._missing_arguments()
        for write in self.writes:
            found += [activation for activation in write._missing_arguments() if activation not in self.activations]
        return found

    def _missing_arguments(self) -> list[Activation]:
        return [one for one in self._own_arguments() if one.value is None and one.before_write is None]

    def arguments(self) -> list[Activation]:
        """The activations that the call and the writes after it read, whether they have values or not."""
        return [one for call in (self, *self.writes) for one in call._own_arguments()]

    def _own_arguments(self) -> list[Activation]:
        return [
            part.activation
            for _, argument in self.tensors
            for part in (argument.parts if type(argument) is Several else (argument,))
            if type(part) is Made
        ]

    def take_apart(self) -> None:
        """Forget what it reads and makes; it will not run again.

        A recipe and what it makes refer to each other, and would hold a step's batch until Python looks for circles,
        which it does once in many steps.
        """
        self.tensors.clear()
        self.activations.clear()
        self.writes.clear()

    def run(self, others: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Make the storages again; called below autograd.

        Args:
            others: values of activations that have none of their own, by address.

        Returns:
            One tensor for each storage, in the order of ``activations``.
        """
        outputs = tensors_in((self._call(others),))
        made = [outputs[place] for place in self.outputs]
        if self.writes:
            values = {
                **others,
                **{id(activation): tensor for activation, tensor in zip(self.activations, made, strict=True)},
            }
            for write in self.writes:
                write._call(values)
        return made

    def _call(self, others: dict[int, torch.Tensor]) -> Any:
        args: Any = self.args.copy()
        kwargs = self.kwargs
        for place, argument in self.tensors:
            if isinstance(place, int):
                args[place] = argument.value(others, self.func)
            else:
                kwargs = {**kwargs, place: argument.value(others, self.func)}
        _private.enable_grad(self.grad_mode)  # A kernel may ask: oneDNN's recurrent layers do.
        if self.draw is not None:
            return self.draw.again(self.func, args, kwargs)
        return self.func(*args, **kwargs)


class ActivationTable:
    """The activations whose storages are alive during a forward pass."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, Activation]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, tensor: torch.Tensor, activation: Activation) -> None:
        """From now on this activation stands for the storage of a tensor."""
        storage = tensor.untyped_storage()
        self._found[_private.storage_key(storage)] = (_private.weak(storage), activation)

    def of(self, tensor: torch.Tensor) -> Activation | None:
        """The activation that stands for a tensor's storage, if there is one."""
        if not self._found or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        found = self._found.get(_private.storage_key(storage))
        # A new storage may have the address of one that is gone.
        return found[1] if found is not None and found[0]() is storage else None

    def settle(self, activation: Activation, tensor: torch.Tensor) -> None:
        """Before a write that cannot be repeated: keep the storage, and a copy for the recipes that have read it."""
        if activation.is_read:
            activation.before_write = _private.copy_of_storage(tensor)
        if activation.value is None:
            activation.hold(tensor)
        activation.is_settled = True
        del self._found[_private.storage_key(tensor.untyped_storage())]

    def call(
        self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], draw: Draw | None = None
    ) -> Recipe | None:
        """The recipe of a call about to be made: activations by reference, all else as it is.

        Args:
            number: of the op.
            func: the operator.
            args: its positional arguments.
            kwargs: its keyword arguments.
            draw: what the call draws, if it was made already.

        Returns:
            The recipe; None where the call draws at random, and what it draws cannot be known now.
        """
        if not op_facts.is_plain(func):
            if draw is None and op_facts.is_random(func, args, kwargs):
                draw = draws.note(func, args, kwargs)
                if draw is None:
                    return None
            args = op_facts.repeatable_call(func, args)
        again, named = list(args), kwargs
        tensors: list[tuple[int | str, Made | Given | Several]] = []
        for place, value in enumerate(args):
            reference = self._reference(value)
            if reference is not None:
                tensors.append((place, reference))
                again[place] = None
        for name, value in kwargs.items():
            reference = self._reference(value)
            if reference is not None:
                tensors.append((name, reference))
                named = {**named, name: None}
        return Recipe(number, func, again, named, tensors, draw)

    def _reference(self, value: Any) -> Made | Given | Several | None:
        """What stands in a recipe for an argument with tensors."""
        if isinstance(value, torch.Tensor):
            activation = self.of(value)
            return (
                Given(value)
                if activation is None or (activation.value is None and activation.recipe is None)
                else Made(activation, value)
            )
        if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
            return Several([one if (part := self._reference(one)) is None else part for one in value])
        return None


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among arguments or results, those in lists too."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(one for one in value if isinstance(one, torch.Tensor))
    return found


def new_storages(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[int]:
    """Of what an operator returned, the place of one tensor for each storage that is not that of an input."""
    known = {_private.storage_key(t.untyped_storage()) for t in inputs if t.layout is _STRIDED}
    found: list[int] = []
    for place, tensor in enumerate(outputs):
        if tensor.layout is _STRIDED and (key := _private.storage_key(tensor.untyped_storage())) not in known:
            known.add(key)
            found.append(place)
    return found


def values_of(activations: list[Activation]) -> dict[int, torch.Tensor]:
    """Values of activations that have none at present, by address, made from what there is; they are not kept."""
    needed: dict[int, Recipe] = {}
    open_activations = list(activations)
    while open_activations:
        activation = open_activations.pop()
        if activation.recipe is None:
            raise RuntimeError(
                f"storage {activation.number} of the step is gone: autograd reads a tensor that it had released. Give "
                "retain_graph=True to every backward pass through this graph but the last"
            )
        if activation.recipe.number not in needed:
            needed[activation.recipe.number] = activation.recipe
            open_activations.extend(activation.recipe.missing())
    values: dict[int, torch.Tensor] = {}
    with _private.BelowAutograd():
        # Writes in place come later than what they write to, and may read what was made in between.
        for recipe in sorted(needed.values(), key=lambda recipe: recipe.last_number):
            made = recipe.run(values)
            values.update((id(activation), tensor) for activation, tensor in zip(recipe.activations, made, strict=True))
    return values


def kept(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What stands in autograd's graph for a tensor that is kept. With hooks PyTorch does not check its version.

    Not the tensor itself: what an operator returned would hold the node that holds it, and whatever a library has hung
    on it. Keras gives the result of a softmax its argument as an attribute.
    """
    version = tensor._version
    if type(tensor) is torch.Tensor and not tensor.is_leaf:
        tensor = _private.detached(tensor)
    return tensor, version


def read_kept(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The tensor that was kept.

    Raises:
        RuntimeError: if it was written since, as plain autograd would.
    """
    tensor, version = saved
    check_version(tensor, version, tensor.shape)
    return tensor


def check_version(value: torch.Tensor, version: int, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that was written since autograd saved it.

    Raises:
        RuntimeError: as plain autograd would.
    """
    if value._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(shape)} is at version {value._version}; expected version {version} instead"
        )
