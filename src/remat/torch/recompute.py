"""``recompute``: a function or a module whose activations are dropped and made again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from remat.running.recompute_switch import is_switched_off
from remat.torch import _private
from remat.torch.emit.recipes import (
    Activation,
    ActivationTable,
    Given,
    Recipe,
    check_version,
    kept,
    new_storages,
    read_kept,
    tensors_in,
    values_of,
)
from remat.torch.trace import op_facts

_F = TypeVar("_F", bound=Callable[..., Any])


def recompute(f: _F) -> _F:
    """Drop what autograd saves inside of ``f`` and make it again when the backward pass needs it.

    What runs again are the operators below autograd, not the Python of ``f``: its side effects, hooks and BatchNorm
    updates happen once, autocast stays as it was, and dropout draws the same numbers. Random draws on a GPU, custom
    operators and whatever else may not run twice are kept. In graph mode the plan decides what runs again, of what is
    marked as of everything else. ``REMAT_RECOMPUTE=0`` in the environment switches it off.

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


_marks_count = True


@contextlib.contextmanager
def without_marks() -> Iterator[None]:
    """Inside, what is marked runs as it is: where graph mode captures it, for the plan says what runs again."""
    global _marks_count
    before, _marks_count = _marks_count, False
    try:
        yield
    finally:
        _marks_count = before


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _marks_count or is_switched_off() or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        watcher = _CallWatcher()
        with watcher, torch.autograd.graph.saved_tensors_hooks(watcher.pack, _unpack):
            return function(*args, **kwargs)

    return run


class _CallState:
    """What a call leaves behind for the backward pass.

    Attributes:
        wanted: by address: activations that autograd has still to read, and how many saved tensors read each.
    """

    def __init__(self) -> None:
        self.wanted: dict[int, tuple[Activation, int]] = {}
        self._recipes: list[Recipe] = []
        self._is_made = False

    def __del__(self) -> None:
        for recipe in self._recipes:
            recipe.take_apart()

    def end_of_call(self, recipes: list[Recipe]) -> None:
        """The call is over, and these are its recipes. Those that no saved tensor needs are taken apart now."""
        needed: dict[int, Recipe] = {}
        waiting = [one for one, _ in self.wanted.values()]
        while waiting:
            recipe = waiting.pop().recipe
            if recipe is not None and id(recipe) not in needed:
                needed |= {id(call): call for call in (recipe, *recipe.writes)}
                waiting += recipe.arguments()
        self._recipes = list(needed.values())
        for recipe in recipes:
            if id(recipe) not in needed:
                recipe.take_apart()

    def value_of(self, activation: Activation) -> torch.Tensor:
        """The value of an activation. The first call makes the values of all activations that autograd will read."""
        if not self._is_made:
            self._is_made = True
            activations = [one for one, _ in self.wanted.values() if one.value is None]
            for address, tensor in values_of(activations).items():
                if address in self.wanted:
                    self.wanted[address][0].value = tensor
        return activation.value if activation.value is not None else values_of([activation])[id(activation)]

    def add(self, activation: Activation) -> None:
        """One more saved tensor reads this activation."""
        self.wanted[id(activation)] = (activation, self.wanted.get(id(activation), (activation, 0))[1] + 1)

    def drop(self, activation: Activation) -> None:
        """One saved tensor less."""
        _, count = self.wanted[id(activation)]
        self.wanted[id(activation)] = (activation, count - 1)
        if count == 1:
            del self.wanted[id(activation)]
            if self._is_made and activation.recipe is not None and not activation.is_settled:
                activation.value = None


class _Packed:
    """What stands in autograd's graph for a tensor that is made again."""

    __slots__ = ("_activation", "_place", "_state", "_version")

    def __init__(self, state: _CallState, activation: Activation, tensor: torch.Tensor) -> None:
        self._state = state
        self._activation = activation
        self._place = activation.place_of(tensor)
        self._version = activation.version_of(tensor)
        state.add(activation)

    def read(self) -> torch.Tensor:
        """The tensor; called when a backward node needs it."""
        value = self._state.value_of(self._activation)
        if self._activation.is_settled or self._activation.recipe is None:
            check_version(value, self._version, self._place[0])
        return self._activation.part(value, self._place)

    def __del__(self) -> None:
        self._state.drop(self._activation)


def _unpack(packed: Any) -> Any:
    return packed.read() if type(packed) is _Packed else read_kept(packed)


class _CallWatcher(_private.TorchDispatchMode):
    """Sees the operators of one call, below autograd, and notes how each can be run again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = _CallState()
        self._table = ActivationTable()
        self._saved: set[int] = set()
        self._recipes: list[Recipe] = []
        # By storage: what calls that may run again read there of tensors that nothing else keeps as they were.
        self._readers: dict[int, list[tuple[Given, Any]]] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._readers.clear()  # Autograd holds on to this object with what it saves.
        self._state.end_of_call(self._recipes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op_facts.is_view(func) or _private.is_silent(func) or _private.in_backward_pass():
            return func(*args, **kwargs)
        inputs = tensors_in((*args, *kwargs.values()))
        on_gpu = not all(t.is_cpu or t.is_meta for t in inputs)
        strided = all(t.layout is torch.strided for t in inputs)
        writes = () if op_facts.is_plain(func) else op_facts.written(func, args, kwargs)
        written = [(tensor, activation) for tensor in writes if (activation := self._table.of(tensor)) is not None]
        untouched = len(written) == 1 and not (written[0][1].is_read or id(written[0][1]) in self._saved)
        recipe = None
        if strided and op_facts.may_repeat(func, args, kwargs, on_gpu=on_gpu):
            recipe = self._table.call(len(self._recipes), func, args, kwargs)
            if recipe is not None:
                self._recipes.append(recipe)
        for tensor, activation in written:
            if recipe is not None and activation.recipe is not None and untouched:
                activation.recipe.writes.append(recipe)
                activation.is_read = False  # Only the write that belongs to its own recipe reads it.
            else:
                self._table.settle(activation, tensor)
        for tensor in writes:
            for given, reader in self._readers.pop(_private.storage_key(tensor.untyped_storage()), ()):
                given.keep(reader)
        out = func(*args, **kwargs)
        outputs = tensors_in((out,))
        for place in new_storages(outputs, inputs):
            activation = Activation(len(self._recipes), outputs[place])
            if recipe is not None:
                activation.recipe = recipe
                recipe.activations.append(activation)
                recipe.outputs.append(place)
            else:
                activation.hold(outputs[place])
            self._table.add(outputs[place], activation)
        if recipe is not None and (recipe.activations or (untouched and written)):
            for given in recipe.given():
                self._readers.setdefault(_private.storage_key(given.tensor.untyped_storage()), []).append((given, func))
        return out

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves."""
        activation = self._table.of(tensor) if type(tensor) is torch.Tensor else None
        if activation is None or tensor.is_conj() or tensor.is_neg():
            return kept(tensor)
        self._saved.add(id(activation))
        return _Packed(self._state, activation, tensor)
