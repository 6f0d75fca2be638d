"""What remat knows of JAX's primitives: which may repeat, which are views, which work in place, what they cost.

Everything unknown is kept: an equation may run twice only if its primitive is one of JAX's own, has no effect,
and is not named below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from remat.core.errors import UnsupportedStep
from remat.jax import _private
from remat.jax._private import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

_COLLECTIVES = frozenset(
    {"all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "ragged_all_to_all", "reduce_scatter"}
)

# Exported by JAX, yet never repeated: other devices, mutable references, a generator with state, calls that hide code.
_NEVER_REPEATED = _COLLECTIVES | {
    "after_all",
    "call",
    "create_token",
    "custom_lin",
    "device_put",
    "get",
    "rng_uniform",
    "swap",
}

# The output has the bytes of the first input, in its order: the compiler copies nothing.
_VIEWS = frozenset(
    {
        "device_put",
        "expand_dims",
        "name",
        "pvary",
        "random_unwrap",
        "random_wrap",
        "reshape",
        "reshard",
        "squeeze",
        "stop_gradient",
    }
)

# Always computed where it is read: the compiler fuses such values into every reader.
_GENERATORS = frozenset({"iota"})

_ELEMENTWISE = frozenset(
    {
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bessel_i0e",
        "bessel_i1e",
        "bitcast_convert_type",
        "cbrt",
        "ceil",
        "clamp",
        "complex",
        "conj",
        "convert_element_type",
        "copy",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "igamma",
        "igammac",
        "imag",
        "integer_pow",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "polygamma",
        "population_count",
        "pow",
        "real",
        "reduce_precision",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "sub",
        "tan",
        "tanh",
        "xor",
        "zeta",
    }
)

_REDUCTIONS = frozenset(
    {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "argmax", "argmin"}
)

# Floating-point operations for each element, where it is not one. Rough guesses, not measured. Too high, recomputing
# such an operation looks dear where it is not; memory bounds most of them, and then these counts do not matter.
_FLOPS_PER_ELEMENT = {
    **dict.fromkeys(("div", "rsqrt", "sqrt", "rem", "cbrt"), 4.0),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log1p", "sin", "cos", "tan", "tanh", "logistic", "erfc"), 12.0),
    **dict.fromkeys(("atan", "atan2", "atanh", "erf", "erf_inv", "pow", "sinh", "cosh", "lgamma", "digamma"), 20.0),
    **dict.fromkeys(("random_bits", "threefry2x32", "rng_bit_generator"), 60.0),
}

# The same on a CPU, where such functions take long beside products: nanoseconds for each element of 512 x 512 float32
# numbers, as jaxlib 0.10 compiles them for one core of an AMD EPYC of 2024, where a product has 230 operations in each
# of them. Too low, plans recompute what is dear: random bits, which each dropout draws, took 2.5 ns and not .3.
_NANOSECONDS_PER_ELEMENT = {
    **dict.fromkeys(("exp", "exp2", "tanh", "logistic", "erf", "log"), 0.3),
    **dict.fromkeys(("div", "sqrt"), 0.15),
    **dict.fromkeys(("expm1", "log1p", "erfc"), 0.65),
    **dict.fromkeys(("erf_inv", "rsqrt", "rem", "sinh", "cosh"), 1.5),
    **dict.fromkeys(("sin", "cos", "pow", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), 3.5),
    **dict.fromkeys(("argmax", "argmin"), 4.5),
    **dict.fromkeys(("tan", "atan", "atan2", "cbrt", "lgamma", "digamma"), 8.0),
    **dict.fromkeys(("random_bits", "threefry2x32", "rng_bit_generator"), 2.4),
    "concatenate": 0.55,
    "gather": 0.9,
    "sort": 5.5,
}
_NANOSECONDS_OF_PHILOX: Final = 10.7
"""The same for a random number whose key is of the kind "rbg" or "unsafe_rbg"."""

_FLOPS_PER_NANOSECOND: Final = 230.0

# Products on that core beside those of two matrices, from profiles of XLA's kernels. The gradient of a weight that is
# summed over samples and tokens, outermost in both operands: in a decoder all of these ran at 75 operations in a
# nanosecond, and one operand was copied in another order before, at 2.9 ns for each of its elements. Where it is summed
# over one axis, it takes what others take. Attention's products, in batches that are not outermost, ran at 107 to 171;
# convolutions of 16 channels at 59, of 32 at 214. Gradients of weights are never repeated: too low, a step looks short,
# and recomputation dear.
_TIMES_OF_A_WEIGHTS_GRADIENT: Final = 3.0
_NANOSECONDS_TO_TRANSPOSE: Final = 2.9
_TIMES_IN_BATCHES: Final = 1.6
_TIMES_OF_A_CONVOLUTION: Final = 2.0

WITH_INDICES: Final = frozenset({"select_and_scatter_add", "select_and_gather_add"})
"""Primitives of which XLA on a CPU makes arrays of indices, four as large as the picture in the gradient of a maximum
over windows. They depend on nothing, so they are made early and lie in memory until then: 3 of 9.6 MiB of a U-Net."""

_INDICES: Final = 4
_INDEX_BYTES: Final = 4
"""Arrays of indices of each, and what a number in them takes."""

_CHANNELS_AT_ONCE: Final = 64
"""Of the gradient of the weights of a grouped convolution, XLA on a CPU computes the products of all channels with one
another, so a plan lets it compute those of so many channels at once. On six shapes of MobileNet and ConvNeXt the
results were the same to the bit with 64, in .05 to .6 of the time; with 16 some differed in rounding."""

_ASSUMED_ITERATIONS: Final = 10
"""How often a ``while`` loop runs, whose length depends on values. A guess: too low, recomputing one looks cheap."""

INFLATION: Final = 4
"""A broadcast to at least so many times the bytes is made anew wherever it is read, and never stored.

A judgement, not measured. Too low, the graph leaves out tensors that the compiler stores; too high, it counts tensors
that the compiler fuses into their readers.
"""


@cache
def _known() -> frozenset[str]:
    return _private.primitive_names() - _NEVER_REPEATED


def is_known(name: str) -> bool:
    """Is this a primitive of JAX's own that may run a second time, as far as its name tells?"""
    return name in _known()


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters: bodies of loops, branches, called functions."""
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, Jaxpr):
                yield one


def may_repeat(eqn: JaxprEqn) -> bool:
    """May an equation run a second time with the same result and no other effect?"""
    body = _private.body_of_recomputed_call(eqn)
    if body is not None:
        return all(map(may_repeat, body.jaxpr.eqns))
    if eqn.effects or not is_known(eqn.primitive.name):
        return False
    return all(may_repeat(inner) for jaxpr in inner_jaxprs(eqn) for inner in jaxpr.eqns)


def may_be_stacked(eqn: JaxprEqn) -> bool:
    """May an equation be part of a loop that is written again? It repeats, or is a collective whose result is kept."""
    if may_repeat(eqn):
        return True
    if _private.other_effects(eqn):
        return False
    inner = [one for jaxpr in inner_jaxprs(eqn) for one in jaxpr.eqns]
    if inner:
        return is_known(eqn.primitive.name) and all(map(may_be_stacked, inner))
    return bool(eqn.effects) or eqn.primitive.name in _COLLECTIVES


def may_sink(eqn: JaxprEqn) -> bool:
    """Would the compiler compute this where it is read, whatever the program says?"""
    name = eqn.primitive.name
    return may_repeat(eqn) and (name in _ELEMENTWISE or name in _VIEWS or name in ("broadcast_in_dim", "iota"))


def is_light(eqn: JaxprEqn) -> bool:
    """Is this element-wise, a view or a broadcast, or a call of nothing else?"""
    inner = [one for jaxpr in inner_jaxprs(eqn) for one in jaxpr.eqns]
    return eqn.primitive.name in ("jit", "pjit") and all(map(is_light, inner)) if inner else may_sink(eqn)


def may_join(eqn: JaxprEqn) -> bool:
    """Is this computed inside the kernel that reads it, if only one does?"""
    name = eqn.primitive.name
    light = is_elementwise(eqn) or name in _VIEWS or name in ("broadcast_in_dim", "iota", "transpose", "slice")
    return light and len(eqn.outvars) == 1 and may_repeat(eqn)


def takes_producers(eqn: JaxprEqn) -> bool:
    """Does the kernel that ends in this equation compute what it reads itself?"""
    name = eqn.primitive.name
    if not may_repeat(eqn) or is_view(eqn) or holds_nothing(eqn):
        return False
    return is_elementwise(eqn) or name in ("transpose", "slice") or name in _REDUCTIONS


def size_bytes(aval: Any) -> int:
    """Bytes of a value on the device.

    Raises:
        UnsupportedStep: where its shape is not known.
    """
    shape = getattr(aval, "shape", ())
    if not all(isinstance(size, int) for size in shape):
        raise UnsupportedStep(
            f"a value of shape {tuple(shape)} has dimensions that are not known while the function is traced; give "
            "arrays of fixed shapes"
        )
    dtype = getattr(aval, "dtype", None)
    return math.prod(shape) * int(getattr(dtype, "itemsize", 0))


def viewed_inputs(eqn: JaxprEqn) -> tuple[int | None, ...]:
    """For each output, the number of the input whose bytes it shares; None for what has storage of its own."""
    if eqn.primitive.name == "optimization_barrier":
        return tuple(range(len(eqn.outvars)))  # It is no kernel, but kernels do not reach across it.
    viewed = _viewed_input(eqn)
    return tuple(viewed if place == 0 else None for place in range(len(eqn.outvars)))


def is_view(eqn: JaxprEqn) -> bool:
    """Do all outputs share bytes of inputs?"""
    return bool(eqn.outvars) and None not in viewed_inputs(eqn)


def _viewed_input(eqn: JaxprEqn) -> int | None:
    """Number of the input whose bytes the first output shares; None for what makes storage of its own.

    A broadcast counts as a view of what it repeats: the compiler fuses it into its readers.
    """
    name, source = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
    if source is None or len(eqn.outvars) != 1:
        return None
    made, read = size_bytes(eqn.outvars[0].aval), size_bytes(source.aval)
    if name in _VIEWS or (name in ("bitcast_convert_type", "convert_element_type") and _same_dtype(eqn)):
        return 0
    if name == "transpose" and _keeps_order(_shape(source), eqn.params["permutation"]):
        return 0
    return 0 if name == "broadcast_in_dim" and (made == read or made >= INFLATION * read) else None


def _same_dtype(eqn: JaxprEqn) -> bool:
    made, read = eqn.outvars[0].aval, eqn.invars[0].aval
    return bool(getattr(read, "dtype", None) == getattr(made, "dtype", None))


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def _keeps_order(shape: tuple[int, ...], permutation: tuple[int, ...]) -> bool:
    axes = [axis for axis in permutation if shape[axis] != 1]
    return axes == sorted(axes)


def holds_nothing(eqn: JaxprEqn) -> bool:
    """Is the result computed wherever it is read, and never stored?"""
    if eqn.primitive.name in _GENERATORS:
        return True
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)


def keeps_elements(eqn: JaxprEqn) -> bool:
    """Does the result consist of the elements of the first input, in some order? Where axes are short, it is that."""
    return eqn.primitive.name in ("rev", "transpose") or (eqn.primitive.name in _VIEWS and len(eqn.outvars) == 1)


def overwritable_inputs(eqn: JaxprEqn) -> slice:
    """Which inputs' storage the output may take over, where it has their size: a part of ``eqn.invars``."""
    if eqn.primitive.name in ("dynamic_update_slice", "scatter-add"):
        return slice(1)  # What is written into the array, and where, is read while the array changes.
    return slice(None) if eqn.primitive.name in _ELEMENTWISE else slice(0)


def takes_slice(eqn: JaxprEqn) -> bool:
    """Does this read only as much of its first input as it makes?"""
    return eqn.primitive.name in ("dynamic_slice", "gather", "slice")


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Does each element of the result depend on the same element of each input alone?"""
    return eqn.primitive.name in _ELEMENTWISE


def flops(eqn: JaxprEqn, *, on_cpu: bool = False) -> float:
    """Floating-point operations of one run; a multiplication and an addition count as two.

    Args:
        eqn: the equation.
        on_cpu: does a CPU run it? There an operation that is dear by itself counts as what it takes in such operations.
    """
    name, params = eqn.primitive.name, eqn.params
    made = sum(math.prod(_shape(var)) for var in eqn.outvars)
    read = sum(math.prod(_shape(var)) for var in eqn.invars)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = _shape(eqn.invars[0])
        inner = math.prod(left[int(axis)] for axis in contracted)
        return _product_on_cpu(eqn, 2.0 * made * inner) if on_cpu else 2.0 * made * inner
    if name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        outputs = int(kernel[params["dimension_numbers"].rhs_spec[0]])
        times = _TIMES_OF_A_CONVOLUTION if on_cpu else 1.0
        if on_cpu:
            times *= groups_at_once(eqn) or int(params["batch_group_count"])
        return times * 2.0 * made * math.prod(kernel) / max(1, outputs)
    each = _flops_per_element_on_cpu(eqn) if on_cpu else None
    if name == "sort":
        return made * math.log2(max(2, made)) * (each or 1.0)
    if name.startswith(("reduce_", "cum", "arg")) and name != "reduce_precision":
        window = math.prod(params.get("window_dimensions", ()))
        return float(made * window if window > 1 else read) * (each or 1.0)
    return float((each or _FLOPS_PER_ELEMENT.get(name, 1.0)) * made)


def _flops_per_element_on_cpu(eqn: JaxprEqn) -> float | None:
    """What an element takes in floating-point operations; None where traffic or a count tells that."""
    name = eqn.primitive.name
    each = _NANOSECONDS_PER_ELEMENT.get(name)
    if name == "random_bits" and "rbg" in str(getattr(eqn.invars[0].aval, "dtype", "")):
        each = _NANOSECONDS_OF_PHILOX
    return None if each is None else each * _FLOPS_PER_NANOSECOND


def _product_on_cpu(eqn: JaxprEqn, counted: float) -> float:
    """The operations of a product, and those that a CPU could do in the time that it takes beside them."""
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    if batch:
        return _TIMES_IN_BATCHES * counted
    first, second = (len(_shape(var)) - 1 for var in eqn.invars)
    if len(left) < 2 or first in map(int, left) or second in map(int, right):
        return counted
    turned = _NANOSECONDS_TO_TRANSPOSE * _FLOPS_PER_NANOSECOND * math.prod(_shape(eqn.invars[0]))
    return _TIMES_OF_A_WEIGHTS_GRADIENT * counted + turned


def groups_at_once(eqn: JaxprEqn) -> int | None:
    """How many groups of a grouped convolution's gradient of its weights a CPU computes at once; None for all."""
    if eqn.primitive.name != "conv_general_dilated" or (groups := int(eqn.params["batch_group_count"])) == 1:
        return None
    numbers = eqn.params["dimension_numbers"]
    widest = max(_shape(eqn.invars[0])[numbers.lhs_spec[0]], _shape(eqn.invars[1])[numbers.rhs_spec[0]])
    return max(1, groups * _CHANNELS_AT_ONCE // widest) if widest > _CHANNELS_AT_ONCE else None


def workspace_bytes_on_cpu(eqn: JaxprEqn) -> int:
    """What XLA on a CPU makes for an equation beside its inputs and outputs, as a plan's function runs it.

    A convolution reads pictures with their channels last and kernels with their outputs last. What lies in another
    order is copied, as both inputs of the gradient of a kernel are.
    """
    if eqn.primitive.name in WITH_INDICES:
        # In the gradient of a maximum over windows, the first input has the shape of the windows.
        return _INDICES * _INDEX_BYTES * max(math.prod(_shape(var)) for var in (*eqn.invars, *eqn.outvars))
    if eqn.primitive.name != "conv_general_dilated":
        return 0
    numbers = eqn.params["dimension_numbers"]
    last = len(numbers.lhs_spec) - 1
    in_order = (
        tuple(numbers.lhs_spec) == (0, last, *range(1, last)),
        tuple(numbers.rhs_spec) == (last, last - 1, *range(last - 1)),
    )
    copied = sum(size_bytes(var.aval) for var, as_it_is in zip(eqn.invars, in_order, strict=True) if not as_it_is)
    groups = int(eqn.params["batch_group_count"])
    if groups == 1:
        return copied
    at_once = groups_at_once(eqn) or groups
    # Products of these groups with one another, and the copy in which the others are zero.
    return copied + 2 * size_bytes(eqn.outvars[0].aval) // groups * at_once**2


def offloaded_values(jaxpr: Jaxpr) -> list[str]:
    """What policies of ``jax.checkpoint`` send to the host: names that the user gave, or dtypes and shapes.

    Such a policy writes two copies between memory spaces: to the host in the forward part, and back from there in a
    region that the backward part computes again. Copies of the user's own, outside of such regions, do not count.
    """
    if not any(_fetches_from_host(eqn) for eqn in _all_equations(jaxpr)):
        return []
    named = {eqn.outvars[0]: str(eqn.params["name"]) for eqn in _all_equations(jaxpr) if eqn.primitive.name == "name"}
    moved: list[Any] = [
        read
        for eqn in _all_equations(jaxpr)
        if eqn.primitive.name == "device_put"
        for read, made in zip(eqn.invars, eqn.outvars, strict=True)
        if _memory_space(read) != _memory_space(made) and not isinstance(read, Literal)
    ]
    names = {repr(named[var]) for var in moved if var in named}
    return sorted(names or {f"{var.aval.dtype}{list(var.aval.shape)}" for var in moved})[:_MOST_SHOWN]


_MOST_SHOWN: Final = 4  # Values in an error, which is one line.


def _fetches_from_host(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in ("remat2", "checkpoint"):
        return False
    return any(
        inner.primitive.name == "device_put"
        and any(_memory_space(a) != _memory_space(b) for a, b in zip(inner.invars, inner.outvars, strict=True))
        for body in inner_jaxprs(eqn)
        for inner in _all_equations(body)
    )


def _memory_space(var: Any) -> Any:
    return getattr(var.aval, "memory_space", None)


def _all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _all_equations(inner)


def iterations(eqn: JaxprEqn) -> int:
    """How often the body of a loop runs; 1 for everything else."""
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"])
    return _ASSUMED_ITERATIONS if eqn.primitive.name == "while" else 1
