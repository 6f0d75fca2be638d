"""How a storage of the forward pass is made again: the same operator on the same inputs, below autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from remat.torch import _private, op_facts


class Node:
    """One storage of the forward pass, as far as the backward pass may need it.

    Attributes:
        number: of the storage in the traced step.
        value: a tensor in that storage, or in one made again; None while there is neither.
        instance: how often it had been made again when ``value`` was set.
        recipe: how to make it again.
        output: which of the storages that the recipe makes it is.
        before_write: its content before a write that the plan does not know of; recipes read this.
        is_read: does a recipe refer to it?
        is_settled: has it been overwritten outside of the plan? Then it is kept as it is, as plain PyTorch would.
    """

    __slots__ = ("before_write", "instance", "is_read", "is_settled", "number", "output", "recipe", "value")

    def __init__(self, number: int) -> None:
        self.number = number
        self.value: torch.Tensor | None = None
        self.instance = 0
        self.recipe: Recipe | None = None
        self.output = 0
        self.before_write: torch.Tensor | None = None
        self.is_read = False
        self.is_settled = False


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def within(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor that lies there in the storage of ``base``."""
        if base.dtype is self.dtype:
            return base.as_strided(self.shape, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Made:
    """An argument that the step made itself."""

    node: Node
    geometry: Geometry
    version: int


@dataclass(frozen=True, slots=True)
class Given:
    """An argument from outside of the step: a parameter, the batch."""

    tensor: torch.Tensor
    version: int


def argument(tensor: torch.Tensor, node: Node | None) -> Made | Given:
    """How a recipe refers to an argument of an operator under way."""
    if node is not None and (node.value is not None or node.recipe is not None) and not node.is_settled:
        node.is_read = True
        return Made(node, Geometry.of(tensor), tensor._version)
    held = tensor if tensor.grad_fn is None and type(tensor) is not torch.Tensor else _private.alias(tensor)
    return Given(held, tensor._version)


class Recipe:
    """A call that can be run again, with the in-place writes to what it made."""

    __slots__ = ("args", "func", "grad_mode", "kwargs", "nodes", "number", "random_state", "writes")

    def __init__(self, number: int, func: Any, args: Any, kwargs: Any, random_state: torch.Tensor | None) -> None:
        self.number = number
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.random_state = random_state
        self.grad_mode = torch.is_grad_enabled()
        self.nodes: list[Node] = []
        self.writes: list[Recipe] = []

    @property
    def last_number(self) -> int:
        """The number of the last call that belongs to it."""
        return max((self.number, *(write.number for write in self.writes)))

    def arguments(self) -> list[Made]:
        """What it needs of the step, its own results left out."""
        own = {id(node) for node in self.nodes}
        calls = (self, *self.writes)
        leaves = [leaf for call in calls for leaf in _private.tree_leaves((call.args, call.kwargs))]
        return [leaf for leaf in leaves if isinstance(leaf, Made) and id(leaf.node) not in own]

    def run(self, others: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Make the storages again.

        Args:
            others: values of nodes that have none of their own, by address.

        Returns:
            One tensor for each storage, in the order of ``nodes``.
        """
        out, inputs = self._call(others)
        made = new_storages(out, inputs)
        del out, inputs
        own = {id(node): tensor for node, tensor in zip(self.nodes, made, strict=True)}
        for write in self.writes:
            write._call({**others, **own})
        return made

    def _call(self, others: dict[int, torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        inputs: list[torch.Tensor] = []

        def resolve(leaf: Made | Given) -> torch.Tensor:
            tensor = _given(leaf, self) if isinstance(leaf, Given) else _made(leaf, others, self)
            inputs.append(tensor)
            return tensor

        with _private.below_autograd(self.grad_mode):
            args, kwargs = _private.tree_map_only((Made, Given), resolve, (self.args, self.kwargs))
            if self.random_state is not None:
                args, kwargs = op_facts.with_generator(self.func, args, kwargs, self.random_state)
            return self.func(*args, **kwargs), inputs


def _given(leaf: Given, recipe: Recipe) -> torch.Tensor:
    if not leaf.tensor.untyped_storage().nbytes() and leaf.tensor.numel():
        _private.gather(leaf.tensor)
    if leaf.tensor._version != leaf.version:
        raise _overwritten(tuple(leaf.tensor.shape), recipe)
    return leaf.tensor


def _made(leaf: Made, others: dict[int, torch.Tensor], recipe: Recipe) -> torch.Tensor:
    node = leaf.node
    value = others.get(id(node))
    if value is None:
        value = node.value if node.before_write is None else node.before_write
        assert value is not None, "the caller sees to it that every argument has a value"
        if node.before_write is None and node.instance == 0 and value._version != leaf.version:
            raise _overwritten(leaf.geometry.shape, recipe)
    return leaf.geometry.within(value)


def _overwritten(shape: tuple[int, ...], recipe: Recipe) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {shape} was modified by an in-place operation after {recipe.func.name()} read it in the "
        "forward pass, and that operator has to run again. Run the backward pass before the modification (an optimizer "
        "step, say), or without remat"
    )


def new_storages(out: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of what an operator returned, one tensor for each storage that is not that of an input."""
    if isinstance(out, torch.Tensor):
        outputs = [out]
    else:
        outputs = [t for t in _private.tree_leaves(out) if isinstance(t, torch.Tensor)]
    known = {_private.storage_key(t.untyped_storage()) for t in inputs if t.layout is torch.strided}
    found: list[torch.Tensor] = []
    for tensor in outputs:
        if tensor.layout is torch.strided and (key := _private.storage_key(tensor.untyped_storage())) not in known:
            known.add(key)
            found.append(tensor)
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
            open_nodes.extend(made.node for made in node.recipe.arguments() if is_missing(made.node))
    values: dict[int, torch.Tensor] = {}
    # Writes in place come later than what they write to, and may read what was made in between.
    for recipe in sorted(needed.values(), key=lambda recipe: recipe.last_number):
        made = recipe.run(values)
        values.update((id(node), tensor) for node, tensor in zip(recipe.nodes, made, strict=True))
    return values


def is_missing(node: Node) -> bool:
    """Has it to be made before it can be read?"""
    return node.value is None and node.before_write is None
