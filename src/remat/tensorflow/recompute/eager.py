"""``recompute`` in eager mode: each call becomes a small graph, with one region in it.

A call runs its Python as in plain eager mode, so what the function closes over may change from call to call and its
side effects happen once per call. The graph that comes of it is then compared with those of earlier calls: where it is
the same, so are its forward and backward functions, and those that TensorFlow has built and optimized are used again.

One difference to plain eager mode is made good here. TensorFlow gives the backward pass of a function zeros for outputs
that nobody used, and so zeros come out for inputs that have no gradient, where plain eager mode says None. An optimizer
tells the two apart: momentum moves on zeros.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from remat.tensorflow import _private
from remat.tensorflow.recompute import call_values
from remat.tensorflow.recompute.call_values import collected_losses
from remat.tensorflow.recompute.region import is_differentiable
from remat.tensorflow.recompute.region_gradient import REGION_KEY, regions_of, run_in_graph


class EagerCalls:
    """The eager calls of one function.

    Args:
        function: the user's.
        segmented: recompute it in pieces.
    """

    def __init__(self, function: Callable[..., Any], segmented: bool) -> None:
        self._function = function
        self._segmented = segmented
        self._known = _TracedCalls()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``function(*args, **kwargs)``, recorded on the active tapes as one region."""
        leaves, rebuild = call_values.flatten((args, kwargs))
        masks = {number: mask for number, t in enumerate(leaves) if (mask := call_values.mask_of(t)) is not None}
        rebuilt: list[Callable[..., Any]] = []
        out_masks: list[int] = []

        with collected_losses() as losses:

            def traced(*symbols: tf.Tensor) -> list[tf.Tensor]:
                _private.seed_as_in_eager_mode(tf.compat.v1.get_default_graph())
                inputs = list(symbols[: len(leaves)])
                for number, mask in zip(masks, symbols[len(leaves) :], strict=True):
                    call_values.set_mask(inputs[number], mask)
                symbolic_args, symbolic_kwargs = rebuild(inputs)

                def call() -> tuple[Any, list[tf.Tensor]]:
                    converted = _private.converted_by_autograph(self._function, always=True)
                    return converted(*symbolic_args, **symbolic_kwargs), losses.tensors()

                result, symbolic_losses = run_in_graph(call, self._segmented)
                outputs, rebuild_result = call_values.flatten(result)
                rebuilt.append(rebuild_result)
                found = [call_values.mask_of(t) for t in outputs]
                out_masks.extend(number for number, mask in enumerate(found) if mask is not None)
                return [*outputs, *(mask for mask in found if mask is not None), *symbolic_losses]

            flat = self._call(traced, [*leaves, *masks.values()])
            count = len(flat) - len(out_masks) - losses.count
            outputs = flat[:count]
            for number, mask in zip(out_masks, flat[count : count + len(out_masks)], strict=True):
                call_values.set_mask(outputs[number], mask)
            losses.replace(flat[count + len(out_masks) :])
        return rebuilt[0](outputs)

    def _call(self, traced: Callable[..., list[tf.Tensor]], arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        concrete = tf.function(traced, autograph=False).get_concrete_function(*arguments)
        concrete = self._known.same_as(concrete)
        return _Connections(concrete, [is_differentiable(t) for t in concrete.graph.outputs]).call(arguments)


_MOST_TRACES: Final = 512
"""Digests and functions that one recomputed function keeps. A judgement: models have far fewer layers and signatures.

Too few, TensorFlow builds and optimizes the same function again and again; too many, functions lie in memory unused.
"""


class _TracedCalls:
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
            while len(self._known) > _MOST_TRACES:
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


_STOPS = frozenset({"PreventGradient", "StopGradient", "ZerosLike", "OnesLike"})


class _Connections:
    """Gates around one call of a traced function; they pass values and gradients on, or None.

    Args:
        function: the concrete function, called with ``call``.
        differentiable: which of its outputs can carry a gradient.
    """

    def __init__(self, function: Any, differentiable: Sequence[bool]) -> None:
        self._function = function
        self._differentiable = differentiable
        self._several = sum(differentiable) > 1
        self._arrived: set[int] = set()
        self._arrivals_end = False
        self._reached: dict[int, frozenset[int]] = {}

    def call(self, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The outputs of the function for ``arguments``."""
        captured = list(self._function.captured_inputs)
        if not self._several:
            return _private.call_function(self._function, list(arguments), captured)
        graph = self._function.graph
        reached_by_name = {t.name: number for number, t in enumerate(graph.inputs)}
        for number, output in enumerate(graph.outputs):
            if number < len(self._differentiable) and self._differentiable[number]:
                self._reached[number] = _reached(output, reached_by_name)
        _private.watch_variables(self._function)
        inputs = [self._input_gate(t, number) for number, t in enumerate([*arguments, *captured])]
        outputs = _private.call_function(self._function, inputs[: len(arguments)], inputs[len(arguments) :])
        return [self._output_gate(t, number) if number in self._reached else t for number, t in enumerate(outputs)]

    def _input_gate(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        def backward(gradient: Any) -> list[Any]:
            self._arrivals_end = True
            known = any(number in self._reached[output] for output in self._arrived)
            return [gradient if known else None]

        if tensor.dtype != tf.resource and not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return tensor
        return _private.eager_gate(tensor, backward)

    def _output_gate(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        def backward(gradient: Any) -> list[Any]:
            if self._arrivals_end:  # A backward pass before this one is over.
                self._arrived, self._arrivals_end = set(), False
            self._arrived.add(number)
            return [gradient]

        return _private.eager_gate(tensor, backward)


def _reached(output: tf.Tensor, inputs: dict[str, int]) -> frozenset[int]:
    """Numbers of the inputs to which a gradient of ``output`` may flow."""
    found = set()
    seen = {output.name}
    stack = [output]
    while stack:
        tensor = stack.pop()
        if tensor.name in inputs:
            found.add(inputs[tensor.name])
        op = tensor.op
        if op.type in _STOPS:
            continue
        # Each output of an IdentityN is its own input.
        read = [op.inputs[tensor.value_index]] if op.type == "IdentityN" else op.inputs
        for source in read:
            carries = source.dtype.is_floating or source.dtype.is_complex or source.dtype in (tf.resource, tf.variant)
            if carries and source.name not in seen:
                seen.add(source.name)
                stack.append(source)
    return frozenset(found)
