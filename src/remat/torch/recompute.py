"""``recompute``: a function or a module whose activations are dropped and made again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from remat.torch import _private
from remat.torch.emit.recipes import Node, new_storages, tensors_in, values_of
from remat.torch.emit.replay import NodeTable, check_version, kept, read_kept
from remat.torch.trace import op_facts

_F = TypeVar("_F", bound=Callable[..., Any])


def recompute(f: _F) -> _F:
    """Drop what autograd saves inside of ``f`` and make it again when the backward pass needs it.

    What runs again are the operators below autograd, not the Python of ``f``: its side effects, hooks and BatchNorm
    updates happen once, autocast stays as it was, and dropout draws the same numbers. Random draws on a GPU, custom
    operators and whatever else may not run twice are kept.

    Args:
        f: a function, a module (its ``forward`` is replaced on the instance), or a class of modules.

    Returns:
        The function, or the same module or class.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(f, torch.nn.Module) or (isinstance(f, type) and issubclass(f, torch.nn.Module)):
        module: Any = f
        module.forward = _wrapped(module.forward)
        return f
    if isinstance(f, type) or not callable(f):
        raise TypeError(f"recompute takes a function or a torch.nn.Module, not {f!r}")
    return cast(_F, _wrapped(f))


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        region = _Region()
        with region, torch.autograd.graph.saved_tensors_hooks(region.pack, _unpack):
            return function(*args, **kwargs)

    return run


class _Memory:
    """What a region keeps: recipes, and after the first read the values that are still wanted."""

    def __init__(self) -> None:
        self.wanted: dict[int, tuple[Node, int]] = {}
        self._is_made = False

    def value_of(self, node: Node) -> torch.Tensor:
        """The value of a node; the first call makes those of all nodes that autograd will read."""
        if not self._is_made:
            self._is_made = True
            nodes = [one for one, _ in self.wanted.values() if one.value is None]
            for address, tensor in values_of(nodes).items():
                if address in self.wanted:
                    self.wanted[address][0].value = tensor
        return node.value if node.value is not None else values_of([node])[id(node)]

    def add(self, node: Node) -> None:
        """One more saved tensor reads this node."""
        self.wanted[id(node)] = (node, self.wanted.get(id(node), (node, 0))[1] + 1)

    def drop(self, node: Node) -> None:
        """One saved tensor less."""
        _, count = self.wanted[id(node)]
        self.wanted[id(node)] = (node, count - 1)
        if count == 1:
            del self.wanted[id(node)]
            if self._is_made and node.recipe is not None and not node.is_settled:
                node.value = None


class _Saved:
    __slots__ = ("_memory", "_node", "_place", "_version")

    def __init__(self, memory: _Memory, node: Node, tensor: torch.Tensor) -> None:
        self._memory = memory
        self._node = node
        self._place = node.place_of(tensor)
        self._version = tensor._version
        memory.add(node)

    def read(self) -> torch.Tensor:
        """The tensor; called when a backward node needs it."""
        value = self._memory.value_of(self._node)
        if self._node.is_settled or self._node.recipe is None:
            check_version(value, self._version, self._place[0])
        return self._node.part(value, self._place)

    def __del__(self) -> None:
        self._memory.drop(self._node)


def _unpack(saved: Any) -> Any:
    return saved.read() if type(saved) is _Saved else read_kept(saved)


class _Region(_private.TorchDispatchMode):
    """Sees the operators of one call, below autograd, and notes how each can be run again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = _Memory()
        self._nodes = NodeTable()
        self._saved: set[int] = set()
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or _private.is_silent(func) or _private.in_backward_pass():
            return func(*args, **kwargs)
        inputs = tensors_in((*args, *kwargs.values()))
        on_gpu = not all(t.is_cpu or t.is_meta for t in inputs)
        strided = all(t.layout is torch.strided for t in inputs)
        writes = () if op_facts.is_plain(func) else op_facts.written(func, args, kwargs)
        written = [(tensor, node) for tensor in writes if (node := self._nodes.of(tensor)) is not None]
        untouched = len(written) == 1 and not (written[0][1].is_read or id(written[0][1]) in self._saved)
        recipe = None
        if strided and op_facts.may_repeat(func, args, kwargs, on_gpu=on_gpu):
            self._count += 1
            recipe = self._nodes.call(self._count, func, args, kwargs)
        for tensor, node in written:
            if recipe is not None and node.recipe is not None and untouched:
                node.recipe.writes.append(recipe)
                node.is_read = False  # By nobody but itself.
            else:
                self._nodes.settle(node, tensor)
        out = func(*args, **kwargs)
        outputs = tensors_in((out,))
        for place in new_storages(outputs, inputs):
            node = Node(self._count, outputs[place])
            if recipe is not None:
                node.recipe = recipe
                recipe.nodes.append(node)
                recipe.outputs.append(place)
            else:
                node.hold(outputs[place])
            self._nodes.add(outputs[place], node)
        return out

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves."""
        node = self._nodes.of(tensor) if type(tensor) is torch.Tensor else None
        if node is None or tensor.is_conj() or tensor.is_neg():
            return kept(tensor)
        self._saved.add(id(node))
        return _Saved(self._memory, node, tensor)
