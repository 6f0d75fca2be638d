"""Every symbol of JAX that is not documented as public, in one place; ``tests/jax/test_jax_private.py`` checks each.

This file finds all of them in JAX 0.8 to 0.12. Where the versions differ, a comment says how.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.extend.core.primitives as known_primitives
from jax._src import core, distributed, effects, source_info_util
from jax._src.ad_util import Zero
from jax._src.interpreters import batching, partial_eval
from jax._src.interpreters.ad import instantiate_zeros
from jax._src.named_sharding import UNSPECIFIED
from jax._src.state.types import AbstractRef
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import AxisType

__all__ = [
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "VJPHiPrimitive",
    "Var",
    "Zero",
    "instantiate_zeros",
    "jaxpr_as_fun",
]

Array: TypeAlias = Any

# JAX 0.8 has ``VJPHiPrimitive`` by another name, which is not told which arguments are differentiated.
HAS_OWN_CALLS = jax.__version_info__ >= (0, 9)
# Since JAX 0.11 ``vjp_bwd`` may also return what is to be logged.
OWN_CALLS = "HiPrim" if jax.__version_info__ >= (0, 11) else "VJPHiPrimitive"

if TYPE_CHECKING or (0, 9) <= jax.__version_info__ < (0, 11):
    from jax.experimental.hijax import VJPHiPrimitive
elif HAS_OWN_CALLS:
    from jax.experimental.hijax import HiPrim as VJPHiPrimitive
else:

    class VJPHiPrimitive:
        """What ``recompute`` needs of the class in JAX 0.9, made of ``jax.custom_vjp``, which has no forward mode."""

        def __init__(self) -> None:
            self.__dict__.update(self.params)

        def __call__(self, *args: Any) -> Any:
            """One call, with the backward pass of ``vjp_fwd`` and ``vjp_bwd``."""

            def remat_recomputed_call(*args: Any) -> Any:
                return self.expand(*args)

            def forward(*given: Any) -> Any:
                return self.vjp_fwd([one.perturbed for one in given], *(one.value for one in given))

            def backward(residuals: Any, gradients: Any) -> tuple[Any, ...]:
                totals = [_Total() for _ in self.in_avals]
                self.vjp_bwd(residuals, list(map(_with_zeros, gradients)), *totals)
                return tuple(total.value for total in totals)

            call = jax.custom_vjp(remat_recomputed_call)
            call.defvjp(forward, backward, symbolic_zeros=True)
            return call(*args)


class _Total:
    """A gradient that is added up; None stands for zero."""

    def __init__(self) -> None:
        self.value: Any = None

    def accum(self, gradient: Any) -> None:
        """Add to it."""
        if not isinstance(gradient, Zero):
            self.value = gradient if self.value is None else self.value + gradient


def _with_zeros(gradient: Any) -> Any:
    is_zero = isinstance(gradient, jax.custom_derivatives.SymbolicZero)
    return Zero(gradient.aval) if is_zero else gradient


# Pure, and missing from the list of primitives that JAX exports.
_ALSO_KNOWN = frozenset(
    {
        "add_any",
        "name",
        "optimization_barrier",
        "pvary",
        "random_unwrap",
        "random_wrap",
        "remat2",
        "reshard",
        "split",
        "stack",
        "unstack",
    }
)


def primitive_names() -> frozenset[str]:
    """Names of all the primitives that JAX itself defines and exports."""
    exported = (getattr(known_primitives, name) for name in dir(known_primitives) if name.endswith("_p"))
    return frozenset(primitive.name for primitive in exported) | _ALSO_KNOWN


def evaluate(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Run one equation of a jaxpr on values: arrays, or tracers of a trace under way."""
    primitive: Any = eqn.primitive
    params = primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # In JAX 0.9.0: functions, which are bound as the first arguments, and the rest.
        functions, params = params
        values = [*functions, *values]
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        result = primitive.bind(*values, **params)
    return list(result) if primitive.multiple_results else [result]


def is_plain_call(eqn: JaxprEqn) -> bool:
    """Is a ``jit`` inside the function nothing but a call: no shardings, layouts or compiler options of its own?"""
    params = eqn.params
    asked = (*params["in_shardings"], *params["out_shardings"])
    laid_out = (*params["in_layouts"], *params["out_layouts"])
    return (
        all(sharding is UNSPECIFIED for sharding in asked)
        and all(layout is None for layout in laid_out)
        and not params["compiler_options_kvs"]
    )


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many values a ``scan`` reads whole at each step, and how many it carries from step to step."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # Since JAX 0.11 they are parts of one tree.
    given, carried, _ = eqn.params["ft_in"].update([None] * len(eqn.invars)).unpack()
    return len(list(given)), len(list(carried))


def names_devices() -> bool:
    """Does the trace under way name axes of devices or of a batch, as ``shard_map`` does?"""
    return bool(core.nonempty_axis_env())


def shape_of_aval(aval: Any) -> Any:
    """What ``jax.make_jaxpr`` takes in the place of a value; over explicit axes of a mesh with its layout.

    Inside of ``shard_map`` it says over which axes the value varies, and can be used there only.
    """
    make: Any = jax.ShapeDtypeStruct
    varies = bool(varying_axes(aval) or pending_axes(aval))
    more = {"sharding": aval.sharding} if varies or is_laid_out(aval) else {}
    if varies:
        more |= {"manual_axis_type": aval.mat} if hasattr(aval, "mat") else {"vma": aval.vma}
    return make(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)), **more)


def is_reference(aval: Any) -> bool:
    """Is this the type of a ``jax.Ref``, an array that a function changes in place?"""
    return isinstance(aval, AbstractRef)


def is_laid_out(aval: Any) -> bool:
    """Does a value lie over explicit axes of a mesh, as a part of its type?"""
    return any(getattr(getattr(aval, "sharding", None), "spec", ()))


def is_in_the_type(sharding: Any) -> bool:
    """Is a sharding a part of the types of values, as over the explicit axes of a mesh? No compiler changes it then."""
    return AxisType.Explicit in getattr(getattr(sharding, "mesh", None), "axis_types", ())


def varying_axes(aval: Any) -> frozenset[str]:
    """Inside of ``shard_map``, the axes over which a value differs from device to device, as far as JAX tracks them."""
    # Since JAX 0.10 this stands in ``mat``, before in ``vma``.
    kind = getattr(aval, "mat", None)
    return frozenset(getattr(aval, "vma", None) or () if kind is None else kind.varying)


def pending_axes(aval: Any) -> frozenset[str]:
    """Inside of ``shard_map``, the axes over which a value is still to be summed, or was and is marked so."""
    # Since JAX 0.10; before, no value could be in such a state.
    kind = getattr(aval, "mat", None)
    return frozenset() if kind is None else frozenset(kind.unreduced) | frozenset(kind.reduced)


def other_effects(eqn: JaxprEqn) -> bool:
    """Has an equation an effect beside that it names an axis, as collectives do?"""
    return any(not isinstance(effect, core.NamedAxisEffect) for effect in eqn.effects)


def manual_axes(eqn: JaxprEqn) -> frozenset[str]:
    """The axes that a call of ``shard_map`` maps over."""
    # By another name before JAX 0.10.
    return frozenset(eqn.params["newly_manual_axes" if "newly_manual_axes" in eqn.params else "manual_axes"])


def is_traced(value: Any) -> bool:
    """Does a value stand for an array of a function that is being traced?"""
    return isinstance(value, jax.core.Tracer)


def is_batched(value: Any) -> bool:
    """Does a value stand for one example of an array that ``vmap`` maps over?"""
    return isinstance(value, batching.BatchTracer)


def with_constants_as_arguments(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same computation with what it captured as its first arguments."""
    return ClosedJaxpr(partial_eval.convert_constvars_jaxpr(closed.jaxpr), [])


def batched(closed: ClosedJaxpr, axis: Any, axes_of_arguments: Sequence[int | None]) -> tuple[ClosedJaxpr, list[bool]]:
    """A jaxpr over a batch, as ``vmap`` makes it, and which of its results have the batch as their first axis.

    Args:
        closed: of one example.
        axis: what JAX knows of the axis that is mapped over.
        axes_of_arguments: where each argument has it; None for an argument that all examples share.
    """
    batch: Any = batching.batch_jaxpr_axes
    axes_of_results = [batching.zero_if_mapped] * len(closed.jaxpr.outvars)
    whole, has_axis = batch(closed, axis, list(axes_of_arguments), axes_of_results)
    return whole, list(has_axis)


def with_equations(closed: ClosedJaxpr, eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
    """A jaxpr that has only some of its equations left."""
    jaxpr: Any = closed.jaxpr
    return ClosedJaxpr(jaxpr.replace(eqns=list(eqns)), closed.consts)


def effects_that_forbid_recomputation(closed: ClosedJaxpr) -> list[str]:
    """Effects that ``jax.checkpoint`` refuses: all but debugging output and the names of axes."""
    forbidden = effects.remat_allowed_effects.filter_not_in(closed.effects)
    return sorted({type(effect).__name__ for effect in forbidden})


def body_of_recomputed_call(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function of a call under ``remat.jax.recompute``; None for every other equation."""
    if not HAS_OWN_CALLS:
        inner = eqn.params.get("call_jaxpr") if eqn.primitive.name == "custom_vjp_call" else None
        is_ours = inner is not None and inner.jaxpr.debug_info.func_name == "remat_recomputed_call"
        return inner if is_ours else None
    if eqn.primitive.name != "call_hi_primitive":
        return None
    own = eqn.params.get("_prim", eqn.params.get("prim"))  # "prim" in JAX 0.9.0
    body = getattr(own, "jaxpr", None)
    return body if isinstance(body, ClosedJaxpr) else None


# From this version on the pullback of ``jax.vjp`` takes a ``Zero`` in place of an array of zeros; 0.10.0 does not.
_TAKES_ZEROS = jax.__version_info__ >= (0, 10, 2)


def pulled_back(pullback: Any, gradients: Sequence[Any]) -> list[Any]:
    """The gradients of arguments for those of results, some of which may be a ``Zero``."""
    instantiated: Any = instantiate_zeros
    given = list(gradients) if _TAKES_ZEROS else [instantiated(gradient) for gradient in gradients]
    return list(pullback(given))


def scopes_of(eqn: JaxprEqn) -> str:
    """The named scopes and transformations that an equation was traced under: "transpose(jvp(Model))/Dense_0"."""
    return str(eqn.source_info.name_stack)


RULE_OF_A_CALL = "jvp_jaxpr_fun"
"""The parameter of ``custom_jvp_call`` that makes the jaxpr of its rule, by the name of JAX 0.8 to 0.12."""


def rule_of_call(eqn: JaxprEqn) -> Any:
    """The rule of a ``custom_jvp_call`` where no tangent is known to be 0: its jaxpr, its constants, what is 0."""
    return eqn.params[RULE_OF_A_CALL].call_wrapped(*[False] * (len(eqn.invars) - eqn.params["num_consts"]))


def source_of_rule(eqn: JaxprEqn) -> str:
    """The name and the line of the rule of a ``custom_jvp_call``."""
    return str(eqn.params[RULE_OF_A_CALL].debug_info.func_src_info)


_DIFFERENTIATED = re.compile(r"\b(jvp|transpose)\(")
"""What differentiation puts around scopes, by the names of JAX 0.10. By other names, no op is known to be backward."""


def is_transposed(eqn: JaxprEqn) -> bool:
    """Did differentiation write an equation into the backward part of the outermost gradient around it?

    JAX writes "transpose(jvp(Model))/Dense_0" there, and "jvp(transpose(jvp()))" for the backward part of an inner
    gradient, which a forward part runs.
    """
    outermost = _DIFFERENTIATED.search(scopes_of(eqn))
    return outermost is not None and outermost[1] == "transpose"


def source_of(eqn: JaxprEqn) -> tuple[str, int, str] | None:
    """File, line and function of the user's code that an equation comes from, None where JAX made it by itself."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line, frame.function_name)


class ProcessStore:
    """The key-value store of ``jax.distributed``, in which its processes leave words for one another.

    It is a ``remat.fit.ranks.Store``.
    """

    def put(self, key: str, value: str) -> None:
        """Write a value once."""
        self._client.key_value_set(key, value)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Wait for a value that a process writes; None where none does in that time."""
        try:
            value: str = self._client.blocking_key_value_get(key, int(1000 * timeout_s))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return value

    @property
    def _client(self) -> Any:
        client: Any = distributed.global_state.client
        assert client is not None, "jax.distributed has brought several processes together"
        return client
