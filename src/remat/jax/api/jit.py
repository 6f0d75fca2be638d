"""``jit``: ``jax.jit`` with the compiler options that recomputation needs, and with a budget for a whole step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from remat.core.errors import UnsupportedStep
from remat.core.plan import Plan
from remat.fit.request import Request
from remat.jax import _private
from remat.jax.context import barriers_stay, current_tie
from remat.jax.peak import compiler_options, shape_of
from remat.jax.planned import Follower, leaves_of, plan_function


def jit(
    fun: Callable[..., Any],
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    checkpoints: Sequence[str] | None = None,
    planner: str = "auto",
    time_limit_s: float | None = None,
    options: Mapping[str, Any] | None = None,
    **jit_options: Any,
) -> Jitted:
    """``jax.jit`` with what the platform needs to keep recomputations cheap, and to keep a budget if one is given.

    On a CPU, XLA takes ``optimization_barrier`` out before it merges equal computations, which undoes
    ``jax.checkpoint`` and remat's cheaper ties; this compiles with that pass disabled. Elsewhere nothing is added.

    With ``budget``, ``plan`` or ``checkpoints`` the whole function is planned, whatever it computes: pass a training
    step, gradients and optimizer's update included, written with plain ``jax.value_and_grad``.

    Args:
        fun: the function to compile.
        budget: peak device bytes of the compiled function, everything counted (arguments, results, what lies between):
            an int, "4GiB", or "60%" of the plain function's own.
        plan: a plan made earlier for the same function, instead of a budget.
        checkpoints: names that ``jax.ad_checkpoint.checkpoint_name`` gave to values, instead of a budget: these are
            kept, and everything else between them is recomputed.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning.
        options: passed on to the planner.
        **jit_options: as in ``jax.jit``: ``static_argnums``, ``donate_argnums``, ``in_shardings`` and so on.

    Returns:
        A callable with ``lower`` as in ``jax.jit``, and ``plan``, the plan of the newest trace.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: when the function is first called, where nothing fits; it names the smallest budget.
        UnsupportedStep: when it is first called, where no value has the name of a checkpoint.
    """
    kept = None if checkpoints is None else tuple(checkpoints)
    request = Request(budget, plan, kept, planner, time_limit_s, dict(options or {}))
    return Jitted(fun, request, jit_options)


class Jitted(Follower):
    """What ``jit`` returns.

    Attributes:
        plan: the plan of the newest trace; None before, or without a budget.
        graph: the step that the plan is for.
    """

    def __init__(self, fun: Callable[..., Any], request: Request, jit_options: Mapping[str, Any]) -> None:
        request.check("remat.jax.jit")
        super().__init__(request)
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._jit_options = dict(jit_options)
        self._static = _numbers(jit_options.get("static_argnums"))
        self._donated = _numbers(jit_options.get("donate_argnums"))
        if self._plans_whole and (jit_options.get("static_argnames") or jit_options.get("donate_argnames")):
            raise UnsupportedStep(
                "remat.jax.jit with a budget takes static_argnums and donate_argnums, not static_argnames and "
                "donate_argnames; give the positions of those arguments"
            )
        own_options = dict(self._jit_options.pop("compiler_options", None) or {})
        self._shapes: tuple[jax.ShapeDtypeStruct, ...] | None = None
        options = {**own_options, **compiler_options("barrier")}
        self._outermost = jax.jit(self._with_barriers, compiler_options=options or None, **self._jit_options)
        self._inner = jax.jit(self._traced, **self._jit_options)

    @property
    def _plans_whole(self) -> bool:
        return self._request.plans

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function; the first call with new shapes traces, plans and compiles."""
        if any(_private.is_traced(leaf) for leaf in jax.tree.leaves((args, kwargs))):
            return self._inner(*args, **kwargs)  # Compiler options are for the outermost function only.
        with self._shapes_of(args, kwargs):
            return self._outermost(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``jax.jit``."""
        with self._shapes_of(args, kwargs):
            return self._outermost.lower(*args, **kwargs)

    def plan_for(self, *args: Any) -> Plan:
        """Plan the function for arguments like these, without running it. There must be a budget.

        Raises:
            InfeasibleBudget: with the smallest budget for which this function succeeds.
        """
        self.lower(*args)
        assert self.plan is not None
        return self.plan

    @contextlib.contextmanager
    def _shapes_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """While tracing, the shardings of the arrays behind the tracers are known from here."""
        if not self._plans_whole:
            yield
            return
        dynamic = [arg for number, arg in enumerate(args) if number not in self._static]
        self._shapes = tuple(
            leaf if isinstance(leaf, jax.ShapeDtypeStruct) else shape_of(leaf)
            for leaf in jax.tree.leaves((dynamic, kwargs))
        )
        try:
            yield
        finally:
            self._shapes = None

    def _with_barriers(self, *args: Any, **kwargs: Any) -> Any:
        with barriers_stay():
            return self._traced(*args, **kwargs)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        if not self._plans_whole:
            return self._fun(*args, **kwargs)
        static = {number: arg for number, arg in enumerate(args) if number in self._static}
        dynamic = [arg for number, arg in enumerate(args) if number not in self._static]
        leaves, structure = jax.tree.flatten((dynamic, kwargs))
        positions = [number for number in range(len(args)) if number not in self._static]
        donated = leaves_of(dynamic, [place for place, number in enumerate(positions) if number in self._donated])

        def function(*flat: Any) -> Any:
            some, named = jax.tree.unflatten(structure, flat)
            rest = iter(some)
            every = [static[number] if number in static else next(rest) for number in range(len(args))]
            return self._fun(*every, **named)

        shapes = self._shapes if self._shapes is not None else tuple(shape_of(leaf) for leaf in leaves)
        key = (structure, tuple(map(str, shapes)), repr(static), current_tie())
        planned = self._followed(
            key,
            lambda request: plan_function(
                function,
                leaves,
                request,
                current_tie(),
                shapes=shapes,
                donated=donated,
                out_shardings=self._jit_options.get("out_shardings"),
            ),
        )
        return planned(leaves)


def _numbers(given: int | Sequence[int] | None) -> frozenset[int]:
    if given is None:
        return frozenset()
    return frozenset((given,) if isinstance(given, int) else given)
