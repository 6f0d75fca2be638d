"""How a step's operators are called: by PyTorch's own functions where they lead to the same operator, which is quicker.

``torch.ops.aten.mm.default(a, b)`` matches its arguments with a schema at each call; ``torch.mm(a, b)`` is generated
code. Which function leads to which operator is not listed here, but tried: a function is taken if it calls that one
operator with those arguments and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import fx

from remat.torch import _private
from remat.torch._private import OpOverload
from remat.torch.graph_mode import _aot, nodes
from remat.torch.graph_mode.nodes import Fill
from remat.torch.trace import draws, op_facts

_ASK_FOR_GRADIENTS: Final = frozenset({"aten::mkldnn_rnn_layer"})
"""Operators of the forward pass that compute something else where no gradients are wanted."""


def note_state(device: torch.device) -> torch.Tensor:
    """The state of a device's generator."""
    return draws.default_generator(device).get_state()


class Again:
    """A random operator, called with a generator in a state that was noted; other draws do not change.

    Args:
        func: the operator.
    """

    def __init__(self, func: Any) -> None:
        self.func = func
        self.__name__ = f"again_{func.__name__.replace('.', '_')}"
        self.__module__ = __name__
        self.__qualname__ = self.__name__

    def __call__(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the operator drew in that state."""
        func = self.func
        if isinstance(func, Fill) and func.device.type == "cpu":
            generator = torch.Generator()
            generator.set_state(state)
            return func(*args, **kwargs, generator=generator)
        device = func.device if isinstance(func, Fill) else _device_of((args, kwargs))
        return draws.with_state(draws.default_generator(device), state, func, args, kwargs)


def _device_of(arguments: Any) -> torch.device:
    for leaf in _private.tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor | torch.device):
            return leaf.device if isinstance(leaf, torch.Tensor) else leaf
    return torch.device("cpu")


class _WithGradients:
    """An operator whose kernel asks whether gradients are enabled, and prepares for them."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        _private.enable_grad(True)
        try:
            return self._func(*args, **kwargs)
        finally:
            _private.enable_grad(before)


def viewed(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``aten.view``, or a copy where the tensor does not lie as tracing supposed, as eager PyTorch's ``reshape`` makes.

    PyTorch's shape rules suppose, for one, that a batch normalisation's results lie as what it reads; its kernel on a
    CPU makes them contiguous.
    """
    try:
        return tensor.view(shape)
    except RuntimeError:
        return tensor.reshape(shape)


class Calls:
    """The function for each call of a graph."""

    def __init__(self) -> None:
        self._known: dict[Any, Callable[..., Any]] = {}

    def function_of(self, node: fx.Node) -> Callable[..., Any]:
        """What to call for a node; with the node's own arguments."""
        func: Any = node.target
        if not isinstance(func, OpOverload):
            return func  # type: ignore[no-any-return]
        if op_facts.base_name(func) in _ASK_FOR_GRADIENTS:
            return _WithGradients(func._op)
        if func is torch.ops.aten.view.default:
            return viewed
        args, kwargs = nodes.arguments(node)
        key = (func, _kinds(args), tuple((name, _kinds(value)) for name, value in kwargs.items()))
        if key not in self._known:
            self._known[key] = next((one for one in _functions(func) if _leads_to(one, func, args, kwargs)), func._op)
        return self._known[key]


def _kinds(value: Any) -> Any:
    """The types in an argument, by which Python's bindings choose an operator."""
    if isinstance(value, list | tuple):
        return tuple(map(_kinds, value))
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, value.dim() == 0)
    return type(value)


def _functions(func: OpOverload) -> Iterator[Callable[..., Any]]:
    """PyTorch's functions and methods with an operator's name."""
    name = op_facts.base_name(func).partition("::")[2]
    for owner in _private.BOUND_FUNCTIONS:
        found = getattr(owner, name, None)
        if callable(found):
            yield found


def _leads_to(function: Callable[..., Any], func: OpOverload, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does a function call this operator with these arguments, and nothing else?"""
    seen = _Seen()
    try:
        with _private.fake_mode_of(_private.tree_leaves((args, kwargs))), seen, _aot.below_autograd():
            function(*args, **kwargs)
    except Exception:  # Whatever a trial raises, the operator itself is there.
        return False
    if len(seen.calls) != 1 or seen.calls[0][0] is not func:
        return False
    return _bound(func, *seen.calls[0][1:]) == _bound(func, args, kwargs)


def _bound(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments by their places, tensors by what they are; the defaults filled in."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            value = args[place]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            value = argument.default_value
        found.append(_identity(value))
    return found


def _identity(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_identity(one) for one in value]
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    return (isinstance(value, float), value)


class _Seen(_private.TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
