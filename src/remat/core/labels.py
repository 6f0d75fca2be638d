"""Names for people on a traced graph: which phase an op belongs to, which layer, which line made it.

Labels change nothing that a planner sees, and the fingerprint leaves them out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from remat.core.graph import Graph


@dataclass(frozen=True)
class OpLabel:
    """What a front end knows of one op.

    Attributes:
        is_backward: did automatic differentiation write it into the backward pass?
        layer: path of its layer, "" where unknown.
        source: the line that made it, "" where unknown.
    """

    is_backward: bool
    layer: str = ""
    source: str = ""


def labelled(graph: Graph, labels: Sequence[OpLabel], roles: Mapping[int, str]) -> Graph:
    """The same graph with phases, layers, source lines and the roles of its inputs.

    The front end marks the ops that it knows to be of the backward pass. The edges tell the others: an op that depends
    on a gradient belongs to the backward pass where a marked op depends on it in turn, and to the update where none
    does. An op that only the update reads belongs to the update, too.

    Args:
        graph: as traced.
        labels: one for each op.
        roles: roles of inputs by tensor id; an input that is missing keeps the role it has.
    """
    phases = _phases(graph, [label.is_backward for label in labels])
    ops = tuple(
        replace(op, phase=phase, layer=label.layer, source=label.source)
        for op, phase, label in zip(graph.ops, phases, labels, strict=True)
    )
    tensors = tuple(
        replace(tensor, role=roles.get(number, tensor.role)) if number in roles else tensor
        for number, tensor in enumerate(graph.tensors)
    )
    found = replace(graph, ops=ops, tensors=tensors)
    assert found.fingerprint == graph.fingerprint
    return found


def _phases(graph: Graph, is_backward: Sequence[bool]) -> list[str]:
    uses_gradients = list(is_backward)
    for index, op in enumerate(graph.ops):
        if not uses_gradients[index]:
            # A variable that a gradient went into is read again after the write, with no tensor between the two.
            makers = (*op.after, *(graph.producer[tensor] for tensor in op.inputs))
            uses_gradients[index] = any(maker is not None and uses_gradients[maker] for maker in makers)
    leads_on = list(is_backward)
    phases = [""] * len(graph.ops)
    for index in reversed(range(len(graph.ops))):
        readers = [reader for tensor in graph.ops[index].outputs for reader in graph.readers[tensor]]
        leads_on[index] = leads_on[index] or any(leads_on[reader] for reader in readers)
        if uses_gradients[index]:
            phases[index] = "backward" if leads_on[index] else "update"
        else:
            # Such as a read of a slot, or the learning rate.
            only_for_update = bool(readers) and all(phases[reader] == "update" for reader in readers)
            phases[index] = "update" if only_for_update else "forward"
    return phases


def layer_of(graph: Graph, op: int) -> str:
    """The layer of an op for tables: what the front end said, else the path in its name, else its kind."""
    found = graph.ops[op]
    return found.layer or found.name.rpartition("/")[0] or found.kind or "(unnamed)"


def shown_path(filename: str) -> str:
    """A source file as short as it is still found by: from the current folder, or from where packages are installed."""
    path = Path(os.path.realpath(filename))
    if path.is_relative_to(here := Path.cwd()) and "site-packages" not in path.parts:
        return str(path.relative_to(here))
    if "site-packages" in path.parts:
        return str(Path(*path.parts[path.parts.index("site-packages") + 1 :]))
    return str(path)
