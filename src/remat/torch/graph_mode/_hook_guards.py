"""Hooks that come once a step was captured: one check for a module and all modules inside of it, one for global hooks.

Dynamo has a guard for each of the six dictionaries of hooks that a module has. Where kernels are small, their memory is
no longer in the processor's cache when the next step comes, and they take 1.5 us a module. What stands here takes a
third of that, and sees the same: it looks into the dictionaries that the modules have at that moment. It sees global
hooks as well (``register_module_forward_hook``), which Dynamo reads while it captures and never again.
"""

from __future__ import annotations

import functools
import operator
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from torch._dynamo.guards import GuardBuilder
from torch.nn.modules import module

_GUARD: Final = "EMPTY_NN_MODULE_HOOKS_DICT"
"""The method that Dynamo calls where captured code found such a dictionary empty."""

# How Dynamo writes what it looks at: ``L['self']._modules['0']._forward_hooks``.
_MODULES_INSIDE: Final = re.compile(r"((?:\._modules\['[^']+'\])*)\.(_\w+hooks\w*)$")
_NAME: Final = re.compile(r"\['([^']+)'\]")

# By what they are keyed with, which no two hooks share.
_GLOBAL_HOOKS: Final = [
    value
    for name, value in vars(module).items()
    if name.startswith(("_global_forward", "_global_backward")) and isinstance(value, dict)
]

_Path: TypeAlias = tuple[str, ...]
_Values: TypeAlias = Mapping[str, Any]


@contextmanager
def guarded_together() -> Iterator[None]:
    """Inside, Dynamo's guards for hooks of modules are these."""
    builder: Any = GuardBuilder
    own = getattr(builder, _GUARD, None)
    if own is None:  # A version with other guards; they stay.
        yield
        return
    setattr(builder, _GUARD, functools.wraps(own)(functools.partial(_guard, own)))
    try:
        yield
    finally:
        setattr(builder, _GUARD, own)


def _guard(own: Callable[[Any, Any], None], builder: Any, guard: Any) -> None:
    source = guard.originating_source
    inside = _MODULES_INSIDE.search(_written(source))
    if inside is None:
        own(builder, guard)
        return
    top = _written(source)[: inside.start()]
    while _written(source) != top:
        source = source.base
    if builder not in _checks:
        _checks[builder] = {}
        before = _global_hooks()
        said = f"global hooks of modules are {before}"
        _add(builder.guard_manager.root, lambda _: _global_hooks() == before, said)
    known = _checks[builder]
    if top not in known:
        known[top] = Unhooked()
        said = f"no hooks of {top} and of the modules inside of it"
        _add(builder.get_guard_manager_from_source(source), known[top], said)
    known[top].add(tuple(_NAME.findall(inside[1])), inside[2])


# By what builds the guards of one capture, by the top module: its check.
_checks: weakref.WeakKeyDictionary[Any, dict[str, Unhooked]] = weakref.WeakKeyDictionary()


def _add(manager: Any, check: Callable[[Any], bool], said: str) -> None:
    try:
        manager.add_lambda_guard(check, [said], None)
    except TypeError:  # PyTorch 2.9 is told no stack.
        manager.add_lambda_guard(check, [said])


def _global_hooks() -> list[list[int]]:
    return [*map(list, _GLOBAL_HOOKS)]


def _written(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)  # A method up to PyTorch 2.9.


class Unhooked:
    """Whether a module, and modules inside of it, have no hooks of some kinds. It keeps none of them alive."""

    def __init__(self) -> None:
        # By the names from the top module to the one that has them: the names of the dictionaries.
        self._kinds: dict[_Path, tuple[str, ...]] = {(): ()}
        self._has_none: Callable[[_Values], bool] | None = None

    def add(self, path: _Path, kind: str) -> None:
        """Look at one more dictionary of hooks.

        Args:
            path: the names from the top module to the one that has it.
            kind: the name of the dictionary.
        """
        for end in range(len(path)):
            self._kinds.setdefault(path[:end], ())
        self._kinds[path] = (*self._kinds.get(path, ()), kind)
        self._has_none = None

    def __call__(self, top: Any) -> bool:
        """Whether a top module is as it was; an error where modules are missing, which Dynamo takes as no."""
        if self._has_none is None:
            self._has_none = _check_of(self._kinds)
        return self._has_none(vars(top))


def _check_of(kinds: dict[_Path, tuple[str, ...]]) -> Callable[[_Values], bool]:
    """The check of a module, given its attributes.

    Its loops are Python's own, in C: the processor then waits for the memory of many modules at once. A loop over
    modules in Python takes four times as long.
    """
    inside: dict[_Path, list[str]] = {}
    for path in kinds:
        if path:
            inside.setdefault(path[:-1], []).append(path[-1])
    # In the order in which the check finds the modules: those around come first.
    places: dict[_Path, int] = {(): 0}
    steps = []
    for around in sorted(inside, key=len):
        steps.append((places[around], _several(inside[around])))
        for name in inside[around]:
            places[(*around, name)] = len(places)
    alike: dict[tuple[str, ...], list[int]] = {}
    for path, names in kinds.items():
        if names:
            alike.setdefault(tuple(sorted(names)), []).append(places[path])
    groups = [(_several(found), _several(names)) for names, found in alike.items()]

    def has_none(top: _Values) -> bool:
        found = [top]
        for place, modules_of in steps:
            found += map(vars, modules_of(found[place]["_modules"]))
        return not any(any(map(any, map(hooks_of, values_of(found)))) for values_of, hooks_of in groups)

    return has_none


def _several(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """What gets the items of some keys. With one key, an itemgetter returns no tuple."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    (key,) = keys
    return lambda values: (values[key],)
