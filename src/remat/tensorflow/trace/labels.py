"""Which layer and which line of source made each operation, and what the resident tensors are."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import tensorflow as tf

import remat
from remat.core.graph import Graph
from remat.core.labels import OpLabel, labelled, shown_path
from remat.tensorflow.trace.func_graph import TracedStep

_shown_path = functools.cache(shown_path)

# Scopes that TensorFlow opens around backward operations.
_BACKWARD_SCOPES: Final = ("gradient_tape", "gradients")
# Beyond this frame lies whoever had the function traced, not what is in it.
_TRACES_A_FUNCTION: Final = "func_graph_from_py_func"


def label_step(
    step: TracedStep,
    *,
    layers: Collection[str] = (),
    roles: Mapping[int, str] | None = None,
) -> Graph:
    """The graph of a traced step with layers, source lines, phases and the roles of its inputs.

    Args:
        step: the traced step.
        layers: names of Keras layers, which are looked for in the operations' scopes; without any the whole scope
            stands for the layer.
        roles: roles of resources by ``id`` of their handle; variables are told by this, arguments are the batch.
    """
    known = frozenset(layers)
    labels = [_label(operation, known) for operation in step.operations]
    first_source = {label.layer: label.source for label in reversed(labels) if label.layer and not label.is_backward}
    labels = [
        replace(label, source=first_source.get(label.layer, label.source)) if label.is_backward else label
        for label in labels
    ]
    return labelled(step.graph, labels, _roles(step, roles or {}))


def variable_roles(variables: Iterable[tf.Variable], role: str) -> dict[int, str]:
    """``roles`` for ``label_step`` from variables of one kind."""
    return {id(variable.handle): role for variable in variables}


def _roles(step: TracedStep, of_handles: Mapping[int, str]) -> dict[int, str]:
    if not step.tensors:
        return {}
    func_graph = step.tensors[0].graph
    captured = {inside.name: outside for outside, inside in func_graph.captures}
    trainable = {id(v.handle) for v in getattr(func_graph, "variables", ()) if v.trainable}
    arguments = {tensor.name for tensor in func_graph.inputs} - captured.keys()
    found = {}
    for number in step.graph.inputs:
        name = step.tensors[number].name
        if name in arguments:
            found[number] = "batch"
        elif name in captured:
            handle = id(captured[name])
            found[number] = of_handles.get(handle, "parameter" if handle in trainable else "state")
    return found


def _label(operation: tf.Operation, layers: Collection[str]) -> OpLabel:
    scopes = operation.name.split("/")[:-1]
    is_backward = bool(scopes) and scopes[0] in _BACKWARD_SCOPES
    if is_backward:
        scopes = scopes[1:]
    layer = _layer(scopes, layers)
    # Reading a traceback takes a tenth of a millisecond, and these have nothing to tell.
    has_source = layer or not layers
    return OpLabel(is_backward, layer, _source(operation) if has_source and not (is_backward and layers) else "")


def _layer(scopes: Sequence[str], layers: Collection[str]) -> str:
    if not layers:
        return "/".join(scopes)
    return "/".join(name for scope in scopes if (name := _known(scope, layers)))


def _known(scope: str, layers: Collection[str]) -> str:
    """A scope's layer; TensorFlow numbers the scopes of a layer that is called again."""
    if scope in layers:
        return scope
    name, _, number = scope.rpartition("_")
    return name if number.isdigit() and name in layers else ""


def _source(operation: tf.Operation) -> str:
    """The innermost line of the user's own code, else the line in the Keras layer."""
    in_layer = ""
    for frame in reversed(list(operation.traceback)):
        owner = _owner(frame.filename)
        if owner == "framework" and frame.name == _TRACES_A_FUNCTION:
            break
        if owner == "user" or (owner == "layer" and frame.name == "call" and not in_layer):
            line = f"{_shown_path(frame.filename)}:{frame.lineno} in {frame.name}"
            if owner == "user":
                return line
            in_layer = line
    return in_layer


@functools.cache
def _owner(filename: str) -> str:
    """Whose a source file is: "layer" for Keras' layers, "framework", or "user"."""
    path = os.path.realpath(filename)
    if path.startswith(_KERAS_LAYERS):
        return "layer"
    return "framework" if path.startswith(_FRAMEWORKS) or not path.endswith(".py") else "user"


def _folder(module_file: str | None) -> str:
    assert module_file is not None
    return os.path.realpath(Path(module_file).parent) + os.sep


def _folder_of(package: str) -> str:
    """Where a package lies, found without importing it."""
    spec = importlib.util.find_spec(package)
    return "" if spec is None or spec.origin is None else _folder(spec.origin)


_KERAS: Final = _folder_of("keras")
# Whose frames say nothing to a user: the frameworks', remat's own and the standard library's.
_FRAMEWORKS: Final = tuple(f for f in (_KERAS, *map(_folder, (tf.__file__, remat.__file__, functools.__file__))) if f)
_KERAS_LAYERS: Final = os.path.join(_KERAS or "no keras", "src", "layers") + os.sep
