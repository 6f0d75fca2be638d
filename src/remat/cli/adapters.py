"""Which framework a user's object belongs to, and the front end that turns it into a training step.

A front end plugs in with one module, ``remat.<framework>.workload``, which has one function:
``make_workload(made, options) -> remat.running.workload.Workload``. No framework is imported to find out whose an
object is: it can only exist where its framework was imported already.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from remat.running.workload import NotAStep, StepOptions, Workload

# By the package that a class of the object, or a module that a function uses, comes from.
_PACKAGES: Final = {"jax": "jax", "jaxlib": "jax", "tensorflow": "tensorflow", "torch": "torch"}
_WHAT_TO_RETURN: Final = (
    "return a Keras model, a PyTorch module, or a tuple of a loss function and its arguments, such as (loss, params, "
    "batch)"
)


def make_workload(made: object, options: StepOptions) -> Workload:
    """The training step in what a callable returned.

    Raises:
        NotAStep: if there is none in it, or if it is not clear whose it is.
        RematError: where the front end cannot use it.
    """
    framework = framework_of(made)
    module: Any = importlib.import_module(f"remat.{framework}.workload")
    workload: Workload = module.make_workload(made, options)
    return workload


def framework_of(made: object) -> str:
    """The front end for an object: "keras", "tensorflow", "jax" or "torch".

    Raises:
        NotAStep: if it belongs to none, or to several.
    """
    if _is_a("keras", "Model", made):
        return "keras"
    if _is_a("torch.nn", "Module", made):
        return "torch"
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise NotAStep(f"this returned {_described(made)}, no training step; {_WHAT_TO_RETURN}")
    function, *arguments = made
    if _is_a("torch.nn", "Module", function):
        return "torch"
    found = set(_frameworks_of_leaves(arguments)) or set(_frameworks_of_code(function))
    if len(found) != 1:
        which = " and ".join(sorted(found)) or "none of jax, tensorflow and torch"
        raise NotAStep(
            f"the loss function {getattr(function, '__name__', function)!r} and its arguments belong to {which}; give "
            "the arguments as arrays of one framework"
        )
    return found.pop()


def _is_a(module: str, name: str, made: object) -> bool:
    loaded = sys.modules.get(module)
    kind = getattr(loaded, name, None)
    return isinstance(kind, type) and isinstance(made, kind)


def _frameworks_of_leaves(value: object, depth: int = 0) -> Iterator[str]:
    for base in type(value).__mro__:
        if framework := _PACKAGES.get(base.__module__.partition(".")[0]):
            yield framework
            return
    if depth > 20:
        return
    if isinstance(value, Mapping):
        inner: Any = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    else:
        inner = getattr(value, "__dict__", {}).values()  # Dataclasses, modules of Equinox.
    for item in inner:
        yield from _frameworks_of_leaves(item, depth + 1)


def _frameworks_of_code(function: Any) -> Iterator[str]:
    """What the code of a function uses, for arguments that are all numbers or NumPy arrays."""
    function = getattr(function, "__wrapped__", function)
    code, variables = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    for name in getattr(code, "co_names", ()):
        module = getattr(variables.get(name), "__name__", "")
        if framework := _PACKAGES.get(str(module).partition(".")[0]):
            yield framework


def _described(made: object) -> str:
    if made is None:
        return "None"
    if isinstance(made, tuple):
        if not made:
            return "an empty tuple"
        first = type(made[0]).__name__
        return f"a tuple that begins with {'an' if first[0] in 'aeiou' else 'a'} {first}, not with a function"
    name = type(made).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
