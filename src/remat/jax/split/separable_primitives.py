"""How JAX's primitives can be cut along an axis, and which of their parameters state a shape.

A primitive that is missing here ends a region that runs in slices; random ones are missing on purpose. Each entry is
tested against the primitive itself, in ``tests/jax/test_jax_separable_primitives.py``: what the slices make is compared
with what the whole makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from remat.jax._private import JaxprEqn
from remat.jax.trace import op_facts
from remat.transform.separable import SUMMED, Part, Way

Shape: TypeAlias = tuple[int, ...]
_Rule: TypeAlias = Callable[[dict[str, Any], list[Shape], list[Shape]], list[Way]]


def ways_of(eqn: JaxprEqn, given: Sequence[bool]) -> tuple[Way, ...]:
    """The ways to cut an equation; none where its primitive is not known.

    Args:
        eqn: the equation.
        given: for each of its operands: is it a value? Else it is a number that stands in the program.

    Returns:
        Each with a place for every operand that is a value, in their order, and for every result.
    """
    rule = _rule_of(eqn)
    if rule is None or eqn.effects:
        return ()
    operands, results = _shapes(eqn.invars), _shapes(eqn.outvars)
    found: dict[tuple[tuple[int | None, ...], tuple[Part, ...]], None] = {}
    for way in rule(eqn.params, operands, results):
        cut = [(operands, way.inputs), (results, way.outputs)]
        axes = [shapes[n][axis] for shapes, parts in cut for n, axis in enumerate(parts) if isinstance(axis, int)]
        literal = any(axis is not None for axis, is_given in zip(way.inputs, given, strict=True) if not is_given)
        if min(axes, default=0) > 1 and not literal:
            inputs = tuple(axis for axis, is_given in zip(way.inputs, given, strict=True) if is_given)
            found[inputs, way.outputs] = None
    return tuple(Way(*one) for one in found)


def sliced_parameters(eqn: JaxprEqn, operands: Sequence[Shape], made: Shape) -> dict[str, Any]:
    """The parameters of a slice of an equation: where they state a shape, that of the slice.

    Args:
        eqn: the whole equation.
        operands: the shapes of what the slice reads, literals included.
        made: the shape of the slice's first result.
    """
    change = _STATED_SHAPE.get(eqn.primitive.name)
    return dict(eqn.params) if change is None else {**eqn.params, **change(eqn.params, operands, made)}


def _rule_of(eqn: JaxprEqn) -> _Rule | None:
    if op_facts.is_elementwise(eqn):
        return _pointwise
    return _RULES.get(eqn.primitive.name)


def _shapes(variables: Sequence[Any]) -> list[Shape]:
    return [tuple(getattr(var.aval, "shape", ())) for var in variables]


def _pointwise(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    """Each element of the result is made of the elements at the same place; a number goes with every element."""
    made = results[0]
    if any(shape and len(shape) != len(made) for shape in operands):
        return []
    return [
        Way(tuple(axis if shape and shape[axis] > 1 else None for shape in operands), (axis,)) for axis in _of(made)
    ]


def _of(shape: Shape) -> range:
    return range(len(shape))


def _broadcast(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    if len(operands) != 1:
        return []  # Its shape is computed.
    places = [int(place) for place in params["broadcast_dimensions"]]
    ways = []
    for axis in _of(results[0]):
        own = places.index(axis) if axis in places else None
        ways.append(Way((own if own is not None and operands[0][own] > 1 else None,), (axis,)))
    return ways


def _iota(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    """Along its own axis each slice would have to begin at another number."""
    return [Way((), (axis,)) for axis in _of(results[0]) if not operands and axis != params["dimension"]]


def _reshaped(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    """An axis stays where as much lies in front of it before and after."""
    if len(operands) != 1 or params["dimensions"] is not None:
        return []
    before, after = operands[0], results[0]
    ahead_after = [math.prod(after[:place]) for place in _of(after)]
    return [
        Way((axis,), (place,))
        for axis in _of(before)
        for place in _of(after)
        if ahead_after[place] == math.prod(before[:axis]) and before[axis] > 1 and after[place] > 1
    ]


def _transposed(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    return [Way((int(axis),), (place,)) for place, axis in enumerate(params["permutation"])]


def _squeezed(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    return _without(operands[0], [int(axis) for axis in params["dimensions"]])


def _without(shape: Shape, gone: Sequence[int]) -> list[Way]:
    kept = [axis for axis in _of(shape) if axis not in gone]
    return [Way((axis,), (place,)) for place, axis in enumerate(kept)]


def _reduced(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    return _without(operands[0], [int(axis) for axis in params["axes"]]) if len(operands) == 1 else []


def _summed(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    """What is not reduced stays, and a sum is the sum of the slices' sums."""
    return [*_reduced(params, operands, results), *(Way((int(axis),), (SUMMED,)) for axis in params["axes"])]


def _product(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    """A product over some pairs of axes, for each pair of others; axes of both are batches."""
    (left_summed, right_summed), (left_batch, right_batch) = params["dimension_numbers"]
    left, right = ([axis for axis in _of(shape)] for shape in operands)
    left_free = [axis for axis in left if axis not in left_summed and axis not in left_batch]
    right_free = [axis for axis in right if axis not in right_summed and axis not in right_batch]
    first = len(left_batch)
    return [
        *(Way((int(a), int(b)), (n,)) for n, (a, b) in enumerate(zip(left_batch, right_batch, strict=True))),
        *(Way((axis, None), (first + n,)) for n, axis in enumerate(left_free)),
        *(Way((None, axis), (first + len(left_free) + n,)) for n, axis in enumerate(right_free)),
        *(Way((int(a), int(b)), (SUMMED,)) for a, b in zip(left_summed, right_summed, strict=True)),
    ]


def _gathered(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    """Cut where each index, or each row of what is gathered, makes its own part of the result."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    source, indices = operands[0], operands[1]
    taken = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    places = [axis for axis in _of(results[0]) if axis not in numbers.offset_dims]
    ways = [Way((taken.get(axis), axis), (place,)) for axis, place in enumerate(places)] if indices else []
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = [axis for axis in _of(source) if axis not in gone]
    for axis, place in zip(windows, numbers.offset_dims, strict=True):
        if axis not in numbers.start_index_map and sizes[axis] == source[axis]:
            ways.append(Way((axis, None), (place,)))
    return ways


def _scattered(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    """Cut where each part of the updates goes to its own part of the result."""
    numbers = params["dimension_numbers"]
    source, _, updates = operands
    places = [axis for axis in _of(updates) if axis not in numbers.update_window_dims]
    batches = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    ways = [Way((own, axis, places[axis]), (own,)) for own, axis in batches]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [axis for axis in _of(source) if axis not in gone]
    for axis, place in zip(windows, numbers.update_window_dims, strict=True):
        if axis not in numbers.scatter_dims_to_operand_dims and updates[place] == source[axis]:
            ways.append(Way((axis, None, place), (axis,)))
    return ways


def _along_others(name: str) -> _Rule:
    """All operands and results have one shape; the axes that are worked on are a parameter."""

    def rule(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
        given = params[name]
        own = {given} if isinstance(given, int) else set(given)
        if len({*operands, *results}) != 1:
            return []
        axes = [axis for axis in _of(results[0]) if axis not in own]
        return [Way((axis,) * len(operands), (axis,) * len(results)) for axis in axes]

    return rule


def _concatenated(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    axes = [axis for axis in _of(results[0]) if axis != params["dimension"]]
    return [Way((axis,) * len(operands), (axis,)) for axis in axes]


def _padded(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    whole = [axis for axis, widths in enumerate(params["padding_config"]) if not any(widths)]
    return [Way((axis, None), (axis,)) for axis in whole]


def _kept_whole(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    """A part of an array, or an array with a part replaced: cut along the axes of which the part has all."""
    source, part = operands[0], results[0]
    rest = (None,) * (len(operands) - 1)
    return [Way((axis, *rest), (axis,)) for axis in _of(source) if source[axis] == part[axis]]


def _updated(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    source, part = operands[0], operands[1]
    rest = (None,) * (len(operands) - 2)
    return [Way((axis, axis, *rest), (axis,)) for axis in _of(source) if source[axis] == part[axis]]


def _same(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> list[Way]:
    return [Way((axis,), (axis,)) for axis in _of(results[0])]


_RULES: Final[dict[str, _Rule]] = {
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "reshape": _reshaped,
    "transpose": _transposed,
    "squeeze": _squeezed,
    **dict.fromkeys(("name", "stop_gradient"), _same),
    "reduce_sum": _summed,
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _reduced),
    **dict.fromkeys(("argmax", "argmin"), _reduced),
    "dot_general": _product,
    "gather": _gathered,
    "scatter-add": _scattered,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along_others("axis")),
    "sort": _along_others("dimension"),
    "rev": _along_others("dimensions"),
    "concatenate": _concatenated,
    "pad": _padded,
    **dict.fromkeys(("slice", "dynamic_slice"), _kept_whole),
    "dynamic_update_slice": _updated,
}
"""By the primitive's name. What ``op_facts`` lists as element-wise is cut along any axis."""


def _limits(params: dict[str, Any], operands: Sequence[Shape], made: Shape) -> dict[str, Any]:
    """Of the axes that a slice has all of, the cut one among them, it ends where its operand does."""
    whole = [
        not start and stride == 1 and stop >= size
        for start, stop, stride, size in zip(
            params["start_indices"],
            params["limit_indices"],
            params["strides"] or (1,) * len(made),
            operands[0],
            strict=True,
        )
    ]
    limits = zip(whole, operands[0], params["limit_indices"], strict=True)
    return {"limit_indices": tuple(size if is_whole else stop for is_whole, size, stop in limits)}


def _window(params: dict[str, Any], operands: Sequence[Shape], made: Shape) -> dict[str, Any]:
    """What is gathered at once is no larger than what there is."""
    return {"slice_sizes": tuple(map(min, params["slice_sizes"], operands[0]))}


_STATED_SHAPE: Final[dict[str, Callable[[dict[str, Any], Sequence[Shape], Shape], dict[str, Any]]]] = {
    **dict.fromkeys(("broadcast_in_dim", "iota"), lambda params, operands, made: {"shape": made}),
    "reshape": lambda params, operands, made: {"new_sizes": made},
    "slice": _limits,
    **dict.fromkeys(("gather", "dynamic_slice"), _window),
}
"""Primitives with a parameter that states a shape, and what that parameter is in a slice."""
