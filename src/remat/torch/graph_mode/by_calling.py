"""Captures a function without Dynamo: AOTAutograd calls it, with stand-ins in place of its tensors.

Dynamo follows a function line by line, which takes some .25 s for a layer of Keras, and guards all that it has read. A
function that is called is followed by Python itself. Whoever captures it so has to say what else it depends on, since
nothing is guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import traceback as fx_traceback

from remat.core.errors import RematError
from remat.torch import _private

if TYPE_CHECKING:  # It imports Dynamo, which takes seconds.
    from remat.torch.graph_mode._aot import Backend


class NotCalled(Exception):
    """A function that cannot be captured by calling it. Nothing of it has run. The text says why."""


@dataclass(frozen=True)
class State:
    """The tensors that a function reads and writes beside its arguments, at one call.

    Attributes:
        tensors: these, no two the same.
        names: gives theirs.
        key: what else the function depends on, but for its arguments; a function is captured once for each.
        replaced: given as many others, a context in which the function finds these in their place.
    """

    tensors: Sequence[torch.Tensor]
    names: Callable[[], Sequence[str]]
    key: Hashable
    replaced: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]]


class CalledFunction:
    """A function that is captured, once for each combination of shapes and whatever else it depends on.

    Its arguments are trees of tensors and constants, but for the first one, and so is what it returns.

    Args:
        fn: the function.
        backend: differentiates, plans and compiles what is captured.
        state_of: what the function depends on beside its other arguments, given its first one.
    """

    def __init__(self, fn: Callable[..., Any], backend: Backend, state_of: Callable[[Any], State]) -> None:
        self._fn = fn
        self._backend = backend
        self._state_of = state_of
        self._captured: dict[Hashable, tuple[Callable[..., Any], list[Any]]] = {}

    def __call__(self, first: Any, *args: Any) -> Any:
        """Run the function.

        Raises:
            NotCalled: where it cannot be captured.
        """
        state = self._state_of(first)
        leaves, structure = _private.tree_flatten(args)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        constants = tuple((type(leaf), leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        _check_constants(constant for _, constant in constants)
        inputs = [*state.tensors, *(leaves[place] for place in places)]
        kinds = tuple((one.shape, one.stride(), one.dtype, one.device, one.requires_grad) for one in inputs)
        key = (state.key, kinds, structure, constants)
        if key not in self._captured:
            count = len(state.tensors)

            def on_stand_ins(*stand_ins: torch.Tensor) -> Any:
                given = list(leaves)
                for place, one in zip(places, stand_ins[count:], strict=True):
                    given[place] = one
                with state.replaced(stand_ins[:count]):
                    return self._fn(first, *_private.tree_unflatten(given, structure))

            names = [*state.names(), *(f"batch.{number}" for number in range(len(places)))]
            called = _Called(on_stand_ins)
            try:
                function = self._backend.of_function(called, inputs, names, static=range(count))
                _check_constants(one for one in called.results[0] if one is not _TENSOR)
            except (RematError, NotCalled):
                raise
            except Exception as error:
                raise NotCalled(str(error).partition("\n")[0] or type(error).__name__) from None
            finally:
                called.function = None  # It holds the first batch.
            self._captured[key] = function, called.results
        function, results = self._captured[key]
        tensors = iter(function(*inputs))
        found, made = results
        return _private.tree_unflatten([next(tensors) if one is _TENSOR else one for one in found], made)


@contextmanager
def in_layer(path: str) -> Iterator[None]:
    """Inside a captured function: what is called belongs to this layer."""
    meta = fx_traceback.current_meta
    before = meta.get(_LAYERS)
    meta[_LAYERS] = {path: (path, "")}
    try:
        yield
    finally:
        meta[_LAYERS] = before
        if before is None:
            del meta[_LAYERS]


_LAYERS: Final = "nn_module_stack"  # Where PyTorch itself keeps the modules that a node belongs to.

_TENSOR: Any = object()
"""Stands for a tensor among the results of a function."""

_CONSTANTS: Final = (type(None), bool, int, float, str)


def _check_constants(leaves: Iterable[Any]) -> None:
    for leaf in leaves:
        if type(leaf) not in _CONSTANTS:
            raise NotCalled(f"a {type(leaf).__name__} stands where a tensor or a number is due")


class _Called(torch.nn.Module):
    """The function as AOTAutograd wants it: a module that is given tensors and returns a list of them.

    Attributes:
        results: what it returned last, a leaf for each constant, and how these leaves stand together.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function: Callable[..., Any] | None = function
        self.results: list[Any] = [[], None]

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        assert self.function is not None, "it is called while it is captured, and never again"
        with fx_traceback.preserve_node_meta():
            found, structure = _private.tree_flatten(self.function(*tensors))
        self.results[:] = [_TENSOR if isinstance(one, torch.Tensor) else one for one in found], structure
        return [one for one in found if isinstance(one, torch.Tensor)]
