"""Bytes by category add up to the simulator's, and phases follow from the edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remat
from remat import Graph, Op, Tensor
from remat.core.breakdown import CATEGORIES, breakdown, bytes_by_category
from remat.core.graph import PHASES, ROLES
from remat.core.labels import OpLabel, labelled, layer_of, shown_path
from remat.testing import random_graph, random_schedule

KIB = 1024


@pytest.fixture
def graph() -> Graph:
    """Weights, a slot and a batch; an activation with scratch memory, its gradient, and the update of the slot."""
    tensors = (
        Tensor(10 * KIB, "weights", role="parameter"),
        Tensor(20 * KIB, "slot", role="optimizer_state"),
        Tensor(3 * KIB, "batch", role="batch"),
        Tensor(8 * KIB, "activation"),
        Tensor(5 * KIB, "gradient"),
        Tensor(4 * KIB, "new slot"),
    )
    ops = (
        Op("layer/MatMul", "MatMul", (0, 2), (3,), workspace_bytes=KIB, phase="forward"),
        Op("grad", "MatMulGrad", (3, 2), (4,), phase="backward"),
        Op("update", "Assign", (4, 1), (5,), phase="update"),
    )
    return Graph(ops, tensors, (0, 1, 2), (5,))


def test_categories_of_a_small_step_counted_by_hand(graph: Graph) -> None:
    found = breakdown(graph)

    # At op 1: inputs 33, activation 8, gradient 5.
    assert found.step == 1
    assert found.total_bytes == 46 * KIB
    expected = {"parameters": 10, "optimizer_state": 20, "inputs": 3, "activations": 8, "gradients": 5}
    assert {name: size // KIB for name, size in found.size_bytes.items() if size} == expected
    assert bytes_by_category(graph, graph.plain_schedule)["workspace"] == [KIB, 0, 0]
    assert bytes_by_category(graph, graph.plain_schedule)["update"] == [0, 0, 4 * KIB]
    assert [(live.category, live.op) for live in found.largest] == [
        ("optimizer_state", None),
        ("parameters", None),
        ("activations", 0),
        ("gradients", 1),
        ("inputs", None),
    ]


def test_empty_schedule_holds_the_inputs() -> None:
    graph = Graph((), (Tensor(7, role="parameter"),), (0,))

    assert breakdown(graph).size_bytes["parameters"] == breakdown(graph).total_bytes == 7


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.sampled_from(["", *PHASES]), min_size=1))
def test_categories_add_up_to_the_bytes_of_every_step(seed: int, phases: list[str]) -> None:
    plain = random_graph(seed)
    ops = tuple(replace(op, phase=phases[index % len(phases)]) for index, op in enumerate(plain.ops))
    graph = Graph(ops, plain.tensors, plain.inputs, plain.outputs, plain.free_order)
    for schedule in (graph.plain_schedule, random_schedule(graph, seed)):
        by_category = bytes_by_category(graph, schedule)
        assert by_category.keys() == CATEGORIES.keys()
        assert all(value >= 0 for values in by_category.values() for value in values)
        totals = tuple(sum(step) for step in zip(*by_category.values(), strict=True))
        assert totals == remat.simulate(graph, schedule).bytes


def test_phases_follow_from_what_the_front_end_marked() -> None:
    tensors = tuple(Tensor(1) for _ in range(9))
    ops = (
        Op("forward", inputs=(0,), outputs=(1,)),
        Op("rate", inputs=(), outputs=(2,)),  # Read by the update only.
        Op("marked", inputs=(1,), outputs=(3,)),
        Op("sum of gradients", inputs=(3,), outputs=(4,)),  # Between two of the backward pass.
        Op("marked too", inputs=(4,), outputs=(5,)),
        Op("write", inputs=(5, 2), outputs=(6,)),
        Op("read after the write", inputs=(), outputs=(7,), after=(5,)),
        Op("metric", inputs=(1,), outputs=(8,)),
    )
    graph = Graph(ops, tensors, (0,), (6,))
    labels = [OpLabel(op.name.startswith("marked"), layer=op.name) for op in ops]

    found = labelled(graph, labels, {0: "parameter"})

    assert [op.phase for op in found.ops] == [
        "forward",
        "update",
        "backward",
        "backward",
        "backward",
        "update",
        "update",
        "forward",
    ]
    assert found.tensors[0].role == "parameter"
    assert found.fingerprint == graph.fingerprint


def test_labels_survive_a_file_and_older_files_are_read(graph: Graph, tmp_path) -> None:
    labelled_graph = labelled(graph, [OpLabel(False, "encoder", "model.py:3 in call")] * 3, {2: "batch"})
    labelled_graph.save(tmp_path / "graph.json")

    assert remat.load_graph(tmp_path / "graph.json") == labelled_graph
    text = (tmp_path / "graph.json").read_text()
    for key in ("phase", "layer", "source", "role"):
        assert f'"{key}"' in text
    plain = Graph((Op("a", outputs=(0,)),), (Tensor(1),))
    plain.save(tmp_path / "plain.json")
    assert not any(f'"{key}"' in (tmp_path / "plain.json").read_text() for key in ("phase", "layer", "source", "role"))
    assert set(ROLES) >= {tensor.role for tensor in labelled_graph.tensors if tensor.role}


def test_layer_falls_back_on_the_path_in_the_name(graph: Graph) -> None:
    assert layer_of(graph, 0) == "layer"
    assert layer_of(graph, 2) == "Assign"


def test_paths_are_shown_from_where_they_are_found(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert shown_path(str(tmp_path / "models" / "a.py")) == "models/a.py"
    assert shown_path("/x/lib/site-packages/keras/layers/a.py") == "keras/layers/a.py"
    assert shown_path("/elsewhere/a.py") == "/elsewhere/a.py"
