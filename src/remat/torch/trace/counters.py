"""Numbers that a step's own Python code counts up in its modules, as they were before the step was traced.

A trace runs that code once more than training does. A module that scales its loss by the number of its calls would then
train with other numbers than without a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from remat.torch.used_modules import used_modules

_NUMBERS: Final = (int, float)
"""Exactly these types: truth values are flags, which often say that something outside of the module was set up."""


@contextmanager
def numbers_put_back(loss_fn: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """Inside, numbers in the modules of a loss function may change; afterwards they are as before.

    Where a module was set up meanwhile (hooks, parameters or modules came or went), all stay as they are: a number may
    say that this was done.
    """
    modules = list(dict.fromkeys(one for used in used_modules(loss_fn, args) for one in used.modules()))
    before = [(module, _numbers_of(module), _set_up(module)) for module in modules]
    try:
        yield
    finally:
        if all(_set_up(module) == known for module, _, known in before):
            for module, numbers, _ in before:
                now = _numbers_of(module)
                vars(module).update({name: value for name, value in numbers.items() if name in now})


def _numbers_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _NUMBERS}


def _set_up(module: nn.Module) -> list[Any]:
    """What tells that a module was set up: its hooks, and the names of its parameters and modules."""
    return [type(module), *(list(value) for name, value in vars(module).items() if _is_of_set_up(name, value))]


def _is_of_set_up(name: str, value: Any) -> bool:
    return isinstance(value, dict) and (name in ("_parameters", "_modules") or "_hooks" in name)
