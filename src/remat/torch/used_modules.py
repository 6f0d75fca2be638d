"""The modules that a loss function uses, found in what its code names."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

_LIBRARY: Final = "torch"
"""What belongs to PyTorch names no module of the user's, and names thousands of other things."""


def used_modules(function: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[nn.Module]:
    """The modules that a function is, is a method of, is given, or names.

    A name is one of its closure, a global one, or an attribute of an object, a namespace or a Python module that it
    names; lists, dictionaries, ``functools.partial`` and functions that it calls are looked into. Modules inside of
    those that are found are not listed.

    Args:
        function: the function.
        args: its arguments.
        kwargs: those by name.
    """
    found: dict[nn.Module, None] = {}
    seen: dict[tuple[int, frozenset[str]], Any] = {}  # What was looked at stays, so that no other thing gets its id.
    if not isinstance(function, _PLAIN):
        function = getattr(function, "__call__", None)  # noqa: B004
    nothing: frozenset[str] = frozenset()
    waiting: list[tuple[Any, frozenset[str]]] = [(one, nothing) for one in (function, *args, *(kwargs or {}).values())]
    waiting.reverse()
    while waiting:
        one, names = waiting.pop()
        if (id(one), names) in seen:
            continue
        seen[id(one), names] = one
        if isinstance(one, nn.Module):
            found[one] = None
        else:
            waiting += list(_named_in(one, names))[::-1]
    return list(found)


_PLAIN: Final = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, nn.Module)


def _named_in(one: Any, names: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
    """What to look at next, and the names of attributes that matter there."""
    if isinstance(one, functools.partial):
        yield from ((item, names) for item in (one.func, *one.args, *one.keywords.values()))
    elif isinstance(one, types.MethodType):
        _, names = _names_of(one.__func__)
        yield from ((item, names) for item in (one.__self__, one.__func__))
    elif isinstance(one, types.FunctionType):
        yield from _named_in_function(one)
    elif isinstance(one, Mapping):
        yield from ((item, names) for item in one.values())
    elif isinstance(one, list | tuple | set | frozenset):
        yield from ((item, names) for item in one)
    elif not isinstance(one, torch.Tensor | type) and not _is_of_library(one):
        of_object, of_type = getattr(one, "__dict__", {}), {} if isinstance(one, types.ModuleType) else vars(type(one))
        for name in names:
            if name in of_object:
                yield of_object[name], names
            elif isinstance(method := of_type.get(name), types.FunctionType):
                yield types.MethodType(method, one), names


def _named_in_function(function: types.FunctionType) -> Iterator[tuple[Any, frozenset[str]]]:
    if _is_of_library(function):
        return
    global_names, names = _names_of(function)
    yield getattr(function, "remat_module", None), names
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents, names
        except ValueError:  # It is not filled yet.
            continue
    yield from ((function.__globals__[name], names) for name in global_names if name in function.__globals__)


def _names_of(function: Any) -> tuple[list[str], frozenset[str]]:
    """The global names and the names of attributes in a function's code, and in that of functions inside of it."""
    codes = [getattr(function, "__code__", None)]
    global_names: dict[str, None] = {}
    attributes: set[str] = set()
    while codes:
        code = codes.pop()
        if not isinstance(code, types.CodeType):
            continue
        codes += code.co_consts
        for one in dis.get_instructions(code):
            if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                global_names[one.argval] = None
            elif one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes.add(one.argval)
    return list(global_names), frozenset(attributes)


def _is_of_library(one: Any) -> bool:
    name = one.__name__ if isinstance(one, types.ModuleType) else getattr(one, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == _LIBRARY
