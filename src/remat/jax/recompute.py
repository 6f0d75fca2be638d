"""``recompute``: a function whose activations are dropped, and made again when the backward pass needs them.

A call of such a function is an operation of JAX with a backward pass of its own. That pass reads the arguments through
ties to the incoming gradients, so that no compiler can merge the second computation with the first, or run it early.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, overload

import jax

from remat.core.errors import UnsupportedStep
from remat.jax import _private
from remat.jax._private import ClosedJaxpr, JaxprEqn, Zero
from remat.jax.context import current_tie, plan_decides
from remat.jax.emit import ties
from remat.jax.trace import op_facts
from remat.jax.trace.program import Flattener, alive
from remat.running.recompute_switch import is_switched_off

F = TypeVar("F", bound=Callable[..., Any])

Policy: TypeAlias = Callable[..., Any]
"""One of ``jax.checkpoint_policies``, which say what results are kept."""


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
    (collectives, callbacks, kernels of one's own) runs once, and its results are kept. JAX 0.8 has no forward mode
    here, and under ``vmap`` the gradient of a shared argument is there once for each example.

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


# Compared by identity: it travels beside the residuals, as part of their structure.
@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Backward:
    """The backward pass of one call.

    Attributes:
        of_residuals: takes what is kept and the gradients of the results; gives those of the arguments.
        perturbed: which arguments are differentiated.
    """

    of_residuals: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    perturbed: tuple[bool, ...]


class RecomputedCall(_private.VJPHiPrimitive):
    """One call of a function that keeps its arguments instead of its activations.

    Args:
        jaxpr: the function; it captures nothing.
        policy: what to keep besides, as in ``jax.checkpoint``; None for nothing.
        is_held: must ties keep the second computation apart from the first? In the body of a loop they need not.
    """

    jaxpr: ClosedJaxpr
    policy: Policy | None
    is_held: bool

    def __init__(self, jaxpr: ClosedJaxpr, policy: Policy | None, is_held: bool) -> None:
        self.in_avals = tuple(jaxpr.in_avals)
        self.out_aval = list(jaxpr.out_avals)
        self.effects = jaxpr.effects
        self.params = {"jaxpr": jaxpr, "policy": policy, "is_held": is_held}
        initialise: Any = super().__init__
        initialise()

    def expand(self, *args: Any) -> list[Any]:
        """The forward pass."""
        return list(_private.jaxpr_as_fun(self.jaxpr)(*args))

    def vjp_fwd(self, perturbed: Sequence[bool], /, *args: Any) -> tuple[list[Any], Any]:
        """The forward pass, and what is kept for the backward pass."""
        keeps_some = self.policy is not None or not _all_may_repeat(self.jaxpr)
        function: Any = self._checkpointed if keeps_some else _private.jaxpr_as_fun(self.jaxpr)

        def of_perturbed(*some: Any) -> list[Any]:
            given = iter(some)
            return list(function(*(next(given) if moves else arg for moves, arg in zip(perturbed, args, strict=True))))

        differentiated = [arg for moves, arg in zip(perturbed, args, strict=True) if moves]
        if keeps_some:
            results, pullback = jax.vjp(of_perturbed, *differentiated)
            kept, structure = jax.tree.flatten(pullback)

            def of_kept(residuals: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
                return _private.pulled_back(jax.tree.unflatten(structure, residuals), gradients)
        else:
            results, kept = self.expand(*args), list(args)

            def of_kept(residuals: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
                def again(*some: Any) -> list[Any]:
                    given = iter(some)
                    pairs = zip(perturbed, residuals, strict=True)
                    return list(function(*(next(given) if moves else value for moves, value in pairs)))

                own = [value for moves, value in zip(perturbed, residuals, strict=True) if moves]
                return _private.pulled_back(jax.vjp(again, *own)[1], gradients)

        return results, (kept, _Backward(of_kept, tuple(perturbed)))

    def vjp_bwd(self, residuals: Any, gradients: Sequence[Any], /, *totals: Any) -> None:
        """The backward pass: computes the function again and adds to the gradients of the arguments."""
        kept, backward = residuals
        late = [g for g in gradients if not isinstance(g, Zero)]
        places = [place for place, g in enumerate(gradients) if not isinstance(g, Zero)]

        def from_late(kept: Sequence[Any], late: Sequence[Any]) -> list[Any]:
            known = dict(zip(places, late, strict=True))
            of_residuals: Callable[..., list[Any]] = backward.of_residuals
            return of_residuals(kept, [known.get(n, g) for n, g in enumerate(gradients)])

        closed = jax.make_jaxpr(from_late)(kept, late)
        arguments = [*kept, *late]
        if self.is_held:
            arguments = _held(closed, arguments, len(kept))
        own = iter(_private.jaxpr_as_fun(_without_dead(closed))(*arguments))
        for moves, total in zip(backward.perturbed, totals, strict=True):
            if moves:
                total.accum(next(own))

    @property
    def _checkpointed(self) -> Any:
        """The function as JAX's own ``checkpoint`` treats it, which keeps what must not run twice."""
        return jax.checkpoint(
            _private.jaxpr_as_fun(self.jaxpr), policy=_keeping_once(self.policy), prevent_cse=self.is_held
        )

    # Forward mode and loops have no incoming gradient to wait for. Compilers do not merge across the bodies of loops.

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """Forward mode."""
        return jax.jvp(self._checkpointed, tuple(primals), tuple(map(_private.instantiate_zeros, tangents)))

    def lin(self, perturbed: Sequence[bool], *primals: Any) -> tuple[Any, Any]:
        """The linear map of ``jax.linearize``."""
        del perturbed
        results, linear = jax.linearize(self._checkpointed, *primals)
        return results, (linear,)

    def linearized(self, residuals: Any, *tangents: Any) -> Any:
        """The linear map, applied."""
        (linear,) = residuals
        return linear(*map(_private.instantiate_zeros, tangents))

    def batch(self, axis: Any, args: Sequence[Any], axes: Sequence[int | None]) -> tuple[Any, Any]:
        """Under ``vmap``."""
        whole, has_axis = _private.batched(self.jaxpr, axis, axes)
        if whole.consts:
            args = [*whole.consts, *args]
            whole = _private.with_constants_as_arguments(whole)
        results = RecomputedCall(whole, self.policy, self.is_held)(*args)
        return results, [0 if has else None for has in has_axis]


def _all_may_repeat(closed: ClosedJaxpr) -> bool:
    return all(op_facts.may_repeat(eqn) for eqn in closed.jaxpr.eqns)


def _keeping_once(policy: Policy | None) -> Policy:
    """A policy that keeps the results of what must run once, too."""

    def keep(primitive: Any, *args: Any, **params: Any) -> Any:
        if not op_facts.is_known(primitive.name):
            return True
        return policy(primitive, *args, **params) if policy is not None else False

    return keep


def _without_dead(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Without what no result needs: the function's own results, which the backward pass does not read."""
    needed = {var for var in closed.jaxpr.outvars if not isinstance(var, _private.Literal)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(closed.jaxpr.eqns):
        if eqn.effects or any(var in needed for var in eqn.outvars):
            kept.append(eqn)
            needed.update(var for var in eqn.invars if not isinstance(var, _private.Literal))
    return _private.with_equations(closed, kept[::-1])


def _held(closed: ClosedJaxpr, arguments: Sequence[Any], kept: int) -> list[Any]:
    """The arguments of a backward pass, tied so that nothing of it can run before a gradient has come in.

    Barriers are free and tie all that is kept. A data tie is a pass over what it ties: the smallest of what the first
    equations read is enough.
    """
    arguments = list(arguments)
    late_places = [n for n in range(kept, len(arguments)) if ties.can_trigger(jax.typeof(arguments[n]))]
    triggers = [arguments[place] for place in late_places]
    places = [place for place in range(kept) if ties.can_tie(jax.typeof(arguments[place]))]
    if not triggers or not places:
        return arguments
    if current_tie() == "barrier":
        values, held = ties.tie_by_barrier([arguments[place] for place in places], triggers)
        # Left unread, their places in the barrier would be dropped as dead.
        for place, value in zip(late_places, held, strict=True):
            arguments[place] = value
    else:
        places = _enough(closed, places, kept)
        values = ties.tie_by_data([arguments[place] for place in places], triggers)
    for place, value in zip(places, values, strict=True):
        arguments[place] = value
    return arguments


def _enough(closed: ClosedJaxpr, places: Sequence[int], kept: int) -> list[int]:
    """The arguments to tie so that every equation that reads an argument depends on one that is late."""
    flattener = Flattener()
    inputs = [flattener.value(var.aval) for var in closed.jaxpr.invars]
    outputs = flattener.add(closed, inputs)
    can_tie = {inputs[place]: place for place in places}
    late = set(inputs[kept:])
    tied: dict[int, None] = {}
    for equation in alive(flattener.equations, outputs):
        if not any(value in late for value in equation.reads):
            able = [value for value in equation.reads if value in can_tie]
            if not able:
                continue
            smallest = min(able, key=lambda value: op_facts.size_bytes(flattener.avals[value]))
            tied[can_tie[smallest]] = None
            late.add(smallest)
        late.update(equation.outputs)
    return list(tied)
