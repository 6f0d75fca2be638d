"""How a storage of the forward pass is made again: the same operator on the same inputs, below autograd."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import torch

from remat.torch import _private
from remat.torch.trace import op_facts

_STRIDED: Final = torch.strided

# Where a tensor lies in its storage: shape, strides, offset, and what its elements are.
Geometry: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Where a tensor lies in its storage."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype  # type: ignore[return-value]


def tensor_at(geometry: Geometry, base: torch.Tensor) -> torch.Tensor:
    """The tensor that lies there in the storage of ``base``."""
    shape, stride, offset, dtype = geometry
    if base.dtype is dtype:
        return base.as_strided(shape, stride, offset)
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset, shape, stride)


class Node:
    """One storage of the forward pass, as far as the backward pass may need it.

    Attributes:
        number: of the storage in the traced step.
        geometry: of ``value``, and of whatever the recipe makes; what shares this very object needs no view of it.
        value: a tensor in that storage, or in one made again; None while there is neither.
        instance: how often it had been made again when ``value`` was set.
        recipe: how to make it again.
        before_write: its content before a write that the plan does not know of; recipes read this.
        is_read: does a recipe refer to it?
        is_settled: has it been overwritten outside of the plan? Then it is kept as it is, as plain PyTorch would.
    """

    __slots__ = ("before_write", "geometry", "instance", "is_read", "is_settled", "number", "recipe", "value")

    def __init__(self, number: int, made: torch.Tensor) -> None:
        self.number = number
        self.geometry = geometry_of(made)
        self.value: torch.Tensor | None = None
        self.instance = 0
        self.recipe: Recipe | None = None
        self.before_write: torch.Tensor | None = None
        self.is_read = False
        self.is_settled = False

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the storage by a tensor that lies in it; an operator is under way."""
        self.value = _private.alias(tensor)
        self.geometry = geometry_of(tensor)

    def place_of(self, tensor: torch.Tensor) -> Geometry:
        """Where a tensor lies in this storage."""
        geometry = geometry_of(tensor)
        return self.geometry if geometry == self.geometry else geometry

    def part(self, value: torch.Tensor, place: Geometry) -> torch.Tensor:
        """What lies there, given a value of this node."""
        return value if place is self.geometry else tensor_at(place, value)


class Made:
    """An argument that the step made itself."""

    __slots__ = ("node", "place", "version")

    def __init__(self, node: Node, tensor: torch.Tensor) -> None:
        node.is_read = True
        self.node = node
        self.place = node.place_of(tensor)
        self.version = tensor._version

    def value(self, others: dict[int, torch.Tensor], func: Any) -> torch.Tensor:
        """The tensor, for a second run of ``func``."""
        node = self.node
        value = others.get(id(node))
        if value is None and node.before_write is not None:
            return tensor_at(self.place, node.before_write)
        if value is None:
            value = node.value
            assert value is not None, "the caller sees to it that every argument has a value"
            if node.instance == 0 and value._version != self.version:
                raise _overwritten(self.place[0], func)
        return node.part(value, self.place)


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
        args: its arguments, None in place of tensors.
        kwargs: likewise.
        tensors: place or keyword, and what stands there.
        random_state: of the generator that it drew from; None if it drew nothing.
        nodes: the storages that it makes.
        outputs: which of the tensors that it returns lie in them.
        writes: calls that write to them afterwards.
    """

    __slots__ = (
        "args", "func", "grad_mode", "kwargs", "nodes", "number", "outputs", "random_state", "tensors", "writes",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        func: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        tensors: list[tuple[int | str, Made | Given | Several]],
        random_state: torch.Tensor | None,
    ) -> None:
        self.number = number
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.tensors = tensors
        self.random_state = random_state
        self.grad_mode = torch.is_grad_enabled()
        self.nodes: list[Node] = []
        self.outputs: list[int] = []
        self.writes: list[Recipe] = []

    @property
    def last_number(self) -> int:
        """The number of the last call that belongs to it."""
        return max((self.number, *(write.number for write in self.writes)))

    def missing(self) -> list[Node]:
        """What it needs of the step, its own results left out, and has to be made before it."""
        found = self._missing_arguments()
        for write in self.writes:
            found += [node for node in write._missing_arguments() if node not in self.nodes]
        return found

    def _missing_arguments(self) -> list[Node]:
        found = []
        for _, argument in self.tensors:
            for part in argument.parts if type(argument) is Several else (argument,):
                if type(part) is Made and part.node.value is None and part.node.before_write is None:
                    found.append(part.node)
        return found

    def run(self, others: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Make the storages again; called below autograd.

        Args:
            others: values of nodes that have none of their own, by address.

        Returns:
            One tensor for each storage, in the order of ``nodes``.
        """
        outputs = tensors_in((self._call(others),))
        made = [outputs[place] for place in self.outputs]
        if self.writes:
            values = {**others, **{id(node): tensor for node, tensor in zip(self.nodes, made, strict=True)}}
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
        if self.random_state is not None:
            args, kwargs = op_facts.with_generator(self.func, args, kwargs, self.random_state)
        _private.enable_grad(self.grad_mode)  # A kernel may ask: oneDNN's recurrent layers do.
        return self.func(*args, **kwargs)


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


def values_of(nodes: list[Node]) -> dict[int, torch.Tensor]:
    """Values of nodes that have none at present, by address, made from what there is; they are not kept."""
    needed: dict[int, Recipe] = {}
    open_nodes = list(nodes)
    while open_nodes:
        node = open_nodes.pop()
        if node.recipe is None:
            raise RuntimeError(
                f"storage {node.number} of the step is gone: autograd reads a tensor that it had released. Give "
                "retain_graph=True to every backward pass through this graph but the last"
            )
        if node.recipe.number not in needed:
            needed[node.recipe.number] = node.recipe
            open_nodes.extend(node.recipe.missing())
    values: dict[int, torch.Tensor] = {}
    with _private.BelowAutograd():
        # Writes in place come later than what they write to, and may read what was made in between.
        for recipe in sorted(needed.values(), key=lambda recipe: recipe.last_number):
            made = recipe.run(values)
            values.update((id(node), tensor) for node, tensor in zip(recipe.nodes, made, strict=True))
    return values
