"""Each entry of the table of separable operators against the operator itself: slices make what the whole makes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.torch.graph_mode import separable_ops
from remat.transform.merged_axes import count_merged, merged_shape, with_merged
from remat.transform.separable import SUMMED, Way
from remat.transform.split import Slice

aten = torch.ops.aten
EXAMPLES = 12  # Of each operator: an entry that is wrong is wrong for most shapes.
SIZES = st.sampled_from([2, 4, 3, 6, 1])


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64)


@st.composite
def shapes(draw, least=1, most=3):
    return tuple(draw(st.lists(SIZES, min_size=least, max_size=most)))


def unary(func, *rest):
    return lambda draw: (func, (numbers(*draw(shapes())), *rest), {})


def positive(func):
    return lambda draw: (func, (numbers(*draw(shapes())).abs() + 0.5,), {})


def binary(func):
    def case(draw):
        shape = draw(shapes())
        kept = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
        other = tuple(size if keep else 1 for size, keep in zip(shape, kept, strict=True))
        pair = [numbers(*shape), numbers(*other[draw(st.integers(0, len(shape) - 1)) :])]
        return func, tuple(reversed(pair)) if draw(st.booleans()) else tuple(pair), {}

    return case


def same_shape(func, *rest):
    def case(draw):
        shape = draw(shapes())
        return func, (numbers(*shape), numbers(*shape), *rest), {}

    return case


def axis_of(draw, shape):
    return draw(st.integers(-len(shape), len(shape) - 1))


def along(func, operands, *rest):
    def case(draw):
        shape = draw(shapes())
        return func, (*(numbers(*shape) for _ in range(operands)), axis_of(draw, shape), *rest), {}

    return case


def product(func, batch):
    def case(draw):
        m, n, k, b = (draw(SIZES) for _ in range(4))
        lead = (b,) if batch else ()
        return func, (numbers(*lead, m, k), numbers(*lead, k, n)), {}

    return case


def addmm(draw):
    m, n, k = (draw(SIZES) for _ in range(3))
    return aten.addmm.default, (numbers(n), numbers(m, k), numbers(k, n)), {}


def reshaped(func):
    def case(draw):
        shape = draw(shapes(2, 4))
        start = draw(st.integers(0, len(shape) - 2))
        size = shape[start] * shape[start + 1]
        merged = (*shape[:start], size, *shape[start + 2 :])
        before, after = (shape, merged) if draw(st.booleans()) else (merged, shape)
        return func, (numbers(*before), list(after)), {}

    return case


def expanded(draw):
    shape = draw(shapes())
    keeps = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    small = tuple(size if keep else 1 for size, keep in zip(shape, keeps, strict=True))
    return aten.expand.default, (numbers(*small), [*shape]), {}


def permuted(draw):
    shape = draw(shapes())
    return aten.permute.default, (numbers(*shape), draw(st.permutations(range(len(shape))))), {}


def transposed(draw):
    shape = draw(shapes())
    return aten.transpose.int, (numbers(*shape), axis_of(draw, shape), axis_of(draw, shape)), {}


def squeezed(draw):
    shape = list(draw(shapes(2)))
    axis = draw(st.integers(0, len(shape) - 1))
    shape[axis] = draw(st.sampled_from([1, shape[axis]]))
    return aten.squeeze.dim, (numbers(*shape), axis), {}


def sliced(draw):
    shape = draw(shapes(2))
    axis = draw(st.integers(0, len(shape) - 1))
    stop = draw(st.integers(1, shape[axis]))
    return aten.slice.Tensor, (numbers(*shape), axis, 0, stop), {}


def slice_backward(draw):
    func, (tensor, axis, start, stop), _ = sliced(draw)
    part = func(tensor, axis, start, stop).clone()
    return aten.slice_backward.default, (part, list(tensor.shape), axis, start, stop, 1), {}


def reduced(func):
    def case(draw):
        shape = draw(shapes(2))
        axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape) - 1, unique=True))
        return func, (numbers(*shape), axes, draw(st.booleans())), {}

    return case


def layer_norm(draw):
    shape = draw(shapes(2, 3))
    width = [shape[-1]]
    weight = numbers(*width) if draw(st.booleans()) else None
    return aten.native_layer_norm.default, (numbers(*shape), width, weight, weight, 1e-5), {}


def layer_norm_backward(draw):
    _, (inputs, width, weight, bias, _), _ = layer_norm(draw)
    _, mean, scale = aten.native_layer_norm.default(inputs, width, weight, bias, 1e-5)
    mask = [True, weight is not None, bias is not None]
    args = (numbers(*inputs.shape), inputs, width, mean, scale, weight, bias, mask)
    return aten.native_layer_norm_backward.default, args, {}


def nll(draw):
    rows, words = draw(SIZES), draw(SIZES)
    labels = torch.randint(0, words, (rows,))
    labels[: draw(st.integers(0, rows - 1))] = -100
    return aten.nll_loss_forward.default, (numbers(rows, words), labels, None, draw(st.integers(0, 2)), -100), {}


def nll_backward(draw):
    _, (logarithms, labels, weight, reduction, ignored), _ = nll(draw)
    out, total = aten.nll_loss_forward.default(logarithms, labels, weight, reduction, ignored)
    args = (numbers(*out.shape), logarithms, labels, weight, reduction, ignored, total)
    return aten.nll_loss_backward.default, args, {}


def nll_2d(draw):
    samples, words, height, width = draw(SIZES), draw(st.integers(2, 5)), draw(SIZES), draw(SIZES)
    labels = torch.randint(0, words, (samples, height, width))
    labels[labels == 0] = draw(st.sampled_from([0, -100]))
    args = (numbers(samples, words, height, width), labels, None, draw(st.integers(0, 2)), -100)
    return aten.nll_loss2d_forward.default, args, {}


def nll_2d_backward(draw):
    _, args, _ = nll_2d(draw)
    out, total = aten.nll_loss2d_forward.default(*args)
    return aten.nll_loss2d_backward.default, (numbers(*out.shape), *args, total), {}


def embedding(draw):
    return aten.embedding.default, (numbers(5, 3), torch.randint(0, 5, draw(shapes()))), {}


def gathered(draw):
    shape = draw(shapes())
    axis = draw(st.integers(0, len(shape) - 1))
    return aten.gather.default, (numbers(*shape), axis, torch.randint(0, shape[axis], shape)), {}


def where(draw):
    shape = draw(shapes())
    return aten.where.self, (numbers(*shape) > 0, numbers(*shape), numbers(*shape)), {}


def masked_fill(draw):
    shape = draw(shapes())
    return aten.masked_fill.Scalar, (numbers(*shape), numbers(*shape) > 0, 0.0), {}


def truths(func, count):
    def case(draw):
        shape = draw(shapes())
        return func, tuple(numbers(*shape) > 0 for _ in range(count)), {}

    return case


CASES = {
    **{
        name: binary(getattr(aten, name).Tensor)
        for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")
    },
    **{name: binary(getattr(aten, name).default) for name in ("maximum", "minimum")},
    **{
        name: unary(getattr(aten, name).default)
        for name in ("neg", "abs", "exp", "reciprocal", "tanh", "sigmoid", "relu", "gelu", "silu", "softplus", "clone")
    },
    **{name: unary(getattr(aten, name).default) for name in ("detach", "alias", "zeros_like", "ones_like")},
    **{name: positive(getattr(aten, name).default) for name in ("log", "log1p", "sqrt", "rsqrt")},
    **{
        name: same_shape(getattr(aten, name).default)
        for name in ("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward")
    },
    "threshold_backward": same_shape(aten.threshold_backward.default, 0),
    "pow": unary(aten.pow.Tensor_Scalar, 2),
    "clamp": unary(aten.clamp.default, -0.5, 0.5),
    "clamp_min": unary(aten.clamp_min.default, 0.0),
    "logical_not": truths(aten.logical_not.default, 1),
    "bitwise_not": truths(aten.bitwise_not.default, 1),
    "logical_and": truths(aten.logical_and.default, 2),
    "bitwise_and": truths(aten.bitwise_and.Tensor, 2),
    "where": where,
    "masked_fill": masked_fill,
    "_to_copy": lambda draw: (aten._to_copy.default, (numbers(*draw(shapes())),), {"dtype": torch.float32}),
    "mm": product(aten.mm.default, False),
    "bmm": product(aten.bmm.default, True),
    "addmm": addmm,
    "t": lambda draw: (aten.t.default, (numbers(draw(SIZES), draw(SIZES)),), {}),
    "transpose": transposed,
    "permute": permuted,
    "view": reshaped(aten.view.default),
    "_unsafe_view": reshaped(aten._unsafe_view.default),
    "reshape": reshaped(aten.reshape.default),
    "unsqueeze": lambda draw: (aten.unsqueeze.default, (numbers(*(shape := draw(shapes()))), axis_of(draw, shape)), {}),
    "squeeze": squeezed,
    "slice": sliced,
    "slice_backward": slice_backward,
    "expand": expanded,
    "_softmax": along(aten._softmax.default, 1, False),
    "_log_softmax": along(aten._log_softmax.default, 1, False),
    "_softmax_backward_data": along(aten._softmax_backward_data.default, 2, torch.float64),
    "_log_softmax_backward_data": along(aten._log_softmax_backward_data.default, 2, torch.float64),
    "sum": reduced(aten.sum.dim_IntList),
    "mean": reduced(aten.mean.dim),
    "amax": reduced(aten.amax.default),
    "amin": reduced(aten.amin.default),
    "logsumexp": reduced(aten.logsumexp.default),
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "nll_loss_forward": nll,
    "nll_loss_backward": nll_backward,
    "nll_loss2d_forward": nll_2d,
    "nll_loss2d_backward": nll_2d_backward,
    "embedding": embedding,
    "gather": gathered,
}


def results(made):
    return list(made) if isinstance(made, tuple | list) else [made]


def flat(tensor, axis):
    """A tensor with its first axes as one, where it is cut along these."""
    count = count_merged(tensor.shape, axis)
    return (tensor, axis) if count == 1 else (tensor.reshape(merged_shape(tensor.shape, count)), 0)


def difference(func, args, kwargs, way: Way, units: int) -> str:
    """What the slices of a call make otherwise than the whole does; "" where nothing is."""
    whole = results(func(*args, **kwargs))
    operands = separable_ops.tensors_in((args, kwargs))
    assert len(way.inputs) == len(operands), "a place for each operand"
    assert len(way.outputs) == len(whole), "a place for each result"
    made = []
    for number in range(units):
        cut = Slice(number, number, number + 1, units)
        parts = []
        for one, axis in zip(operands, way.inputs, strict=True):
            if axis is None:
                parts.append(one)
                continue
            one, axis = flat(one, axis)
            if one.shape[axis] % units:
                return f"axis {axis} of {tuple(one.shape)} has not {units} units"
            start, stop = cut.of(one.shape[axis])
            parts.append(one.narrow(axis, start, stop - start).contiguous())
        given = iter(parts)
        replaced = [next(given) if isinstance(one, torch.Tensor) else one for one in args]
        first = way.outputs[0]
        shape = whole[0].shape
        if isinstance(first, int):
            like, first = flat(whole[0], first)
            shape = cut.shape(like.shape, first)
        made.append(results(func(*separable_ops.sliced_arguments(func, tuple(replaced), shape), **kwargs)))
    for place, (part, expected) in enumerate(zip(way.outputs, whole, strict=True)):
        if part is None or expected is None:
            continue
        slices = [one[place] for one in made]
        if part != SUMMED:
            expected, part = flat(expected, part)
        found = sum(slices[1:], slices[0]) if part == SUMMED else torch.cat(slices, part)
        if found.shape != expected.shape or not torch.allclose(found, expected, equal_nan=True):
            return f"result {place}: {found} in place of {expected}"
    return ""


def units_of(args, way, made):
    """Into how many equal units all cut axes can be divided."""
    pairs = [
        *zip(separable_ops.tensors_in(args), way.inputs, strict=True),
        *zip(results(made), way.outputs, strict=True),
    ]
    sizes = [with_merged(one.shape)[axis] for one, axis in pairs if isinstance(axis, int)]
    return [n for n in (2, 3) if all(size % n == 0 for size in sizes)]


def test_every_entry_has_a_case():
    assert set(separable_ops._RULES) - set(CASES) == {"_reshape_alias"}


@pytest.mark.parametrize("name", CASES)
def test_slices_make_what_the_whole_makes(name):
    seen = 0

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data):
        nonlocal seen
        torch.manual_seed(0)
        func, args, kwargs = CASES[name](data.draw)
        whole = func(*args, **kwargs)
        for way in separable_ops.ways_of(func, args, kwargs, whole):
            for units in units_of(args, way, whole):
                seen += 1
                assert difference(func, args, kwargs, way, units) == ""

    check()
    assert seen, "no way of the operator was tried"


@pytest.mark.parametrize("name", sorted(separable_ops._LINEAR))
def test_linear_operators_are_linear(name):
    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data):
        torch.manual_seed(0)
        func, args, kwargs = CASES[name](data.draw)
        operands = separable_ops.tensors_in((args, kwargs))
        count = len(operands)
        for number in range(1, 2**count):
            among = [bool(number >> place & 1) for place in range(count)]
            floats = all(one.is_floating_point() for one, has in zip(operands, among, strict=True) if has)
            if not floats or not separable_ops.is_linear(func, among, args):
                continue
            given = iter([one * 3 if has else one for one, has in zip(operands, among, strict=True)])
            scaled = [next(given) if isinstance(one, torch.Tensor) else one for one in args]
            torch.testing.assert_close(func(*scaled, **kwargs), func(*args, **kwargs) * 3)

    check()


@pytest.mark.parametrize(
    ("name", "among", "args", "linear"),
    [
        ("add.Tensor", [True, True], (), True),
        ("add.Tensor", [True, False], (), False),
        ("add.Tensor", [True], (), False),
        ("mul.Tensor", [True, True], (), False),
        ("mul.Tensor", [True, False], (), True),
        ("div.Tensor", [False, True], (), False),
        ("div.Tensor_mode", [True, False], (), False),
        ("masked_fill.Scalar", [True, False], (None, None, 0), True),
        ("masked_fill.Scalar", [True, False], (None, None, 1.0), False),
        ("where.self", [False, True, False], (), False),
        ("tanh.default", [True], (), False),
        ("nll_loss_backward.default", [True, True, False, False], (), False),
    ],
)
def test_what_is_linear_in_what(name, among, args, linear):
    packet, _, overload = name.partition(".")
    assert separable_ops.is_linear(getattr(getattr(aten, packet), overload), among, args) is linear


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_softmax", lambda args: [Way((args[1],), (args[1],))]),
        ("mm", lambda args: [Way((1, 0), (0,))]),
        ("mean", lambda args: [Way((args[1][0],), (SUMMED,))]),
        ("nll_loss_forward", lambda args: [Way((0, 0), (SUMMED, SUMMED))]),
    ],
)
def test_a_broken_entry_is_seen(name, wrong):
    found = []

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data):
        torch.manual_seed(0)
        func, args, kwargs = CASES[name](data.draw)
        for way in wrong(args):
            for units in units_of(args, way, func(*args, **kwargs)):
                try:
                    found.append(difference(func, args, kwargs, way, units))
                except (RuntimeError, IndexError) as error:
                    found.append(str(error))

    check()
    assert any(found)
