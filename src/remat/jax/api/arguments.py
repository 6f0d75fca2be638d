"""How a call is taken apart: which arguments are arrays, which are part of the function, which are given away.

``jax.jit`` names arguments by position and by name. A *place* is either of them: 0 for the first positional argument,
"x" for the keyword argument x.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from remat.jax import _private
from remat.jax.peak import shape_of

Place: TypeAlias = int | str


def places_of(
    fun: Callable[..., Any], numbers: int | Iterable[int] | None, names: str | Iterable[str] | None
) -> frozenset[Place]:
    """The places that a pair of options such as ``static_argnums`` and ``static_argnames`` means.

    As in ``jax.jit``: where only one of the two is given, the signature of the function tells the other, so that an
    argument is meant whether it is passed by position or by name. Negative numbers count from the last parameter.
    """
    parameters = _parameters(fun)
    by_number = {n: p.name for n, p in enumerate(parameters) if p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD}
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    own_numbers = set(_as_tuple(numbers, int))
    if not any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters):
        own_numbers = {n + len(positional) if n < 0 else n for n in own_numbers}
    own_names = set(_as_tuple(names, str))
    if numbers is None:
        own_numbers = {n for n, name in by_number.items() if name in own_names}
    elif names is None:
        own_names = {name for n, name in by_number.items() if n in own_numbers}
    return frozenset((*own_numbers, *own_names))


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # Some callables that are written in C have no signature.
        return []


def _as_tuple(given: Any, kind: type) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, kind) else tuple(given)


def checked_levers(levers: Sequence[str], checkpoints: Sequence[str] | None) -> tuple[str, ...]:
    """The levers as a tuple, or as they are where they are none, for ``Request.check`` to refuse.

    Raises:
        ValueError: for slices beside checkpoints.
    """
    if "split" in levers and checkpoints is not None:
        raise ValueError('checkpoints= says what is kept, and slices keep nothing: leave it out, or "split" in levers=')
    return levers if isinstance(levers, str) else tuple(levers)  # type: ignore[return-value]


def jit_options_of(kind: str, places: Iterable[Place]) -> dict[str, Any]:
    """The places as options of ``jax.jit``: ``kind`` is "static" or "donate"."""
    numbers = tuple(sorted(place for place in places if isinstance(place, int)))
    names = tuple(sorted(place for place in places if isinstance(place, str)))
    return {f"{kind}_argnums": numbers, f"{kind}_argnames": names} if numbers or names else {}


@dataclass(frozen=True)
class Call:
    """The arguments of one call, taken apart.

    Attributes:
        leaves: arrays, tracers or shapes, flat.
        structure: of the arguments without the static ones.
        numbers: positions of the positional arguments that are not static.
        static: the static arguments by their place.
        count: of all positional arguments.
    """

    leaves: list[Any]
    structure: Any
    numbers: tuple[int, ...]
    static: Mapping[Place, Any]
    count: int

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], static: frozenset[Place]) -> Call:
        """Take a call apart."""
        numbers = tuple(number for number in range(len(args)) if number not in static)
        named = {name: value for name, value in kwargs.items() if name not in static}
        fixed: dict[Place, Any] = {number: args[number] for number in range(len(args)) if number in static}
        fixed |= {name: value for name, value in kwargs.items() if name in static}
        leaves, structure = jax.tree.flatten(([args[number] for number in numbers], named))
        return cls(leaves, structure, numbers, fixed, len(args))

    def arguments(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments with other leaves in the place of its own."""
        some, named = jax.tree.unflatten(self.structure, leaves)
        given = dict(zip(self.numbers, some, strict=True))
        args = [given[number] if number in given else self.static[number] for number in range(self.count)]
        return args, {**named, **{place: value for place, value in self.static.items() if isinstance(place, str)}}

    def leaves_at(self, places: frozenset[Place]) -> list[int]:
        """Which leaves belong to the arguments at some places."""
        some, named = jax.tree.unflatten(self.structure, list(range(len(self.leaves))))
        wanted = [each for number, each in zip(self.numbers, some, strict=True) if number in places]
        wanted += [each for name, each in named.items() if name in places]
        return sorted(jax.tree.leaves(wanted))


def shapes_of(leaves: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes, dtypes and, where they are known, shardings of leaves, some of which may be shapes already."""
    return tuple(leaf if isinstance(leaf, jax.ShapeDtypeStruct) else shape_of(leaf) for leaf in leaves)


def kinds_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a function of JAX is traced anew for: shapes, dtypes and whether a dtype is weak."""
    return tuple((one.shape, str(one.dtype), bool(getattr(one, "weak_type", False))) for one in shapes_of(leaves))


def refuse_shapes(leaves: Iterable[Any], caller: str) -> None:
    """Only arrays can be computed with.

    Raises:
        TypeError: where a leaf is a ``jax.ShapeDtypeStruct``.
    """
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"what {caller} returns was called with jax.ShapeDtypeStruct({leaf.shape}, {leaf.dtype}), which has no "
                "values; plan for shapes by its plan_for, lower, trace or eval_shape, and call it with arrays"
            )


def is_any_traced(leaves: Iterable[Any]) -> bool:
    """Is one of the leaves a tracer: does another function call this one while it is traced?"""
    return any(_private.is_traced(leaf) for leaf in leaves)
