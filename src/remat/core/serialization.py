"""Graphs and plans as versioned JSON, plain or gzipped, so that planning needs no framework.

Formats ``remat.graph`` 1 and ``remat.plan`` 1. Files are written atomically: a reader sees the old file or the new
one, never a part. Keys that hold their default are left out of a graph; keys that nobody knows are ignored.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from remat.core.errors import InvalidGraph
from remat.core.graph import Graph, Op, Tensor
from remat.core.json_files import JsonReader, read_json, write_json
from remat.core.plan import Plan

GRAPH_FORMAT: Final = "remat.graph"
PLAN_FORMAT: Final = "remat.plan"
VERSION: Final = 1


def load_graph(path: str | Path) -> Graph:
    """Read a graph from ``.json`` or ``.json.gz``.

    Raises:
        InvalidFile: if the file is no ``remat.graph``, is truncated, or was written by a newer version.
        InvalidGraph: if the graph in it breaks a structural rule.
        FileNotFoundError: if there is no such file.
    """
    return _graph_from(JsonReader(str(path), read_json(path)))


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write a graph atomically; a path ending in ``.gz`` is compressed."""
    write_json(path, graph_to_json(graph))


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as a JSON-ready dictionary in the ``remat.graph`` format."""
    return {
        "format": GRAPH_FORMAT,
        "version": VERSION,
        "tensors": [_without_defaults(tensor, required=("size_bytes",)) for tensor in graph.tensors],
        "ops": [_without_defaults(op, required=("name", "kind", "inputs", "outputs", "time_s")) for op in graph.ops],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "free_order": graph.free_order,
    }


def graph_from_json(data: object) -> Graph:
    """The graph in a decoded JSON value of the ``remat.graph`` format.

    Raises:
        InvalidFile: if the value is something else.
        InvalidGraph: if the graph breaks a structural rule.
    """
    return _graph_from(JsonReader("graph JSON", data))


def load_plan(path: str | Path) -> Plan:
    """Read a plan from ``.json`` or ``.json.gz``; ``plan.check_graph`` tells whether it fits a graph.

    Raises:
        InvalidFile: if the file is no ``remat.plan``, is truncated, or was written by a newer version.
        FileNotFoundError: if there is no such file.
    """
    return _plan_from(JsonReader(str(path), read_json(path)))


def load_plan_and_graph(path: str | Path) -> tuple[Plan, Graph | None]:
    """Read a plan and the graph that it was saved with, None where it was saved alone.

    Raises:
        InvalidFile: as ``load_plan``.
        InvalidGraph: if the graph in it breaks a structural rule.
        PlanMismatch: if the graph in it is another than the plan's.
        FileNotFoundError: if there is no such file.
    """
    reader = JsonReader(str(path), read_json(path))
    plan = _plan_from(reader)
    if not reader.has("graph"):
        return plan, None
    graph = _graph_from(reader.nested("graph"))
    plan.check_graph(graph)
    return plan, graph


def save_plan(plan: Plan, path: str | Path, graph: Graph | None = None) -> None:
    """Write a plan atomically, with its graph if one is given; a path ending in ``.gz`` is compressed."""
    values = plan_to_json(plan)
    if graph is not None:
        plan.check_graph(graph)
        values["graph"] = graph_to_json(graph)
    write_json(path, values)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON-ready dictionary in the ``remat.plan`` format."""
    # A front end's plan carries more than the format has.
    values = {field.name: value for field in fields(Plan) if (value := getattr(plan, field.name)) is not None}
    return {"format": PLAN_FORMAT, "version": VERSION, **values, "schedule": list(plan.schedule)}


def plan_from_json(data: object) -> Plan:
    """The plan in a decoded JSON value of the ``remat.plan`` format.

    Raises:
        InvalidFile: if the value is something else.
    """
    return _plan_from(JsonReader("plan JSON", data))


def _graph_from(reader: JsonReader) -> Graph:
    reader.check_format(GRAPH_FORMAT, VERSION)
    tensors = tuple(_tensor_from(item) for item in reader.objects("tensors", "tensor"))
    ops = tuple(_op_from(item) for item in reader.objects("ops", "op"))
    inputs, outputs = reader.integers("inputs"), reader.integers("outputs")
    free_order = reader.flag("free_order", True)
    try:
        return Graph(ops, tensors, inputs, outputs, free_order)
    except InvalidGraph as error:
        raise InvalidGraph(f"{reader.source}: {error}") from None


def _tensor_from(reader: JsonReader) -> Tensor:
    return Tensor(
        size_bytes=reader.integer("size_bytes"),
        name=reader.text("name", ""),
        shape=reader.integers("shape") if reader.has("shape") else None,
        dtype=reader.text("dtype") if reader.has("dtype") else None,
        alias_of=reader.integer("alias_of") if reader.has("alias_of") else None,
        role=reader.text("role", ""),
    )


def _op_from(reader: JsonReader) -> Op:
    return Op(
        name=reader.text("name", ""),
        kind=reader.text("kind", ""),
        inputs=reader.integers("inputs"),
        outputs=reader.integers("outputs"),
        time_s=reader.number("time_s"),
        recomputable=reader.flag("recomputable", True),
        workspace_bytes=reader.integer("workspace_bytes", 0),
        after=reader.integers("after", []),
        in_place=reader.pairs("in_place"),
        phase=reader.text("phase", ""),
        layer=reader.text("layer", ""),
        source=reader.text("source", ""),
    )


def _plan_from(reader: JsonReader) -> Plan:
    reader.check_format(PLAN_FORMAT, VERSION)
    return Plan(
        schedule=reader.integers("schedule"),
        fingerprint=reader.text("fingerprint"),
        peak_bytes=reader.integer("peak_bytes"),
        baseline_peak_bytes=reader.integer("baseline_peak_bytes"),
        time_s=reader.number("time_s"),
        baseline_time_s=reader.number("baseline_time_s"),
        overhead=reader.number("overhead"),
        overhead_lower_bound=reader.number("overhead_lower_bound"),
        lower_bound_meaning=reader.text("lower_bound_meaning"),
        planner=reader.text("planner"),
        budget_bytes=reader.integer("budget_bytes"),
        plan_seconds=reader.number("plan_seconds"),
        traced_peak_bytes=reader.integer("traced_peak_bytes") if reader.has("traced_peak_bytes") else None,
        traced_budget_bytes=reader.integer("traced_budget_bytes") if reader.has("traced_budget_bytes") else None,
    )


def _without_defaults(item: Tensor | Op, required: tuple[str, ...]) -> dict[str, Any]:
    values = ((field.name, getattr(item, field.name), field.default) for field in fields(item))
    return {name: _listed(value) for name, value, default in values if name in required or value != default}


def _listed(value: Any) -> Any:
    """JSON has lists only, so that what is written and what is read back are equal."""
    return [_listed(item) for item in value] if isinstance(value, tuple) else value
