"""Inner layers of random MLPs in slices, forward and backward, give what the steps give uncut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_separable import KINDS, NumpyWriter, Step

from remat.transform.inner import find_inner_layers
from remat.transform.separable import SUMMED, Way
from remat.transform.split import write_slices

ROWS, WIDTH, INNER = 32, 3, 16


class Builder:
    """A step, call by call; each method returns the ids of what it adds."""

    def __init__(self, inputs):
        self.inputs, self.kinds, self.operands = inputs, [], []
        self.count = len(inputs)

    def __call__(self, kind, *read):
        self.kinds.append(kind)
        self.operands.append(read)
        self.count += 2 if kind == "both" else 1
        return self.count - 1


def mlp(layers, activations, unknown=()):
    """The training step of an MLP with residual connections; ``unknown`` activations cannot be cut."""
    random = np.random.default_rng(0)
    inputs = [random.standard_normal((ROWS, WIDTH))]
    for _ in range(layers):
        inputs += [random.standard_normal((WIDTH, INNER)), random.standard_normal((INNER, WIDTH))]
    add = Builder(inputs)
    x, kept, returned = 0, [], []
    for layer in range(layers):
        up, down = 1 + 2 * layer, 2 + 2 * layer
        inner = [add("matmul", x, up)]
        for _ in range(activations):
            inner.append(add("cumsum" if layer in unknown else "tanh", inner[-1]))
        kept.append((x, inner))
        x = add("add", x, add("matmul", inner[-1], down))
    gradient = add("cumsum", x)  # A loss that couples the rows: else the last layer would be a region as it is.
    for layer in reversed(range(layers)):
        up, down = 1 + 2 * layer, 2 + 2 * layer
        read, inner = kept[layer]
        returned.append(add("matmul", add("transpose", inner[-1]), gradient))
        back = add("matmul", gradient, add("transpose", down))
        for one in reversed(inner):
            back = add("mul", back, one)
        returned.append(add("matmul", add("transpose", read), back))
        gradient = add("add", gradient, add("matmul", back, add("transpose", up)))
    return Step(inputs, add.kinds, add.operands, returned)


def run(step, layers, slices):
    """What the step returns, its regions in slices; and the largest number of bytes that a call made at a time."""
    program = layers.program
    copied = Step.__new__(Step)
    copied.program, copied.kinds = program, [step.kinds[origin] for origin in layers.origin]
    known = dict(enumerate(step.inputs))
    region_of = {index: region for region in layers.regions for index in region.ways}
    largest = 0

    def value(one):
        nonlocal largest
        if one in known:
            return known[one]
        index = program.producer[one]
        region = region_of.get(index)
        if region is None:
            call = program.calls[index]
            results = KINDS[copied.kinds[index]](*(value(read) for read in call.inputs))
            known.update(zip(call.outputs, results, strict=True))
        else:
            made = {value for number in region.ways for value in program.calls[number].outputs}
            for number in region.ways:
                for read in program.calls[number].inputs:
                    if read not in made:
                        value(read)
            writer = NumpyWriter(copied, known)
            write_slices(program, region, slices, writer)
            known.update(writer.made)
            largest = max(largest, *writer.largest.values())
        largest = max(largest, known[one].nbytes)
        return known[one]

    return {one: value(one) for one in program.returned}, largest


def check(step, layers, slices):
    """Compare what a step returns in slices with the whole; the largest number of bytes that a call made."""
    returned, largest = run(step, layers, slices)
    for value, made in returned.items():
        np.testing.assert_allclose(made, step.values[value], rtol=1e-9, atol=1e-9)
    return largest


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(2, 9))
def test_a_step_in_slices_makes_what_the_whole_makes(count, activations, slices):
    step = mlp(count, activations)
    layers = find_inner_layers(step.program)
    assert layers is not None
    assert len(layers.regions) == 2 * count, "a forward and a backward part of each layer"
    largest = check(step, layers, slices)
    # Weights and their gradients are as large as they are, and so is what goes from layer to layer.
    widest = max(ROWS * WIDTH, WIDTH * INNER, -(-ROWS // slices) * INNER)
    assert largest == 8 * widest, "nothing as wide as an inner layer is made in one piece"


def test_a_layer_that_cannot_be_cut_is_left_out():
    step = mlp(3, 2, unknown=[1])
    layers = find_inner_layers(step.program)
    assert layers is not None
    assert len(layers.regions) == 4
    check(step, layers, 3)


def test_a_step_without_an_inner_layer():
    assert find_inner_layers(mlp(2, 1, unknown=[0, 1]).program) is None


def test_a_wrong_way_is_caught(monkeypatch):
    """The same comparison fails where a product is said to be cut along the axis over which it sums."""
    step = mlp(2, 1)
    wrong = {(Way((1, 0), (SUMMED,))): Way((1, 0), (0,))}
    for index, call in enumerate(step.program.calls):
        if step.kinds[index] == "matmul":
            ways = tuple(wrong.get(way, way) for way in call.ways)
            object.__setattr__(call, "ways", ways)
    layers = find_inner_layers(step.program)
    assert layers is not None
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check(step, layers, 3)
