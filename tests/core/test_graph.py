"""Structural rules of a graph, its derived facts and its fingerprint."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from remat import Graph, InvalidGraph, Op, RematError, Tensor


def small(**changes: Any) -> Graph:
    """input 0 -> op0 -> 1 -> op1 -> 2 (a view of 1) -> op2 -> 3."""
    parts: dict[str, Any] = {
        "tensors": (Tensor(8, "x"), Tensor(4, "h"), Tensor(4, "v", alias_of=1), Tensor(2, "y")),
        "ops": (
            Op("first", "MatMul", (0,), (1,), 1.0),
            Op("second", "Reshape", (1,), (2,), 0.5),
            Op("third", "Sum", (2, 2), (3,), 0.25),
        ),
        "inputs": (0,),
        "outputs": (3,),
    }
    return Graph(**{**parts, **changes})


def test_derived_facts() -> None:
    graph = small()
    assert graph.producer == (None, 0, 1, 2)
    assert graph.readers == ((0,), (1,), (2,), ())
    assert graph.roots == (0, 1, 1, 3)
    assert graph.pinned_bytes == 8
    assert graph.time_s == 1.75
    assert graph.plain_schedule == (0, 1, 2)
    assert graph.describe_op(0) == "op 0 (MatMul 'first')"


def test_pinned_views_of_one_storage_count_once() -> None:
    graph = Graph((), (Tensor(8), Tensor(8, alias_of=0), Tensor(3)), inputs=(0, 1, 2))
    assert graph.pinned_bytes == 11


def test_fingerprint_ignores_names_and_times_only() -> None:
    graph = small()
    renamed = small(ops=tuple(dataclasses.replace(op, name="other", time_s=9.0) for op in graph.ops))
    assert renamed.fingerprint == graph.fingerprint
    others = (
        small(outputs=(3, 1)),
        small(free_order=False),
        small(tensors=(Tensor(9, "x"), *graph.tensors[1:])),
        small(ops=(dataclasses.replace(graph.ops[0], recomputable=False), *graph.ops[1:])),
        small(ops=(dataclasses.replace(graph.ops[0], workspace_bytes=1), *graph.ops[1:])),
        small(ops=(*graph.ops[:2], dataclasses.replace(graph.ops[2], after=(0,)))),
        small(ops=(*graph.ops[:2], dataclasses.replace(graph.ops[2], in_place=((2, 3),)))),
    )
    assert len({graph.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


READ_ONLY = (Tensor(1), Tensor(1))
BAD_GRAPHS: dict[str, tuple[dict[str, Any], str]] = {
    "cycle": (
        {"ops": (Op("a", "A", (1,), (0,)), Op("b", "B", (0,), (1,))), "tensors": READ_ONLY},
        r"op 0 \(A 'a'\) reads tensor 1, which op 1 .* cycle",
    ),
    "reads its own output": ({"ops": (Op("a", "A", (0,), (0,)),), "tensors": READ_ONLY}, "makes later or itself"),
    "input id out of range": ({"ops": (Op("a", "A", (7,)),), "tensors": READ_ONLY}, r"the inputs of op 0 .* id 7"),
    "output id out of range": ({"ops": (Op("a", "A", (), (2,)),), "tensors": READ_ONLY}, r"the outputs of op 0.* id 2"),
    "negative id": ({"ops": (Op("a", "A", (-1,)),), "tensors": READ_ONLY}, "id -1 is out of range"),
    "bool as id": ({"ops": (), "tensors": READ_ONLY, "inputs": (True,)}, "id True is out of range"),
    "graph output out of range": ({"ops": (), "tensors": READ_ONLY, "outputs": (5,)}, "the graph's outputs: id 5"),
    "alias out of range": ({"ops": (), "tensors": (Tensor(1, alias_of=3),)}, "alias_of of tensor 0: id 3"),
    "alias cycle": ({"ops": (), "tensors": (Tensor(1, alias_of=1), Tensor(1, alias_of=0))}, "view of itself"),
    "negative size": ({"ops": (), "tensors": (Tensor(-4, "h"),)}, r"tensor 0 \('h'\) is -4, a negative size"),
    "size is no int": ({"ops": (), "tensors": (Tensor(1.5),)}, r"is 1\.5, not a Python int"),  # type: ignore[arg-type]
    "negative workspace": ({"ops": (Op("a", workspace_bytes=-1),), "tensors": ()}, "workspace_bytes of op 0"),
    "sizes beyond counting": ({"ops": (), "tensors": (Tensor(2**52), Tensor(2**52), Tensor(1))}, "9007199254740993"),
    "negative time": ({"ops": (Op("a", time_s=-1.0),), "tensors": ()}, r"time_s -1\.0"),
    "time is NaN": ({"ops": (Op("a", time_s=float("nan")),), "tensors": ()}, "time_s nan"),
    "time is infinite": ({"ops": (Op("a", time_s=float("inf")),), "tensors": ()}, "time_s inf"),
    "made twice": ({"ops": (Op("a", outputs=(0,)), Op("b", outputs=(0,))), "tensors": READ_ONLY}, "op 0 makes already"),
    "makes an input": (
        {"ops": (Op("a", outputs=(0,)),), "tensors": READ_ONLY, "inputs": (0,)},
        "an input of the graph",
    ),
    "input is a view of what an op makes": (
        {"ops": (Op("a", outputs=(0,)),), "tensors": (Tensor(1), Tensor(1, alias_of=0)), "inputs": (1,)},
        "tensor 1 is an input of the graph, but a view of tensor 0, which op 0 makes",
    ),
    "read but never made": ({"ops": (Op("a", inputs=(0,)),), "tensors": READ_ONLY}, "which no op makes"),
    "output never made": ({"ops": (), "tensors": READ_ONLY, "outputs": (0,)}, "tensor 0 is an output"),
    "after out of range": ({"ops": (Op("a", after=(4,)),), "tensors": ()}, "names op 4, but there are 1 ops"),
    "after a later op": ({"ops": (Op("a", after=(1,)), Op("b")), "tensors": ()}, "must come after op 1"),
    "view without its base": (
        {"ops": (Op("a", outputs=(0,)), Op("b", outputs=(1,))), "tensors": (Tensor(1), Tensor(1, alias_of=0))},
        "a view of tensor 0, without reading it",
    ),
    "turning point out of range": ({"ops": (Op("a"),), "tensors": (), "turning_point": 1}, "turning_point names op 1"),
    "in_place of strangers": ({"ops": (Op("a", outputs=(0,), in_place=((1, 0),)),), "tensors": READ_ONLY}, "in_place"),
}


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_broken_rule_is_named(case: str) -> None:
    parts, message = BAD_GRAPHS[case]
    with pytest.raises(InvalidGraph, match=message) as caught:
        Graph(**parts)
    assert isinstance(caught.value, RematError)
    assert isinstance(caught.value, ValueError)


def test_empty_graph_is_valid() -> None:
    graph = Graph((), ())
    assert graph.plain_schedule == ()
    assert graph.pinned_bytes == 0
    assert graph.time_s == 0.0


def test_fingerprint_does_not_tell_which_of_two_inputs_is_taken_over_first() -> None:
    def step(in_place: tuple[tuple[int, int], ...]) -> Graph:
        ops = (Op(outputs=(0,)), Op(outputs=(1,)), Op(inputs=(1, 0), outputs=(2,), in_place=in_place))
        return Graph(ops, (Tensor(4),) * 3, outputs=(2,), free_order=False)

    assert step(((0, 2), (1, 2))).fingerprint == step(((1, 2), (0, 2))).fingerprint
    assert step(((0, 2),)).fingerprint != step(((1, 2),)).fingerprint
