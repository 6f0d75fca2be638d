"""Each entry of the table of separable primitives against the primitive itself: slices make what the whole makes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from remat.jax import _private
from remat.jax._private import Literal
from remat.jax.split import separable_primitives
from remat.jax.split.separable_primitives import sliced_parameters, ways_of
from remat.jax.trace import op_facts
from remat.transform.separable import SUMMED, Way
from remat.transform.split import Slice

EXAMPLES = 4  # Of each primitive: an entry that is wrong is wrong for most shapes.
SIZES = st.sampled_from([2, 4, 3, 6, 1])


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def whole_numbers(limit, *shape):
    return jnp.asarray(np.random.default_rng(limit).integers(0, limit, shape), jnp.int32)


@st.composite
def shapes(draw, least=1, most=3):
    return tuple(draw(st.lists(SIZES, min_size=least, max_size=most)))


def axis_of(draw, shape):
    return draw(st.integers(0, len(shape) - 1))


def of_one(function):
    """A case of a function of one array; the function is told a random axis."""

    def case(draw):
        shape = draw(shapes())
        axis = axis_of(draw, shape)
        return lambda x: function(x, axis), (numbers(*shape),)

    return case


def pointwise(draw):
    shape = draw(shapes())
    kept = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    other = tuple(size if keep else 1 for size, keep in zip(shape, kept, strict=True))
    functions = (jnp.add, jnp.multiply, jnp.maximum, jnp.less, lambda a, b: jnp.where(a > 0, a, b * 2))
    return draw(st.sampled_from(functions)), (numbers(*shape), numbers(*other))


def broadcast(draw):
    shape = draw(shapes())
    keeps = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    small = tuple(size if keep else 1 for size, keep in zip(shape, keeps, strict=True))
    lead = draw(st.sampled_from([(), (2,), (3,)]))
    places = tuple(range(len(lead), len(lead) + len(shape)))
    return lambda x: lax.broadcast_in_dim(x, (*lead, *shape), places), (numbers(*small),)


def iota(draw):
    shape = draw(shapes())
    axis = axis_of(draw, shape)
    return lambda: lax.broadcasted_iota(jnp.int32, shape, axis), ()


def reshaped(draw):
    shape = draw(shapes(2, 4))
    start = draw(st.integers(0, len(shape) - 2))
    merged = (*shape[:start], shape[start] * shape[start + 1], *shape[start + 2 :])
    before, after = (shape, merged) if draw(st.booleans()) else (merged, shape)
    return lambda x: lax.reshape(x, after), (numbers(*before),)


def transposed(draw):
    shape = draw(shapes())
    order = draw(st.permutations(range(len(shape))))
    return lambda x: lax.transpose(x, order), (numbers(*shape),)


def squeezed(draw):
    shape = list(draw(shapes(2)))
    axis = axis_of(draw, shape)
    shape[axis] = 1
    return lambda x: lax.squeeze(x, (axis,)), (numbers(*shape),)


def reduced(function):
    def case(draw):
        shape = draw(shapes(2))
        axes = tuple(draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape) - 1, unique=True)))
        return lambda x: function(x, axes), (numbers(*shape),)

    return case


def product(draw):
    letters = {letter: draw(SIZES) for letter in "abcde"}
    specs = ["ab,bc->ac", "abc,cd->abd", "abc,abd->cd", "abc,acd->abd", "ba,cb->ac", "abcd,abed->abce"]
    spec = draw(st.sampled_from(specs))
    left, right = spec.partition("->")[0].split(",")
    operands = [numbers(*(letters[letter] for letter in one)) for one in (left, right)]
    return lambda a, b: jnp.einsum(spec, a, b), tuple(operands)


def rows(draw):
    index = draw(shapes(1, 2))
    return lambda table, i: table[i], (numbers(5, draw(SIZES)), whole_numbers(5, *index))


def along_axis(draw):
    shape = draw(shapes(2))
    axis = axis_of(draw, shape)
    index = (*shape[:axis], draw(st.sampled_from([1, 2])), *shape[axis + 1 :])
    return lambda x, i: jnp.take_along_axis(x, i, axis), (numbers(*shape), whole_numbers(shape[axis], *index))


def gathered(draw):
    return draw(st.sampled_from([rows, along_axis]))(draw)


def scattered(draw):
    function, (source, index) = gathered(draw)
    made = function(source, index)

    def gradient(made, index):
        return jax.vjp(lambda x: function(x, index), jnp.zeros(source.shape))[1](made)[0]

    return gradient, (numbers(*made.shape), index)


def concatenated(draw):
    shape = draw(shapes())
    axis = axis_of(draw, shape)
    return lambda *xs: lax.concatenate(xs, axis), (numbers(*shape), numbers(*shape))


def padded(draw):
    shape = draw(shapes(2))
    axis = axis_of(draw, shape)
    widths = [(0, 0, 0)] * len(shape)
    widths[axis] = (1, 2, 0)
    return lambda x: lax.pad(x, 0.0, widths), (numbers(*shape),)


def sliced(draw):
    shape = draw(shapes(2))
    axis = axis_of(draw, shape)
    start = draw(st.integers(0, shape[axis] - 1))
    step = draw(st.sampled_from([1, 2]))
    return lambda x: lax.slice_in_dim(x, start, shape[axis], step, axis), (numbers(*shape),)


def dynamic_slice(draw):
    shape = draw(shapes(2))
    axis = axis_of(draw, shape)
    return lambda x, i: lax.dynamic_slice_in_dim(x, i, 1, axis), (numbers(*shape), jnp.int32(shape[axis] - 1))


def dynamic_update_slice(draw):
    _, (x, i) = dynamic_slice(draw)
    axis = axis_of(draw, x.shape)
    part = numbers(*(1 if place == axis else size for place, size in enumerate(x.shape)))
    return lambda x, part, i: lax.dynamic_update_slice_in_dim(x, part, i, axis), (x, part, i * 0)


CASES = {
    "pointwise": pointwise,
    "broadcast_in_dim": broadcast,
    "iota": iota,
    "reshape": reshaped,
    "transpose": transposed,
    "squeeze": squeezed,
    "name": of_one(lambda x, axis: checkpoint_name(x, "x")),
    "stop_gradient": of_one(lambda x, axis: lax.stop_gradient(x)),
    "reduce_sum": reduced(jnp.sum),
    "reduce_max": reduced(jnp.max),
    "reduce_min": reduced(jnp.min),
    "reduce_prod": reduced(jnp.prod),
    "reduce_and": reduced(lambda x, axes: jnp.all(x > 0, axes)),
    "reduce_or": reduced(lambda x, axes: jnp.any(x > 0, axes)),
    "argmax": of_one(jnp.argmax),
    "argmin": of_one(jnp.argmin),
    "dot_general": product,
    "gather": gathered,
    "scatter-add": scattered,
    "cumsum": of_one(lax.cumsum),
    "cumprod": of_one(lax.cumprod),
    "cummax": of_one(lax.cummax),
    "cummin": of_one(lax.cummin),
    "cumlogsumexp": of_one(lax.cumlogsumexp),
    "sort": of_one(lambda x, axis: lax.sort((x, x * 2), dimension=axis)),
    "rev": of_one(lambda x, axis: lax.rev(x, (axis,))),
    "concatenate": concatenated,
    "pad": padded,
    "slice": sliced,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}


def equations(name, function, args):
    """The equations of one primitive in a function, each with what it reads."""
    closed = jax.make_jaxpr(function)(*args)
    found, reads = [], []

    def walk(jaxpr, consts, given):
        values = {**dict(zip(jaxpr.constvars, consts, strict=True)), **dict(zip(jaxpr.invars, given, strict=True))}
        for eqn in jaxpr.eqns:
            read = [var.val if isinstance(var, Literal) else values[var] for var in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit"):
                made = walk(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, read)
            else:
                made = _private.evaluate(eqn, read)
            if eqn.primitive.name == name or (name == "pointwise" and op_facts.is_elementwise(eqn)):
                found.append(eqn)
                reads.append(read)
            values.update(zip(eqn.outvars, made, strict=True))
        return [var.val if isinstance(var, Literal) else values[var] for var in jaxpr.outvars]

    def run(*args):
        walk(closed.jaxpr, closed.consts, args)
        return reads

    return list(zip(found, jax.jit(run)(*args), strict=True))


def difference(eqn, read, way, units):
    """What the slices of an equation make otherwise than the whole does; "" where nothing is."""
    axes = iter(way.inputs)
    cuts = [None if isinstance(var, Literal) else next(axes) for var in eqn.invars]
    shapes = [var.aval.shape for var in eqn.outvars]

    def run(read):
        return _private.evaluate(eqn, read), [one_slice(read, number) for number in range(units)]

    def one_slice(read, number):
        cut = Slice(number, number, number + 1, units)
        parts = []
        for array, axis in zip(read, cuts, strict=True):
            start, stop = (0, 0) if axis is None else cut.of(array.shape[axis])
            parts.append(array if axis is None else lax.slice_in_dim(array, start, stop, axis=axis))
        first = way.outputs[0]
        shape = cut.shape(shapes[0], first if isinstance(first, int) else None)
        params = sliced_parameters(eqn, [jnp.shape(part) for part in parts], shape)
        return _private.evaluate(eqn.replace(params=params), parts)

    whole, made = jax.jit(run)(read)
    for place, (part, expected) in enumerate(zip(way.outputs, whole, strict=True)):
        slices = [one[place] for one in made]
        found = sum(slices[1:], slices[0]) if part == SUMMED else np.concatenate(slices, part)
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"result {place}: {found} in place of {expected}"
    return ""


def units_of(eqn, read, way):
    """Into how many equal units all cut axes can be divided."""
    operands = [value for var, value in zip(eqn.invars, read, strict=True) if not isinstance(var, Literal)]
    assert len(way.inputs) == len(operands), "a place for each operand"
    assert len(way.outputs) == len(eqn.outvars), "a place for each result"
    pairs = [*zip(operands, way.inputs, strict=True), *zip([v.aval for v in eqn.outvars], way.outputs, strict=True)]
    sizes = [jnp.shape(one)[axis] for one, axis in pairs if isinstance(axis, int)]
    return [n for n in (2, 3) if all(size % n == 0 for size in sizes)]


def check_all(name, see, ways=None, examples=EXAMPLES):
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data):
        function, args = CASES[name](data.draw)
        for eqn, read in equations(name, function, args):
            found = ways_of(eqn, [not isinstance(var, Literal) for var in eqn.invars]) if ways is None else ways(eqn)
            for way in found:
                for units in units_of(eqn, read, way):
                    see(eqn, read, way, units)

    check()


def test_every_entry_has_a_case():
    assert set(separable_primitives._RULES) == set(CASES) - {"pointwise"}


QUICK = ("reduce_sum", "dot_general", "gather")
"""The others are tried in the thorough suite."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in CASES]
)
def test_slices_make_what_the_whole_makes(name):
    seen = []

    def see(*case):
        seen.append(case)
        assert difference(*case) == ""

    check_all(name, see)
    assert seen, "no way of the primitive was tried"


def test_random_primitives_are_never_cut():
    def draws(key):
        return jax.random.bits(key, (4, 6)), jax.random.normal(jax.random.key(0), (4, 6))

    closed = jax.make_jaxpr(draws)(jax.random.key(1))
    names = {eqn.primitive.name for eqn in closed.jaxpr.eqns if eqn.primitive.name.startswith(("random", "threefry"))}
    assert names
    assert all(not ways_of(eqn, [True] * len(eqn.invars)) for eqn in closed.jaxpr.eqns if eqn.primitive.name in names)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gather", lambda eqn: [Way((None, 0), (0,))] if eqn.params["dimension_numbers"].operand_batching_dims else []),
        *(
            pytest.param(name, wrong, marks=pytest.mark.thorough)
            for name, wrong in (
                ("reduce_max", lambda eqn: [Way((eqn.params["axes"][0],), (SUMMED,))]),
                ("cumsum", lambda eqn: [Way((eqn.params["axis"],), (eqn.params["axis"],))]),
                ("sort", lambda eqn: [Way((eqn.params["dimension"],) * 2, (eqn.params["dimension"],) * 2)]),
            )
        ),
    ],
)
def test_a_broken_entry_is_seen(name, wrong):
    found = []

    def see(*case):
        try:
            found.append(difference(*case))
        except (TypeError, ValueError) as error:
            found.append(str(error))

    check_all(name, see, wrong, examples=8)
    assert any(found)
