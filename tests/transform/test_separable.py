"""Regions of random NumPy programs, cut along random axes, give what the programs give uncut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from remat.transform.separable import SUMMED, Call, Program, Region, Way, find_region
from remat.transform.split import Slice, write_slices


def pointwise(name, function):
    return name, lambda *xs: [function(*xs)]


KINDS = dict(
    [
        pointwise("add", np.add),
        pointwise("mul", np.multiply),
        pointwise("tanh", np.tanh),
        ("matmul", lambda a, b: [a @ b]),
        ("transpose", lambda a: [a.T]),
        (
            "softmax",
            lambda a: [np.exp(a - a.max(1, keepdims=True)) / np.exp(a - a.max(1, keepdims=True)).sum(1)[:, None]],
        ),
        ("rowsum", lambda a: [a.sum(1, keepdims=True)]),
        ("colsum", lambda a: [a.sum(0, keepdims=True)]),
        ("cumsum", lambda a: [np.cumsum(a, 0)]),
        ("both", lambda a: [a * 2, a.sum(0, keepdims=True)]),
    ]
)


def ways_of(kind, shapes):
    """The ways of each kind of call; "cumsum" is one that nothing is known of."""
    if kind in ("add", "mul", "tanh"):
        out = np.broadcast_shapes(*shapes)
        return tuple(
            Way(tuple(axis if shape[axis] == out[axis] else None for shape in shapes), (axis,))
            for axis in range(2)
            if out[axis] > 1
        )
    return {
        "matmul": (Way((0, None), (0,)), Way((None, 1), (1,)), Way((1, 0), (SUMMED,))),
        "transpose": (Way((0,), (1,)), Way((1,), (0,))),
        "softmax": (Way((0,), (0,)),),
        "rowsum": (Way((0,), (0,)), Way((1,), (SUMMED,))),
        "colsum": (Way((1,), (1,)), Way((0,), (SUMMED,))),
        "cumsum": (),
        "both": (Way((0,), (0, SUMMED)), Way((1,), (1, 1))),
    }[kind]


class Step:
    """A random program with a kind for each call."""

    def __init__(self, inputs, kinds, operands, returned):
        self.inputs = inputs
        self.kinds = kinds
        values = list(inputs)
        calls = []
        for kind, read in zip(kinds, operands, strict=True):
            made = KINDS[kind](*(values[one] for one in read))
            shapes = [values[one].shape for one in read]
            ids = tuple(range(len(values), len(values) + len(made)))
            calls.append(Call(tuple(read), ids, ways_of(kind, shapes)))
            values.extend(made)
        self.values = values
        self.program = Program(
            tuple(calls),
            tuple(value.shape for value in values),
            tuple(value.nbytes for value in values),
            frozenset(returned) | {len(values) - 1},
        )


@st.composite
def steps(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=3))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    shapes = draw(st.lists(st.tuples(st.sampled_from(sizes), st.sampled_from(sizes)), min_size=1, max_size=3))
    inputs = [random.standard_normal(shape) for shape in shapes]
    values, kinds, operands = list(inputs), [], []
    for _ in range(draw(st.integers(2, 10))):
        options = []
        for kind in KINDS:
            if kind in ("add", "mul"):
                pairs = [
                    (a, b)
                    for a in range(len(values))
                    for b in range(len(values))
                    if all(m == n or 1 in (m, n) for m, n in zip(values[a].shape, values[b].shape, strict=True))
                ]
            elif kind == "matmul":
                pairs = [
                    (a, b)
                    for a in range(len(values))
                    for b in range(len(values))
                    if values[a].shape[1] == values[b].shape[0]
                ]
            else:
                pairs = [(a,) for a in range(len(values))]
            # What was made last is read more often than not, so that regions grow.
            options.extend((kind, pair) for pair in pairs if len(values) - 1 in pair or draw(st.booleans()))
        kind, read = draw(st.sampled_from(options))
        kinds.append(kind)
        operands.append(read)
        values.extend(KINDS[kind](*(values[one] for one in read)))
    returned = draw(st.sets(st.integers(len(inputs), len(values) - 1), max_size=2))
    return Step(inputs, kinds, operands, returned)


class NumpyWriter:
    """Runs what it is told to write; buffers start as what must never be read."""

    def __init__(self, step: Step, known):
        self._step = step
        self._known = known  # Values from outside of the region.
        self.made = {}
        self.largest = {}

    def whole(self, value):
        return self._known[value]

    def part(self, value, axis, cut: Slice):
        start, stop = cut.of(self._step.program.shapes[value][axis])
        return self._known[value].take(range(start, stop), axis)

    def run(self, call, operands, cut):
        results = KINDS[self._step.kinds[call]](*operands)
        for value, result in zip(self._step.program.calls[call].outputs, results, strict=True):
            self.largest[value] = max(self.largest.get(value, 0), result.nbytes)
        return results

    def put(self, value, axis, cut, made):
        buffer = self.made.setdefault(value, np.full(self._step.program.shapes[value], np.nan))
        start, stop = cut.of(buffer.shape[axis])
        index = [slice(None)] * buffer.ndim
        index[axis] = slice(start, stop)
        buffer[tuple(index)] = made

    def add(self, value, cut, made):
        self.made[value] = made.copy() if cut.number == 0 else self.made[value] + made


def outside(step: Step, region: Region):
    """What the calls before a region make: those that do not read of it. None of the others may be needed."""
    inside = {value for index in region.ways for value in step.program.calls[index].outputs}
    after = set(inside)
    for call in step.program.calls:
        if after.intersection(call.inputs):
            after.update(call.outputs)
    return {value: array for value, array in enumerate(step.values) if value not in after}


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], deadline=None, max_examples=40)
@given(steps(), st.integers(2, 6))
def test_slices_make_what_the_whole_makes(step, slices):
    region = find_region(step.program)
    assume(region is not None and region.length >= slices)
    writer = NumpyWriter(step, outside(step, region))
    write_slices(step.program, region, slices, writer)
    read_outside = {
        value
        for index in region.ways
        for value in step.program.calls[index].outputs
        if value in step.program.returned
        or any(reader not in region.ways for reader in step.program.readers.get(value, ()))
    }
    assert set(writer.made) == read_outside
    for value, made in writer.made.items():
        np.testing.assert_allclose(made, step.values[value], rtol=1e-9, atol=1e-9)


def head(rows=8, width=4, words=32):
    """The head of a language model, with its way back: one region, from the logits to both gradients."""
    random = np.random.default_rng(0)
    inputs = [random.standard_normal(shape) for shape in ((rows, width), (words, width), (rows, words))]
    kinds = ["tanh", "transpose", "matmul", "softmax", "add", "transpose", "matmul", "matmul", "tanh"]
    operands = [(0,), (1,), (3, 4), (5,), (6, 2), (7,), (8, 3), (7, 1), (10,)]
    return Step(inputs, kinds, operands, {9, 11})


def test_the_head_of_a_language_model_is_one_region():
    step = head()
    region = find_region(step.program)
    assert region is not None
    assert set(region.ways) == {2, 3, 4, 5, 6, 7}
    assert region.summed == {9}, "the gradient of the weights"
    assert region.concatenated == {10: 0}, "the gradient of what the head reads"
    assert region.length == 8
    assert region.saved_bytes == 4 * 8 * 32 * 8
    writer = NumpyWriter(step, outside(step, region))
    write_slices(step.program, region, 4, writer)
    assert {writer.largest[value] for value in (5, 6, 7, 8)} == {2 * 32 * 8}, "a quarter of the rows at a time"


def test_an_unknown_operator_ends_a_region():
    step = head()
    step.kinds[3] = "cumsum"
    found = Step(step.inputs, step.kinds, [call.inputs for call in step.program.calls], {9, 11})
    region = find_region(found.program)
    assert region is None or 3 not in region.ways


def test_a_region_has_nothing_between_its_calls():
    """A cumulated sum of narrow values stands between two calls that could be cut: only one side of it is taken."""
    random = np.random.default_rng(0)
    inputs = [random.standard_normal((8, 32))]
    kinds = ["tanh", "tanh", "rowsum", "cumsum", "add", "tanh", "rowsum"]
    step = Step(inputs, kinds, [(0,), (1,), (2,), (3,), (0, 4), (5,), (6,)], ())
    region = find_region(step.program)
    assert region is not None
    assert set(region.ways) == {0, 1, 2}
    writer = NumpyWriter(step, outside(step, region))
    write_slices(step.program, region, 2, writer)
    for value, made in writer.made.items():
        np.testing.assert_allclose(made, step.values[value])


def test_more_slices_than_pieces_are_refused():
    step = head(rows=6)
    region = find_region(step.program)
    assert region is not None
    assert region.bounds(4) == (0, 1, 3, 4, 6)
    with pytest.raises(ValueError, match="6 units cannot be cut into 7 slices"):
        region.bounds(7)


@pytest.mark.parametrize("wrong", [Way((0,), (1,)), Way((1,), (1,)), Way((1,), (SUMMED,))], ids=str)
def test_a_wrong_way_is_seen_in_the_numbers(wrong):
    """The comparison above can fail: a softmax whose entry is wrong."""
    step = head(rows=8, words=8)
    calls = list(step.program.calls)
    calls[3] = Call(calls[3].inputs, calls[3].outputs, (wrong,))
    step.program = Program(tuple(calls), step.program.shapes, step.program.size_bytes, step.program.returned)
    region = Region(
        {3: wrong},
        {6: wrong.outputs[0]} if isinstance(wrong.outputs[0], int) else {},
        frozenset({6}) if wrong.outputs[0] == SUMMED else frozenset(),
        8,
        0,
    )
    writer = NumpyWriter(step, {5: step.values[5]})
    try:
        write_slices(step.program, region, 2, writer)
    except ValueError:
        return  # The parts do not even fit.
    made, whole = writer.made[6], step.values[6]
    assert made.shape != whole.shape or not np.allclose(made, whole)
