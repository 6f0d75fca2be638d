"""``recompute``: a function whose activations are dropped and made again when the backward pass needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import jax

from remat.core.errors import UnsupportedStep
from remat.jax import _private
from remat.jax.context import plan_decides
from remat.jax.recompute.call import Policy, RecomputedCall
from remat.running.recompute_switch import is_switched_off

F = TypeVar("F", bound=Callable[..., Any])


@overload
def recompute(
    fun: F,
    *,
    policy: Policy | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    enabled: bool | Callable[[], bool] = True,
) -> F: ...
@overload
def recompute(
    fun: None = None,
    *,
    policy: Policy | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    enabled: bool | Callable[[], bool] = True,
) -> Callable[[F], F]: ...


def recompute(
    fun: Any = None,
    *,
    policy: Policy | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    enabled: bool | Callable[[], bool] = True,
) -> Any:
    """``jax.checkpoint`` that saves memory on every platform: activations are dropped and recomputed.

    On a CPU, XLA undoes ``jax.checkpoint`` unless its region is the body of a loop. Here the second computation hangs
    on the incoming gradient, which no compiler undoes. Works under ``jit``, ``grad``, ``vmap``, ``scan`` and
    ``shard_map``, in forward mode and for higher derivatives; calls may be nested. What must not run twice
    (collectives, callbacks, kernels of one's own) runs once, and its results are kept.

    Inside a function that remat plans (``value_and_grad`` or ``jit`` with a budget, ``trace``) the region dissolves, as
    those of ``jax.checkpoint`` do: the plan decides what is computed again.

    Args:
        fun: any function of pytrees. Arrays are traced; whatever else an argument holds (None, numbers, flags, names,
            functions) is part of the function, so Python may decide by it. Arrays that it closes over are found. None
            to use it as a decorator with arguments.
        policy: which results to keep, one of ``jax.checkpoint_policies``; None keeps the arguments only.
        prevent_cse: as in ``jax.checkpoint``: False says that nothing can be merged here, in the body of a loop.
        static_argnums: positional arguments that are part of the function although they are arrays.
        static_argnames: likewise, by name.
        enabled: False to run plainly, or a function that says so at each call. ``REMAT_RECOMPUTE=0`` in the environment
            switches all off.

    Returns:
        A function with the same signature.

    Raises:
        TypeError: where ``fun`` is no function.
        UnsupportedStep: at a call, where the function has effects other than debugging output.
    """
    options: dict[str, Any] = {
        "policy": policy,
        "prevent_cse": prevent_cse,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "enabled": enabled,
    }
    if fun is None:
        return functools.partial(recompute, **options)
    if not callable(fun):
        raise TypeError(f"recompute takes a function, not {type(fun).__name__}")
    names = frozenset((static_argnames,) if isinstance(static_argnames, str) else static_argnames)
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    @functools.wraps(fun)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if plan_decides() or is_switched_off() or not (enabled() if callable(enabled) else enabled):
            return fun(*args, **kwargs)
        static = {_position(number, len(args)) for number in numbers}
        return _call(fun, args, kwargs, static | names, policy, prevent_cse)

    return recomputed


def _position(number: int, count: int) -> int:
    if not -count <= number < count:
        raise ValueError(f"static_argnums names argument {number}, but {count} positional arguments were given")
    return number % count


def _call(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    static: set[int | str],
    policy: Policy | None,
    is_held: bool,
) -> Any:
    places: dict[int | str, Any] = dict(enumerate(args))
    places.update(kwargs)
    given = [place for place in places if place not in static]
    leaves, structure = jax.tree.flatten([places[place] for place in given])
    traced = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def flat(*arrays: Any) -> Any:
        merged = list(leaves)
        for n, array in zip(traced, arrays, strict=True):
            merged[n] = array
        own = {**places, **dict(zip(given, jax.tree.unflatten(structure, merged), strict=True))}
        return fun(*(own[n] for n in range(len(args))), **{name: own[name] for name in kwargs})

    arrays = [leaves[n] for n in traced]
    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    _check_effects(fun, closed)
    results = RecomputedCall(_private.with_constants_as_arguments(closed), policy, is_held)(*closed.consts, *arrays)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _check_effects(fun: Callable[..., Any], closed: Any) -> None:
    unsupported = _private.effects_that_forbid_recomputation(closed)
    if unsupported:
        raise UnsupportedStep(
            f"{getattr(fun, '__name__', fun)!r} has effects that must happen once ({', '.join(unsupported)}), so it "
            "cannot be recomputed; take them out of the function"
        )
