"""What is kept of a forward pass for its backward pass, and when the rest is made again.

Nothing here can give a wrong number: a tensor is either the one that the forward pass made, or made again by the same
operator from the same inputs. The plan only says when something is kept, made and let go. Whatever is asked for in
another order than planned (``retain_graph``, parts of the graph) is made on the spot.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from remat.torch import _private, op_facts
from remat.torch.eager_order import Directions, Rerun
from remat.torch.recipes import Geometry, Node, Recipe, argument, is_missing, values_of


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
        missing = [made.node for made in recipe.arguments() if is_missing(made.node)]
        return recipe.run(values_of(missing) if missing else {})

    def _made_now(self, node: Node) -> torch.Tensor:
        return values_of([node])[id(node)]


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
