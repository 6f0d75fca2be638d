"""Each entry of the table of separable operations against the operation itself: slices make what the whole makes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.tensorflow import _private
from remat.tensorflow.split import separable_ops
from remat.tensorflow.split.separable_ops import parameter_inputs, sliced_parameters, ways_of
from remat.tensorflow.trace import op_facts
from remat.transform.merged_axes import count_merged, merged_shape, with_merged
from remat.transform.separable import SUMMED, Way
from remat.transform.split import Slice

EXAMPLES = 6  # Of each operation: an entry that is wrong is wrong for most shapes.
SIZES = st.sampled_from([2, 4, 3, 6, 1])
raw = tf.raw_ops


def numbers(*shape):
    values = np.random.default_rng(len(shape)).normal(size=shape).astype("float32")
    return tf.compat.v1.placeholder_with_default(tf.constant(values), shape)


def whole_numbers(limit, *shape):
    values = np.random.default_rng(limit).integers(0, limit, shape).astype("int32")
    return tf.compat.v1.placeholder_with_default(tf.constant(values), shape)


@st.composite
def shapes(draw, least=1, most=3):
    return tuple(draw(st.lists(SIZES, min_size=least, max_size=most)))


def axis_of(draw, shape):
    return draw(st.integers(0, len(shape) - 1))


def of_one(function, least=1):
    """A case of a function of one tensor; the function is told a random axis."""

    def case(draw):
        shape = draw(shapes(least))
        function(numbers(*shape), axis_of(draw, shape))

    return case


def pointwise(draw):
    shape = draw(shapes())
    kept = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    other = tuple(size if keep else 1 for size, keep in zip(shape, kept, strict=True))[draw(st.sampled_from([0, 1])) :]
    a, b = numbers(*shape), numbers(*other)
    draw(st.sampled_from([raw.AddV2, raw.Mul, raw.Maximum, raw.SquaredDifference]))(x=a, y=b)


def selected(draw):
    shape = draw(shapes())
    raw.SelectV2(condition=numbers(*shape) > 0, t=numbers(*shape[1:]), e=numbers(*shape))


def selected_by_rows(draw):
    shape = draw(shapes())
    rows = draw(st.sampled_from([shape[:1], shape]))
    raw.Select(condition=numbers(*rows) > 0, x=numbers(*shape), y=-numbers(*shape))


def product(draw):
    rows, inner, columns = (draw(SIZES) for _ in range(3))
    turned = draw(st.booleans()), draw(st.booleans())
    left = numbers(*((inner, rows) if turned[0] else (rows, inner)))
    right = numbers(*((columns, inner) if turned[1] else (inner, columns)))
    raw.MatMul(a=left, b=right, transpose_a=turned[0], transpose_b=turned[1])


def products(kind):
    def case(draw):
        rows, inner, columns, batch, more = (draw(SIZES) for _ in range(5))
        turned = draw(st.booleans()), draw(st.booleans())
        ahead = (batch, more)
        other = ahead if kind is raw.BatchMatMul else draw(st.sampled_from([ahead, (1, more), (more,), ()]))
        left = numbers(*ahead, *((inner, rows) if turned[0] else (rows, inner)))
        right = numbers(*other, *((columns, inner) if turned[1] else (inner, columns)))
        more_options = {"Tout": tf.float32} if kind is raw.BatchMatMulV3 else {}
        kind(x=left, y=right, adj_x=turned[0], adj_y=turned[1], **more_options)

    return case


def einsum(draw):
    letters = {letter: draw(SIZES) for letter in "abcde"}
    equation = draw(st.sampled_from(["ab,bc->ac", "abc,cd->abd", "abc,abd->cd", "abc,acd->abd", "abc->ca", "ab,b->a"]))
    terms = equation.partition("->")[0].split(",")
    raw.Einsum(inputs=[numbers(*(letters[one] for one in term)) for term in terms], equation=equation)


def bias(draw):
    shape = draw(shapes(2))
    is_first = len(shape) > 2 and draw(st.booleans())
    channels = shape[1 if is_first else -1]
    raw.BiasAdd(value=numbers(*shape), bias=numbers(channels), data_format="NCHW" if is_first else "NHWC")


def bias_gradient(draw):
    shape = draw(shapes(2))
    raw.BiasAddGrad(out_backprop=numbers(*shape), data_format="NCHW" if len(shape) > 2 else "NHWC")


def by_rows(draw):
    rows, words = draw(SIZES), draw(SIZES)
    raw.SparseSoftmaxCrossEntropyWithLogits(features=numbers(rows, words), labels=whole_numbers(words, rows))


def by_rows_densely(draw):
    rows, words = draw(SIZES), draw(SIZES)
    shape = draw(st.sampled_from([(rows, words), (1, words)]))
    raw.SoftmaxCrossEntropyWithLogits(features=numbers(rows, words), labels=tf.nn.softmax(numbers(*shape)))


def among_the_best(draw):
    rows, words = draw(SIZES), draw(SIZES)
    raw.InTopKV2(predictions=numbers(rows, words), targets=whole_numbers(words, rows), k=1)


def reshaped(draw):
    shape = draw(shapes(2, 4))
    start = draw(st.integers(0, len(shape) - 2))
    merged = (*shape[:start], shape[start] * shape[start + 1], *shape[start + 2 :])
    before, after = draw(st.sampled_from([(shape, merged), (merged, shape), (shape, (int(np.prod(shape)),))]))
    raw.Reshape(tensor=numbers(*before), shape=after)


def transposed(draw):
    shape = draw(shapes())
    raw.Transpose(x=numbers(*shape), perm=draw(st.permutations(range(len(shape)))))


def squeezed(draw):
    shape = list(draw(shapes(2)))
    axis = axis_of(draw, shape)
    shape[axis] = 1
    raw.Squeeze(input=numbers(*shape), axis=draw(st.sampled_from([[axis], [axis - len(shape)], []])))


def reduced(kind, values=numbers):
    def case(draw):
        shape = draw(shapes(2))
        axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
        kind(input=values(*shape), axis=axes, keep_dims=draw(st.booleans()))

    return case


def signs(*shape):
    return numbers(*shape) > 0


def one_hot(draw):
    index = draw(shapes(1, 2))
    axis = draw(st.sampled_from([-1, 0, 1]))
    raw.OneHot(indices=whole_numbers(5, *index), depth=5, on_value=1.0, off_value=0.0, axis=axis)


def gathered(draw):
    index, table = draw(shapes(1, 2)), draw(shapes(2, 3))
    axis = axis_of(draw, table)
    if draw(st.booleans()):
        raw.GatherV2(params=numbers(*table), indices=whole_numbers(table[axis], *index), axis=axis, batch_dims=0)
    else:
        index = whole_numbers(table[1], table[0], draw(SIZES))
        raw.GatherV2(params=numbers(*table), indices=index, axis=1, batch_dims=1)


def by_segment(draw):
    shape = draw(shapes(2))
    count = draw(st.integers(1, len(shape)))
    raw.UnsortedSegmentSum(data=numbers(*shape), segment_ids=whole_numbers(3, *shape[:count]), num_segments=3)


def joined(draw):
    shape = draw(shapes())
    raw.ConcatV2(values=[numbers(*shape), -numbers(*shape)], axis=axis_of(draw, shape))


def stacked(draw):
    shape = draw(shapes())
    raw.Pack(values=[numbers(*shape), -numbers(*shape)], axis=draw(st.integers(-1, len(shape))))


def unstacked(draw):
    shape = draw(shapes(2))
    axis = axis_of(draw, shape)
    raw.Unpack(value=numbers(*shape), num=shape[axis], axis=axis)


def cut_out(draw):
    shape = draw(shapes(2))
    axis = axis_of(draw, shape)
    begin = [shape[axis] // 2 if place == axis else 0 for place in range(len(shape))]
    size = [draw(st.sampled_from([-1, length - start])) for length, start in zip(shape, begin, strict=True)]
    raw.Slice(input=numbers(*shape), begin=begin, size=size)


def strided(draw):
    shape = draw(shapes(2))
    axis = axis_of(draw, shape)
    kind = draw(st.sampled_from(["end", "one", "step", "back", "new"]))
    index = [slice(None)] * len(shape)
    index[axis] = {"end": slice(1, None), "one": 0, "step": slice(None, None, 2), "back": slice(None, None, -1)}.get(
        kind, tf.newaxis
    )
    numbers(*shape)[tuple(index[: draw(st.integers(axis + 1, len(shape)))])]


def strided_gradient(draw):
    shape = draw(shapes(2))
    axis = axis_of(draw, shape)
    begin = [1 if place == axis and size > 1 else 0 for place, size in enumerate(shape)]
    part = [size - start for size, start in zip(shape, begin, strict=True)]
    raw.StridedSliceGrad(shape=shape, begin=begin, end=shape, strides=[1] * len(shape), dy=numbers(*part))


def tiled(draw):
    shape = draw(shapes())
    raw.Tile(
        input=numbers(*shape),
        multiples=draw(st.lists(st.sampled_from([1, 2]), min_size=len(shape), max_size=len(shape))),
    )


def padded(kind, **more):
    def case(draw):
        shape = draw(shapes(2))
        axis = axis_of(draw, shape)
        widths = [[1, 2] if place == axis else [0, 0] for place in range(len(shape))]
        kind(input=numbers(*shape), paddings=widths, **more)

    return case


def broadcast(draw):
    shape = draw(shapes())
    kept = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    small = tuple(size if keep else 1 for size, keep in zip(shape, kept, strict=True))
    raw.BroadcastTo(input=numbers(*small), shape=(*draw(st.sampled_from([(), (2,)])), *shape))


def filled(draw):
    raw.Fill(dims=draw(shapes()), value=3.0)


CASES = {
    "pointwise": pointwise,
    "SelectV2": selected,
    "Select": selected_by_rows,
    "AddN": of_one(lambda x, axis: raw.AddN(inputs=[x, x, -x])),
    "BroadcastTo": broadcast,
    "MatMul": product,
    "BatchMatMul": products(raw.BatchMatMul),
    "BatchMatMulV2": products(raw.BatchMatMulV2),
    "BatchMatMulV3": products(raw.BatchMatMulV3),
    "Einsum": einsum,
    "BiasAdd": bias,
    "BiasAddGrad": bias_gradient,
    "Softmax": of_one(lambda x, axis: raw.Softmax(logits=x)),
    "LogSoftmax": of_one(lambda x, axis: raw.LogSoftmax(logits=x)),
    "TopKV2": of_one(lambda x, axis: raw.TopKV2(input=x, k=1)),
    "SparseSoftmaxCrossEntropyWithLogits": by_rows,
    "SoftmaxCrossEntropyWithLogits": by_rows_densely,
    "InTopKV2": among_the_best,
    "Reshape": reshaped,
    "Transpose": transposed,
    "ExpandDims": of_one(lambda x, axis: raw.ExpandDims(input=x, axis=axis - 1)),
    "Squeeze": squeezed,
    "Sum": reduced(raw.Sum),
    "Max": reduced(raw.Max),
    "Min": reduced(raw.Min),
    "Mean": reduced(raw.Mean),
    "Prod": reduced(raw.Prod),
    "All": reduced(raw.All, signs),
    "Any": reduced(raw.Any, signs),
    "L2Loss": of_one(lambda x, axis: raw.L2Loss(t=x)),
    "ArgMax": of_one(lambda x, axis: raw.ArgMax(input=x, dimension=axis - x.shape.rank)),
    "ArgMin": of_one(lambda x, axis: raw.ArgMin(input=x, dimension=axis)),
    "OneHot": one_hot,
    "GatherV2": gathered,
    "UnsortedSegmentSum": by_segment,
    "ConcatV2": joined,
    "Pack": stacked,
    "Unpack": unstacked,
    "Slice": cut_out,
    "StridedSlice": strided,
    "StridedSliceGrad": strided_gradient,
    "Tile": tiled,
    "Pad": padded(raw.Pad),
    "PadV2": padded(raw.PadV2, constant_values=2.0),
    "Cumsum": of_one(lambda x, axis: raw.Cumsum(x=x, axis=axis)),
    "Fill": filled,
    **{
        kind: of_one(lambda x, axis, kind=kind: getattr(raw, kind)(x=x, y=tf.abs(x)))
        for kind in ("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual")
    },
    **{
        kind: of_one(lambda x, axis, kind=kind: getattr(raw, kind)(x=x))
        for kind in ("ZerosLike", "OnesLike", "IsNan", "IsInf", "IsFinite")
    },
    **{
        kind: of_one(lambda x, axis, kind=kind: getattr(raw, kind)(input=x))
        for kind in ("Identity", "StopGradient", "Snapshot", "PreventGradient")
    },
    "LogicalNot": of_one(lambda x, axis: raw.LogicalNot(x=x > 0)),
    "CheckNumerics": of_one(lambda x, axis: raw.CheckNumerics(tensor=x, message="")),
    "Bitcast": of_one(lambda x, axis: raw.Bitcast(input=x, type=tf.int32)),
    "Cast": of_one(lambda x, axis: raw.Cast(x=x, DstT=tf.float16)),
}


def operations(name, graph):
    """The operations of one kind in a graph."""
    for op in graph.get_operations():
        if op.type == name or (name == "pointwise" and op.type in op_facts.ELEMENTWISE):
            yield op


def known(op):
    """Parameters, and the shapes of operands and results."""
    places = parameter_inputs(op)
    operands = [tuple(t.shape) for place, t in enumerate(op.inputs) if place not in places]
    return (
        {place: _private.known_value(op.inputs[place]) for place in places},
        operands,
        [tuple(t.shape) for t in op.outputs],
    )


def one_slice(op, way, cut):
    """What a slice of an operation makes."""
    parameters, operands, results = known(op)
    told = {place: np.asarray(value).tolist() for place, value in parameters.items()}
    told |= sliced_parameters(op, parameters, way, operands, results)
    if isinstance(way.outputs[0], int):
        start, stop = cut.of(with_merged(results[0])[way.outputs[0]])
        told = {
            p: [stop - start if one is None else one for one in v] if isinstance(v, list) else v
            for p, v in told.items()
        }
    axes = iter(way.inputs)
    inputs = []
    for place, tensor in enumerate(op.inputs):
        if place in told:
            inputs.append(tf.constant(told[place], tensor.dtype))
            continue
        axis = next(axes)
        if axis is not None:
            shape = tuple(tensor.shape)
            start, stop = cut.of(with_merged(shape)[axis])
            count = count_merged(shape, axis)
            tensor = tf.reshape(tensor, merged_shape(shape, count))
            tensor = tf.gather(tensor, tf.range(start, stop), axis=axis if count == 1 else 0)
        inputs.append(tensor)
    return list(_private.slice_of_operation(op.graph, op, inputs, [], "a_slice").outputs)


def difference(op, way, made, whole):
    """What the slices of an operation make otherwise than the whole does; "" where nothing is."""
    for place, (part, expected) in enumerate(zip(way.outputs, whole, strict=True)):
        if part is None:
            continue
        slices = [one[place] for one in made]
        if part == SUMMED:
            found = sum(slices[1:], slices[0])
        else:
            found = np.concatenate(slices, part if part < expected.ndim else 0)
        if found.size == expected.size:
            found = found.reshape(expected.shape)  # Merged axes, and axes of length 1 that were summed over.
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
            return f"{way} of {op.type}, result {place}: {found} in place of {expected}"
    return ""


def check_all(name, ways=None, examples=EXAMPLES):
    """How many ways were tried, and the first difference."""
    tried, wrong = [], []

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data):
        with tf.Graph().as_default() as graph:
            CASES[name](data.draw)
            asked, cases = [], []
            for op in list(operations(name, graph)):
                parameters, operands, results = known(op)
                found = ways_of(op, parameters, operands, results) if ways is None else ways(op)
                for way in found:
                    assert len(way.inputs) == len(operands), "a place for each operand"
                    assert len(way.outputs) == len(results), "a place for each result"
                    cut = [*zip(operands, way.inputs, strict=True), *zip(results, way.outputs, strict=True)]
                    sizes = [with_merged(shape)[axis] for shape, axis in cut if isinstance(axis, int)]
                    for units in (n for n in (2, 3) if all(size % n == 0 for size in sizes)):
                        slices = [one_slice(op, way, Slice(n, n, n + 1, units)) for n in range(units)]
                        asked.append((list(op.outputs), slices))
                        cases.append((op, way))
            with tf.compat.v1.Session(graph=graph) as session:
                for (op, way), (whole, made) in zip(cases, session.run(asked) if asked else [], strict=True):
                    tried.append(way)
                    wrong.append(difference(op, way, made, whole))

    check()
    return len(tried), next(filter(None, wrong), "")


def test_every_entry_has_a_case():
    assert set(separable_ops._RULES) <= set(CASES)


QUICK = ("MatMul", "Reshape", "Sum")
"""The others are tried in the thorough suite."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in CASES]
)
def test_slices_make_what_the_whole_makes(name):
    tried, wrong = check_all(name)
    assert wrong == ""
    assert tried, "no way of the operation was tried"


def test_random_operations_are_never_cut():
    with tf.Graph().as_default() as graph:
        tf.random.normal((4, 6))
        tf.random.stateless_uniform((4, 6), (1, 2))
        drawn = [op for op in graph.get_operations() if "andom" in op.type]
        assert drawn
        for op in drawn:
            shapes_of_operands = [tuple(t.shape) for t in op.inputs]
            assert ways_of(op, {}, shapes_of_operands, [tuple(t.shape) for t in op.outputs]) == ()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (
            "Max",
            lambda op: (
                [Way((0,), (SUMMED,))]
                if op.outputs[0].shape != op.inputs[0].shape and op.inputs[0].shape[0] > 1
                else []
            ),
        ),
        pytest.param(
            "Softmax",
            lambda op: [Way((op.inputs[0].shape.rank - 1,), (op.inputs[0].shape.rank - 1,))],
            marks=pytest.mark.thorough,
        ),
        pytest.param("Cumsum", lambda op: [Way((0,), (0,))], marks=pytest.mark.thorough),
        pytest.param(
            "MatMul",
            lambda op: [] if op.get_attr("transpose_a") else [Way((0, None), (1,))],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_broken_entry_is_caught(name, wrong):
    assert "in place of" in check_all(name, wrong, examples=12)[1]
