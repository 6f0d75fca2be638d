"""What is kept of a forward pass for its backward pass, and when the rest is made again.

Nothing here can give a wrong number: a tensor is either the one that the forward pass made, or made again by the same
operator from the same inputs. The plan only says when something is kept, made and let go. Whatever is asked for in
another order than planned (``retain_graph``, parts of the graph) is made on the spot.
"""

from __future__ import annotations

from typing import Any

import torch

from remat.torch import _private
from remat.torch.emit.eager_order import Directions, Rerun
from remat.torch.emit.recipes import Given, Made, Node, Recipe, Several, values_of
from remat.torch.trace import op_facts


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
            node.hold(tensor)
        node.is_settled = True
        del self._found[_private.storage_key(tensor.untyped_storage())]

    def call(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
        """A call about to be made, so that it can be run again: what has a node by reference, all else as it is."""
        state = None
        if not op_facts.is_plain(func):
            state = op_facts.random_state(func, args, kwargs) if op_facts.is_random(func, args, kwargs) else None
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
        return Recipe(number, func, again, named, tensors, state)

    def _reference(self, value: Any) -> Made | Given | Several | None:
        """What stands in a recipe for an argument with tensors."""
        if isinstance(value, torch.Tensor):
            node = self.of(value)
            return Given(value) if node is None or (node.value is None and node.recipe is None) else Made(node, value)
        if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
            return Several([one if (part := self._reference(one)) is None else part for one in value])
        return None


class StepState:
    """One forward pass: its nodes, and which of the planned reads are still to come."""

    def __init__(self, directions: Directions) -> None:
        self._directions = directions
        self._pending = dict(directions.pending)
        self._read: set[int] = set()
        self._begun: set[int] = set()
        self.nodes: dict[int, Node] = {}
        self.recipes: dict[int, Recipe] = {}

    def value_for(self, slot: int, node: Node) -> torch.Tensor:
        """The value of a saved tensor's node, after what the plan recomputes at this point."""
        self._read.add(slot)
        op = self._directions.begins.get(slot)
        if op is not None and op not in self._begun:
            self._begun.add(op)
            with _private.BelowAutograd():
                for rerun in self._directions.reruns[op]:
                    self._rerun(rerun)
        return node.value if node.value is not None else values_of([node])[id(node)]

    def slot_released(self, slot: int) -> None:
        """Autograd let go of a saved tensor; one that was never read may stand for others that will be."""
        if slot in self._read:
            self._release(self._directions.instance[slot])

    def _rerun(self, rerun: Rerun) -> None:
        recipe = self.recipes.get(rerun.op)
        if recipe is None:
            return  # The forward pass ended or departed before it.
        missing = recipe.missing()
        made = recipe.run(values_of(missing) if missing else {})
        for node, tensor in zip(recipe.nodes, made, strict=True):
            instance = rerun.keeps.get(node.number)
            if instance is not None and not node.is_settled and self._pending[node.number, instance] > 0:
                node.value, node.instance = tensor, instance
        del made
        if not _private.keeps_graph():
            for used in rerun.uses:
                self._release(used)

    def _release(self, instance: tuple[int, int]) -> None:
        pending = self._pending
        pending[instance] -= 1
        number = instance[0]
        node = self.nodes.get(number)
        if node is None or node.is_settled or node.value is None:
            return
        # Reads of earlier instances that are still to come read this one.
        for earlier in range(node.instance, -1, -1):
            if pending.get((number, earlier), 0) > 0:
                return
        node.value = None


class SavedTensor:
    """What stands in autograd's graph for a tensor that the plan makes again."""

    __slots__ = ("_node", "_place", "_slot", "_state", "_version")

    def __init__(self, state: StepState, slot: int, node: Node, tensor: torch.Tensor) -> None:
        self._state = state
        self._slot = slot
        self._node = node
        self._place = node.place_of(tensor)
        self._version = tensor._version

    def read(self) -> torch.Tensor:
        """The tensor; called when a backward node needs it."""
        node = self._node
        value = self._state.value_for(self._slot, node)
        if (node.instance == 0 or node.is_settled) and value is node.value:
            check_version(value, self._version, self._place[0])
        return node.part(value, self._place)

    def __del__(self) -> None:
        self._state.slot_released(self._slot)


def kept(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What stands in autograd's graph for a tensor that is kept: with hooks PyTorch leaves its version to us."""
    return tensor, tensor._version


def read_kept(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The tensor that was kept.

    Raises:
        RuntimeError: where it was written since, as plain autograd would.
    """
    tensor, version = saved
    check_version(tensor, version, tensor.shape)
    return tensor


def check_version(value: torch.Tensor, version: int, shape: tuple[int, ...]) -> None:
    """Was a tensor that autograd saved written since?

    Raises:
        RuntimeError: then, as plain autograd would.
    """
    if value._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(shape)} is at version {value._version}; expected version {version} instead"
        )
