"""What is kept of a forward pass for its backward pass, and how the rest is made again.

Nothing here can give a wrong number: a tensor is either the one that the forward pass made, or made again by the same
operator from the same inputs. The plan only says when something is kept, made and let go. Whatever is asked for in
another order than planned (``retain_graph``, parts of the graph) is made on the spot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from remat.torch import _private, op_facts
from remat.torch.eager_order import Directions, Rerun


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


class NodeTable:
    """The nodes of storages that are alive during a forward pass."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, Node]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, tensor: torch.Tensor, node: Node) -> None:
        """From now on the storage of a tensor has this node."""
        storage = tensor.untyped_storage()
        self._found[_private.storage_key(storage)] = (_private.weak(storage), node)

    def of(self, tensor: torch.Tensor) -> Node | None:
        """The node of a tensor's storage, if it has one."""
        if not self._found or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        found = self._found.get(_private.storage_key(storage))
        # Another storage may stand at the address of one that is gone.
        return found[1] if found is not None and found[0]() is storage else None

    def settle(self, node: Node, tensor: torch.Tensor) -> None:
        """Before a write that cannot be repeated: keep what autograd saved, and what recipes read as they read it."""
        if node.is_read:
            node.before_write = _private.copy_of_storage(tensor)
        if node.value is None:
            node.value = _private.alias(tensor)
        node.is_settled = True
        del self._found[_private.storage_key(tensor.untyped_storage())]

    def call(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
        """A call about to be made, so that it can be run again: what has a node by reference, all else as it is."""
        state = op_facts.random_state(func, args, kwargs) if op_facts.is_random(func, args, kwargs) else None
        again_args, again_kwargs = _private.tree_map_only(
            torch.Tensor,
            lambda tensor: argument(tensor, self.of(tensor)),
            (op_facts.repeatable_call(func, args), kwargs),
        )
        return Recipe(number, func, again_args, again_kwargs, state)


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


class StepState:
    """One forward pass: its nodes, and which of the planned reads are still to come."""

    def __init__(self, directions: Directions) -> None:
        self._directions = directions
        self._pending: Counter[tuple[int, int]] = Counter(directions.pending)
        self._begun: set[int] = set()
        self.nodes: dict[int, Node] = {}
        self.recipes: dict[int, Recipe] = {}

    def value_for(self, slot: int, node: Node) -> torch.Tensor:
        """The value of a saved tensor's node, after what the plan recomputes at this point."""
        if slot not in self._begun:
            self._begun.add(slot)
            for rerun in self._directions.reruns.get(slot, ()):
                self._rerun(rerun)
        return node.value if node.value is not None else self._made_now(node)

    def slot_released(self, slot: int) -> None:
        """Autograd let go of a saved tensor; one that was never read may stand for others that will be."""
        if slot in self._begun:
            self._release(self._directions.instance[slot])

    def _rerun(self, rerun: Rerun) -> None:
        recipe = self.recipes.get(rerun.op)
        if recipe is None:
            return  # The forward pass ended or departed before it.
        made = self._run(recipe)
        keeps = dict(rerun.keeps)
        for node, tensor in zip(recipe.nodes, made, strict=True):
            if node.number in keeps and not node.is_settled and self._pending[node.number, keeps[node.number]] > 0:
                node.value, node.instance = tensor, keeps[node.number]
        del made
        if not _private.keeps_graph():
            for instance in rerun.uses:
                self._release(instance)

    def _release(self, instance: tuple[int, int]) -> None:
        number, _ = instance
        self._pending[instance] -= 1
        node = self.nodes.get(number)
        if node is None or node.is_settled or node.value is None:
            return
        # Reads of earlier instances that are still to come read this one.
        if all(self._pending[number, earlier] <= 0 for earlier in range(node.instance + 1)):
            node.value = None

    def _run(self, recipe: Recipe) -> list[torch.Tensor]:
        missing = [made.node for made in recipe.arguments() if _is_missing(made.node)]
        return recipe.run(values_of(missing) if missing else {})

    def _made_now(self, node: Node) -> torch.Tensor:
        return values_of([node])[id(node)]


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
            open_nodes.extend(made.node for made in node.recipe.arguments() if _is_missing(made.node))
    values: dict[int, torch.Tensor] = {}
    # Writes in place come later than what they write to, and may read what was made in between.
    for recipe in sorted(needed.values(), key=lambda recipe: recipe.last_number):
        made = recipe.run(values)
        values.update((id(node), tensor) for node, tensor in zip(recipe.nodes, made, strict=True))
    return values


def _is_missing(node: Node) -> bool:
    return node.value is None and node.before_write is None


def read_saved(value: torch.Tensor, geometry: Geometry, version: int) -> torch.Tensor:
    """What autograd saved, from a value of its storage.

    Raises:
        RuntimeError: where the storage was written since, as plain autograd would.
    """
    if value._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {geometry.shape} is at version {value._version}; expected version {version} instead"
        )
    with torch.no_grad():
        return geometry.within(value)


class SavedTensor:
    """What stands in autograd's graph for a tensor that the plan keeps or makes again."""

    __slots__ = ("_geometry", "_node", "_slot", "_state", "_version")

    def __init__(self, state: StepState, slot: int, node: Node, tensor: torch.Tensor) -> None:
        self._state = state
        self._slot = slot
        self._node = node
        self._geometry = Geometry.of(tensor)
        self._version = tensor._version

    def read(self) -> torch.Tensor:
        """The tensor; called when a backward node needs it."""
        node = self._node
        value = self._state.value_for(self._slot, node)
        first_made = (node.instance == 0 or node.is_settled) and value is node.value
        return read_saved(value, self._geometry, self._version if first_made else value._version)

    def __del__(self) -> None:
        self._state.slot_released(self._slot)
