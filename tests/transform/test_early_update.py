"""Updates move up to where their gradient is final, and no further; a number made of all gradients holds them back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph, Op, Tensor
from remat.core.simulator import simulate
from remat.core.validator import validate
from remat.transform.early_update import early_updates

WIDTH = 100


def step(layers, *, clipped, decay=False):
    """A chain of layers, its backward pass, and an update of each layer's weight and of one slot beside it.

    All weights come first among the inputs, then their slots, then a count of steps.
    """
    tensors, ops = [], []

    def tensor(elements, name):
        tensors.append(Tensor(4 * elements, name, (elements,)))
        return len(tensors) - 1

    def op(kind, inputs, elements):
        made = tensor(elements, kind)
        ops.append(Op(kind, kind, tuple(inputs), (made,), 1.0))
        return made

    sizes = [WIDTH + n for n in range(layers)]
    weights = [tensor(size, "weight") for size in sizes]
    slots = [tensor(size, "slot") for size in sizes]
    count = tensor(1, "count")
    inputs = (*weights, *slots, count)
    values = [op("forward", [weights[0]], 7)]
    for weight in weights[1:]:
        values.append(op("forward", [values[-1], weight], 7))
    gradient, gradients = op("loss", [values[-1]], 7), {}
    for n in reversed(range(layers)):
        gradients[n] = op("gradient", [gradient, values[n]], sizes[n])
        gradient = op("backward", [gradient, weights[n]], 7)
    if clipped:
        norm = op("norm", gradients.values(), 1)
        gradients = {n: op("clip", [one, norm], sizes[n]) for n, one in gradients.items()}
    rate = op("rate", [count], 1)
    results = []
    for n in range(layers):
        slot = op("slot", [slots[n], gradients[n]], sizes[n])
        decayed = op("decay", [weights[n]], sizes[n]) if decay else weights[n]
        results += [slot, op("weight", [decayed, slot, rate], sizes[n])]
    # The new values take over the buffers of the old ones.
    for result in results:
        old = tensors[result]
        tensors[result] = Tensor(0, old.name, old.shape)
    return Graph(tuple(ops), tuple(tensors), inputs, (*results, op_loss(ops)), free_order=True)


def op_loss(ops):
    return next(one.outputs[0] for one in ops if one.kind == "loss")


@pytest.mark.parametrize("decay", [False, True])
def test_a_gradient_dies_early(decay):
    graph = step(6, clipped=False, decay=decay)
    found = early_updates(graph)
    validate(graph, found.order)
    before, after = (simulate(graph, order).peak_bytes for order in (graph.plain_schedule, found.order))
    assert found.bound_by is None
    assert after <= before - 4 * 4 * WIDTH  # Of six gradients, no more than two live at once.
    place = {op: position for position, op in enumerate(found.order)}
    for number in found.moved:
        assert place[number] < number


def test_an_update_waits_for_whoever_reads_the_old_parameter():
    graph = step(3, clipped=False)
    order = early_updates(graph).order
    kinds = [graph.ops[op].kind for op in order]
    first_update = kinds.index("weight")
    assert kinds[first_update - 2] == "backward" or "backward" in kinds[:first_update]
    for position, op in enumerate(order):
        if graph.ops[op].kind == "weight":
            old = graph.ops[op].inputs[0]
            readers = [n for n, one in enumerate(graph.ops) if old in one.inputs and n != op]
            assert all(order.index(reader) < position for reader in readers)


def test_clipping_by_the_norm_of_all_gradients_holds_every_update_back():
    graph = step(6, clipped=True)
    found = early_updates(graph)
    validate(graph, found.order)
    assert graph.ops[found.bound_by].kind == "norm"
    assert found.waiting_bytes == sum(4 * (WIDTH + n) for n in range(6))
    norm = found.order.index(found.bound_by)
    assert all(found.order.index(op) > norm for op in found.moved)


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(st.integers(1, 6), st.booleans(), st.booleans())
def test_the_order_is_legal(layers, clipped, decay):
    graph = step(layers, clipped=clipped, decay=decay)
    found = early_updates(graph)
    assert sorted(found.order) == list(range(len(graph.ops)))
    validate(graph, found.order)


def test_a_step_without_an_update_stays_as_it_is():
    graph = step(4, clipped=False)
    backward_only = Graph(graph.ops[:13], graph.tensors, graph.inputs, (graph.ops[12].outputs[0],), free_order=True)
    found = early_updates(backward_only)
    assert found.order == backward_only.plain_schedule
    assert not found.moved
