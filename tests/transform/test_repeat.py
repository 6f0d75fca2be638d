"""A step of many equal blocks out of steps with few of them."""

from __future__ import annotations

import dataclasses

import pytest

from remat.core.graph import Graph, Op, Tensor
from remat.core.simulator import simulate
from remat.transform.repeat import TRACES, NotRepeated, repeated


def layered(layers, *, odd=None):
    """Each layer reads the one before and a mask; its gradient reads both; one update handles all weights at once."""
    tensors, ops = [Tensor(8, "mask", role="batch"), Tensor(64, "x", role="batch")], []
    weights, made, gradients = [], [1], []

    def add(name, kind, inputs, size, phase, layer="", alias=None):
        tensors.append(Tensor(size, name, (size,), "float32", alias))
        ops.append(Op(name, kind, tuple(inputs), (len(tensors) - 1,), 1e-3, phase=phase, layer=layer))
        return len(tensors) - 1

    for layer in range(layers):
        size = 100 if odd == layer else 64
        tensors.append(Tensor(32, f"h.{layer}.weight", (32,), "float32", role="parameter"))
        weights.append(len(tensors) - 1)
        product = add(f"h.{layer}/mm", "mm", [made[-1], weights[-1], 0], size, "forward", f"h.{layer}")
        made.append(add(f"h.{layer}/act", "gelu", [product], size, "forward", f"h.{layer}", product))
    gradient = add("loss/backward", "backward", [made[-1]], 64, "backward")
    for layer in reversed(range(layers)):
        gradient = add(f"h.{layer}/grad", "mm", [gradient, weights[layer], made[layer]], 64, "backward", f"h.{layer}")
        gradients.append(add(f"h.{layer}/dw", "mm", [gradient, made[layer], 0], 32, "backward", f"h.{layer}"))
    ops.append(
        Op("update", "_foreach_add_", (*weights, *reversed(gradients)), (), 1e-4 * layers, False, phase="update")
    )
    return Graph(tuple(ops), tuple(tensors), (0, 1, *weights), (gradient,), False, ("a note",))


def grown(count, shortest=2):
    return repeated([layered(shortest + more) for more in range(TRACES)], count - shortest)


@pytest.mark.parametrize("layers", [5, 6, 9, 40])
def test_the_grown_step_is_the_traced_one(layers):
    found, traced = grown(layers), layered(layers)
    assert found.fingerprint == traced.fingerprint
    assert found.time_s == pytest.approx(traced.time_s)
    assert [op.name for op in found.ops] == [op.name for op in traced.ops]
    assert [dataclasses.replace(t) for t in found.tensors] == list(traced.tensors)
    assert found.notes == traced.notes
    assert simulate(found, found.plain_schedule).bytes == simulate(traced, traced.plain_schedule).bytes


def test_a_step_that_grows_unevenly_is_refused():
    traces = [layered(2 + more) for more in range(TRACES)]
    traces[3] = layered(5, odd=2)
    with pytest.raises(NotRepeated, match=r"tensor|op"):
        repeated(traces, 10)


def test_a_number_that_follows_no_function_is_named():
    traces = [layered(2 + more) for more in range(TRACES)]
    last = traces[2].ops[-1]
    traces[2] = dataclasses.replace(traces[2], ops=(*traces[2].ops[:-1], dataclasses.replace(last, time_s=1.0)))
    with pytest.raises(NotRepeated, match=r"the time of op .*update"):
        repeated(traces, 10)


def test_a_step_that_shrinks_is_refused():
    with pytest.raises(NotRepeated, match="fewer"):
        repeated([layered(5 - less) for less in range(TRACES)], 10)
