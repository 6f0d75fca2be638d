"""Graph and plan files: round trips, defaults, every kind of bad file, atomic writes."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from remat import Graph, InvalidFile, InvalidGraph, Op, Plan, Tensor, load_graph, load_plan
from remat.core.graph import graph_from_json
from remat.core.plan import load_plan_and_graph, plan_from_json
from remat.testing import chain, graphs, random_graph

PLAN = Plan(
    schedule=(0, 1, 0, 2),
    fingerprint="sha256:00",
    peak_bytes=10,
    baseline_peak_bytes=20,
    time_s=4.5,
    baseline_time_s=4.0,
    overhead=0.125,
    overhead_lower_bound=0.1,
    lower_bound_meaning="over all schedules",
    planner="auto",
    budget_bytes=12,
    plan_seconds=0.25,
)


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_graph_round_trip(graph: Graph) -> None:
    assert graph_from_json(graph.to_json()) == graph
    assert graph_from_json(json.loads(json.dumps(graph.to_json()))) == graph


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_graph_file_round_trip(tmp_path: Path, name: str) -> None:
    graph = random_graph(5, 30)
    graph.save(tmp_path / name)
    again = load_graph(str(tmp_path / name))
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_plan_file_round_trip(tmp_path: Path, name: str) -> None:
    PLAN.save(tmp_path / name)
    assert load_plan(tmp_path / name) == PLAN
    assert plan_from_json(PLAN.to_json()) == PLAN


def test_shapes_and_dtypes_survive() -> None:
    graph = Graph((), (Tensor(8, "x", (2, 1), "float32"), Tensor(4, shape=())), inputs=(0, 1))
    assert graph_from_json(graph.to_json()).tensors == graph.tensors


def test_missing_keys_take_their_defaults() -> None:
    op = {"inputs": [], "outputs": [0], "time_s": 1}
    graph = graph_from_json(
        {
            "format": "remat.graph",
            "version": 1,
            "tensors": [{"size_bytes": 4}],
            "ops": [op],
            "inputs": [],
            "outputs": [],
        }
    )
    assert graph == Graph((Op(outputs=(0,), time_s=1.0),), (Tensor(4),), free_order=True)
    assert graph.ops[0].recomputable


def test_what_a_trace_assumed_stays_with_the_graph(tmp_path: Path) -> None:
    assumed = chain(3)
    graph = dataclasses.replace(assumed, notes=("the kernels are those of a GPU",))
    graph.save(tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == graph
    assert graph.fingerprint == assumed.fingerprint
    with pytest.raises(InvalidFile, match="'notes' of the file is 3, not a list of texts"):
        graph_from_json({**graph.to_json(), "notes": 3})


def test_the_end_of_the_forward_part_stays_with_the_graph(tmp_path: Path) -> None:
    unknown = chain(3)
    graph = dataclasses.replace(unknown, turning_point=1)
    graph.save(tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json").turning_point == 1
    assert "turning_point" not in unknown.to_json()
    assert graph.fingerprint == unknown.fingerprint


def test_null_means_absent() -> None:
    tensor = {"size_bytes": 4, "shape": None, "dtype": None, "alias_of": None}
    assert graph_from_json({**GRAPH, "tensors": [tensor, tensor]}).tensors == (Tensor(4), Tensor(4))


def test_unknown_keys_are_ignored() -> None:
    assert graph_from_json({**GRAPH, "source": "a paper"}) == graph_from_json(GRAPH)


def test_defaults_are_left_out() -> None:
    data = chain(1).to_json()
    assert data["ops"][0].keys() == {"name", "kind", "inputs", "outputs", "time_s"}
    assert data["tensors"][0].keys() == {"size_bytes", "name"}


def test_equal_graphs_give_equal_files(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        chain(3).save(tmp_path / name)
    first = (tmp_path / "a.json.gz").read_bytes()
    assert first == (tmp_path / "b.json.gz").read_bytes()
    assert first[4:8] == b"\0\0\0\0"  # Where gzip keeps the date.


GRAPH: dict[str, Any] = {
    "format": "remat.graph",
    "version": 1,
    "tensors": [{"size_bytes": 4}, {"size_bytes": 4}],
    "ops": [{"name": "a", "kind": "A", "inputs": [0], "outputs": [1], "time_s": 0.5}],
    "inputs": [0],
    "outputs": [1],
}


def with_op(**changes: Any) -> dict[str, Any]:
    return {**GRAPH, "ops": [{**GRAPH["ops"][0], **changes}]}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GRAPH.items() if name != key}


BAD_GRAPH_FILES: dict[str, tuple[Any, str]] = {
    "a list": ([1], r"the file is \[1\], not a JSON object"),
    "no format": (without("format"), r'no remat\.graph file: its "format" is null'),
    "a plan": ({**GRAPH, "format": "remat.plan"}, r'no remat\.graph file: its "format" is "remat\.plan"'),
    "future version": ({**GRAPH, "version": 2}, r"version 2 was written by a newer remat; upgrade"),
    "version 0": ({**GRAPH, "version": 0}, "versions start at 1"),
    "version is text": ({**GRAPH, "version": "1"}, "'version' of the file is \"1\", not an integer"),
    "version is a bool": ({**GRAPH, "version": True}, "'version' of the file is true, not an integer"),
    "no version": (without("version"), "the file has no 'version'"),
    "no tensors": (without("tensors"), "the file has no 'tensors'"),
    "no ops": (without("ops"), "the file has no 'ops'"),
    "no inputs": (without("inputs"), "the file has no 'inputs'"),
    "no outputs": (without("outputs"), "the file has no 'outputs'"),
    "tensors is an object": ({**GRAPH, "tensors": {}}, "'tensors' of the file is {}, not a list"),
    "tensor is a number": ({**GRAPH, "tensors": [4]}, "tensor 0 is 4, not a JSON object"),
    "size is text": ({**GRAPH, "tensors": [{"size_bytes": "4"}]}, "'size_bytes' of tensor 0 is \"4\", not an integer"),
    "size is a fraction": ({**GRAPH, "tensors": [{"size_bytes": 4.0}]}, r"is 4\.0, not an integer"),
    "size is a bool": ({**GRAPH, "tensors": [{"size_bytes": True}]}, "is true, not an integer"),
    "size is null": ({**GRAPH, "tensors": [{"size_bytes": None}]}, "is null, not an integer"),
    "no size": ({**GRAPH, "tensors": [{}]}, "tensor 0 has no 'size_bytes'"),
    "shape of text": ({**GRAPH, "tensors": [{"size_bytes": 4, "shape": ["a"]}]}, "'shape' of tensor 0"),
    "name is a number": ({**GRAPH, "tensors": [{"size_bytes": 4, "name": 1}]}, "'name' of tensor 0 is 1, not a text"),
    "id is text": (with_op(inputs=["0"]), "'inputs' of op 0 is .* not a list of integers"),
    "id is a bool": (with_op(outputs=[True]), "'outputs' of op 0 is .* not a list of integers"),
    "ids are no list": (with_op(inputs=0), "'inputs' of op 0 is 0, not a list of integers"),
    "no time": ({**GRAPH, "ops": [{"inputs": [], "outputs": []}]}, "op 0 has no 'time_s'"),
    "time is text": (with_op(time_s="1"), "'time_s' of op 0 is \"1\", not a number"),
    "time is a bool": (with_op(time_s=True), "'time_s' of op 0 is true, not a number"),
    "time is beyond floats": (with_op(time_s=10**400), "'time_s' of op 0 is 1000.*, not a number of this size"),
    "flag is a number": (with_op(recomputable=1), "'recomputable' of op 0 is 1, not true or false"),
    "free_order is text": ({**GRAPH, "free_order": "yes"}, "'free_order' of the file is \"yes\""),
    "in_place is flat": (with_op(in_place=[0, 1]), "'in_place' of op 0 is .* not a list of pairs"),
    "in_place of three": (with_op(in_place=[[0, 1, 2]]), "not a list of pairs of integers"),
}


@pytest.mark.parametrize("case", BAD_GRAPH_FILES)
def test_bad_graph_file(tmp_path: Path, case: str) -> None:
    data, message = BAD_GRAPH_FILES[case]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidFile, match=message) as caught:
        load_graph(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_are_no_json(tmp_path: Path, constant: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(GRAPH).replace("0.5", constant))
    with pytest.raises(InvalidFile, match=f"{constant} is no JSON number"):
        load_graph(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**GRAPH, "tensors": [{"size_bytes": -4}, {"size_bytes": 4}]}, "negative size"),
        ({**GRAPH, "outputs": [7]}, "id 7 is out of range"),
        (with_op(inputs=[1]), "makes later or itself: the graph has a cycle"),
        (with_op(time_s=-1), "time_s"),
    ],
)
def test_broken_graph_in_a_file_names_both(tmp_path: Path, data: Any, message: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidGraph, match=message) as caught:
        load_graph(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_truncated_at_any_place(tmp_path: Path) -> None:
    whole = json.dumps(GRAPH).encode()
    path = tmp_path / "graph.json"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidFile, match="truncated"):
            load_graph(path)
    path.write_bytes(whole)
    assert load_graph(path) == graph_from_json(GRAPH)


def test_truncated_gzip_at_any_place(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(GRAPH).encode())
    path = tmp_path / "graph.json.gz"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidFile, match=r"truncated|damaged"):
            load_graph(path)
    path.write_bytes(whole)
    assert load_graph(path) == graph_from_json(GRAPH)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("graph.json", b""),
        ("graph.json", b"\xff\xfe\x00"),
        ("graph.json", b"not json"),
        ("graph.json", b"[" * 100_000),
        ("graph.json", b'{"version": ' + b"9" * 5000 + b"}"),
        ("graph.json.gz", b"not gzip"),
        ("graph.json.gz", gzip.compress(b"{}", mtime=0)[:-6] + b"\0\0\0\0\0\0"),
    ],
)
def test_no_json_at_all(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InvalidFile) as caught:
        load_graph(path)
    assert str(path) in str(caught.value)


def test_gzip_is_known_by_its_content_too(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(gzip.compress(json.dumps(GRAPH).encode()))
    assert load_graph(path) == graph_from_json(GRAPH)


def test_a_file_saved_before_the_newest_fields_were_added_still_loads() -> None:
    """Committed as an older remat wrote it: a plan without ``traced_peak_bytes`` and ``traced_budget_bytes``."""
    path = Path(__file__).parent / "saved" / "plan_with_graph.json"
    assert not {"traced_peak_bytes", "traced_budget_bytes"} & json.loads(path.read_text()).keys()
    plan, graph = load_plan_and_graph(path)
    assert plan == load_plan(path)
    assert (plan.schedule, plan.peak_bytes, plan.budget_bytes) == ((0, 1, 2, 3, 0, 4, 5), 4, 4)
    assert plan.traced_peak_bytes is plan.traced_budget_bytes is None
    assert graph == chain(3, time_s=0.5)


def test_missing_file() -> None:
    with pytest.raises(FileNotFoundError):
        load_graph("no such folder/graph.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "remat.graph"}, r'no remat\.plan file: its "format" is "remat\.graph"'),
        ({"version": 7}, "version 7 was written by a newer remat; upgrade"),
        ({"schedule": [0, "1"]}, "'schedule' of the file is .* not a list of integers"),
        ({"schedule": [0, True]}, "not a list of integers"),
        ({"peak_bytes": 1.5}, r"'peak_bytes' of the file is 1\.5, not an integer"),
        ({"overhead": "none"}, "'overhead' of the file is \"none\", not a number"),
        ({"planner": None}, "'planner' of the file is null, not a text"),
        *(
            ({field.name: ...}, f"the file has no '{field.name}'")
            for field in dataclasses.fields(Plan)
            if field.default is dataclasses.MISSING
        ),
    ],
)
def test_bad_plan_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    data = {key: value for key, value in {**PLAN.to_json(), **change}.items() if value is not ...}
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidFile, match=message) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "graph.json"
    chain(1).save(path)
    before = path.read_bytes()

    def refuse(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        chain(2).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["graph.json"]


def test_numbers_that_json_lacks_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dataclasses.replace(PLAN, overhead=float("nan")).save(tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []


def test_link_is_followed_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    chain(2).save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load_graph(tmp_path / "real.json") == chain(2)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_pipe_is_written_to_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    chain(2).save(pipe)
    reader.join(timeout=10)
    assert pipe.is_fifo()
    assert graph_from_json(json.loads(received[0])) == chain(2)
