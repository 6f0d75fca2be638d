"""Traces of earlier calls, looked up by the graph itself: equal graphs compute equal results, forward and backward."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from typing import Any

import tensorflow as tf

from remat.tensorflow.recompute.in_graph import REGION_KEY, regions_of

_MOST = 512


class TracedCalls:
    """Concrete functions by their graph and the variables that they use.

    Nothing here keeps a variable alive, and functions that captured other tensors than variables are not kept. A graph
    is kept when it is seen for the second time: one that draws a new seed at each call is new at each call.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Any] = OrderedDict()

    def same_as(self, concrete: Any) -> Any:
        """An earlier concrete function that computes what ``concrete`` does, or ``concrete`` itself."""
        variables = _variables_captured(concrete)
        if variables is None:
            return concrete
        key = _key_of(concrete)
        if key not in self._known:
            self._known[key] = None
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
            return concrete
        self._known.move_to_end(key)
        if self._known[key] is None:
            self._known[key] = concrete
            for variable in variables:
                weakref.finalize(variable, self._known.pop, key, None).atexit = False
        return self._known[key]


def _variables_captured(concrete: Any) -> tuple[tf.Variable, ...] | None:
    """The variables whose handles are all that was captured; None where something else was."""
    variables: tuple[tf.Variable, ...] = concrete.graph.variables
    try:
        handles = {id(variable.handle) for variable in variables}
    except ValueError:  # A variable of tf.distribute outside of its replicas.
        return None
    return variables if all(id(t) in handles for t in concrete.captured_inputs) else None


def _key_of(concrete: Any) -> bytes:
    """A digest of all that decides what a function computes: operations, shapes, regions, captures, results."""
    graph = concrete.graph
    definition = graph.as_graph_def(add_shapes=True)
    for node in definition.node:
        if REGION_KEY in node.attr:  # Each region has a number of its own; what it consists of is below.
            del node.attr[REGION_KEY]
    regions = [(region.segmented, [op.name for op in region.operations]) for region in regions_of(graph)]
    captured = [id(t) for t in concrete.captured_inputs]
    results = [t.name for t in graph.outputs]
    about = repr((regions, captured, results))
    return hashlib.sha256(definition.SerializeToString(deterministic=True) + about.encode()).digest()
