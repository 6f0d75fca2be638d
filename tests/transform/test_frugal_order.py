"""What frees memory runs earlier: the order is legal, nothing that may run once only moves, and no peak rises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import remat
from remat.core.graph import Graph, Op, Tensor
from remat.core.simulator import simulate
from remat.testing.strategies import graphs
from remat.transform.frugal_order import frugal_order

ACTIVATION, WEIGHT = 100, 10


@settings(max_examples=500)
@given(graphs(max_ops=14, free_order=False))
def test_the_order_is_legal_and_no_peak_rises(graph: Graph) -> None:
    order = frugal_order(graph)
    moved = graph.in_order(order)  # Raises where an op stands before what it reads or has to wait for.
    assert simulate(moved, moved.plain_schedule).peak_bytes <= simulate(graph, graph.plain_schedule).peak_bytes
    assert moved.time_s == graph.time_s
    once = [op for op in order if not graph.ops[op].recomputable]
    assert once == sorted(once)


def network(layers: int, *, once: bool = False) -> Graph:
    """Layers of one product each. Behind the loss, each one's gradient by its input stands before that by its weight.

    Args:
        layers: how many.
        once: may gradients of weights run once only?
    """
    tensors, ops = [], []

    def tensor(size: int) -> int:
        tensors.append(Tensor(size))
        return len(tensors) - 1

    def op(name: str, inputs: tuple[int, ...], size: int, *, recomputable: bool = True) -> int:
        made = tensor(size)
        ops.append(Op(name, name, inputs, (made,), 1.0, recomputable))
        return made

    weights = [tensor(WEIGHT) for _ in range(layers)]
    values = [tensor(1)]
    for weight in weights:
        values.append(op("forward", (values[-1], weight), ACTIVATION))
    gradient, results = op("loss", (values[-1],), ACTIVATION), []
    for weight, value in zip(reversed(weights), reversed(values[:-1]), strict=True):
        by_input = op("by input", (gradient, weight), ACTIVATION)
        results.append(op("by weight", (gradient, value), WEIGHT, recomputable=not once))
        gradient = by_input
    return Graph(tuple(ops), tuple(tensors), (*weights, values[0]), tuple(results), free_order=False)


def test_an_activation_is_gone_before_the_gradient_of_its_size_is_made() -> None:
    graph = network(4)
    names = [graph.ops[op].name for op in frugal_order(graph)]
    # The last one frees nothing: the batch stays.
    assert names[5:] == [*["by weight", "by input"] * 3, "by input", "by weight"]
    assert names[:5] == [op.name for op in graph.ops[:5]]


def test_what_may_run_once_only_stays_in_its_place() -> None:
    graph = network(4, once=True)
    assert frugal_order(graph) == graph.plain_schedule


@pytest.mark.parametrize("before", ["by input", "none"])
def test_what_has_to_wait_does_so(before: str) -> None:
    graph = network(2)
    ops = list(graph.ops)
    first = next(n for n, op in enumerate(ops) if op.name == "by weight")
    if before == "by input":
        ops[first] = Op(ops[first].name, "", ops[first].inputs, ops[first].outputs, 1.0, after=(first - 1,))
    order = frugal_order(Graph(tuple(ops), graph.tensors, graph.inputs, graph.outputs, free_order=False))
    assert (order.index(first) < order.index(first - 1)) is (before == "none")


def test_a_small_tensor_moves_nothing() -> None:
    graph = network(3)
    tensors = (*graph.tensors, Tensor(100 * ACTIVATION))
    large = Op("large", "", (graph.ops[0].outputs[0],), (len(tensors) - 1,), 1.0)
    assert frugal_order(Graph((*graph.ops, large), tensors, graph.inputs, graph.outputs)) == (
        *range(len(graph.ops) + 1),
    )


@pytest.mark.parametrize("layers_held", [6, 7])
def test_a_plan_in_the_same_bytes_is_cheaper(layers_held: int) -> None:
    graph = network(30)
    moved = graph.in_order(frugal_order(graph))
    budget_bytes = layers_held * ACTIVATION + 30 * WEIGHT
    # A layer less runs again, of some.
    ours, other = (remat.plan(one, budget_bytes, thorough=False) for one in (moved, graph))
    assert ours.overhead <= 0.9 * other.overhead


def test_an_order_names_each_op_once() -> None:
    with pytest.raises(remat.InvalidGraph, match="names each of them once"):
        network(2).in_order((0, 0, 1, 2, 3, 4, 5))
