"""What a pair of loops may store, from most to least: the body of the forward loop in numbers, and the choices."""

from __future__ import annotations

from typing import Final

import tensorflow as tf

from remat.fit.loop_menu import BodyValues, Option, best_of
from remat.tensorflow.loops.bodies import Choice, values_of_lists
from remat.tensorflow.loops.pairs import Pair
from remat.tensorflow.trace import op_facts
from remat.tensorflow.trace.func_graph import TracedStep
from remat.tensorflow.trace.sizes import Loop

_SHARES: Final = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44, 0.36, 0.28, 0.2, 0.12, 0.0)
"""The shares of all that a loop stores that become options, each of which takes milliseconds. Bodies of recurrent
layers store six to ten values of one size: with fewer shares some of their options are missing."""


def menu_of(pair: Pair, loop: Loop, body: TracedStep) -> list[Option[Choice]]:
    """The options of a pair, most bytes first: each costs more seconds than those before it.

    Args:
        pair: the loops.
        loop: the forward one.
        body: the trace of its body.
    """
    seconds = {operation.name: op.time_s for operation, op in zip(body.operations, body.graph.ops, strict=True)}
    operations = _repeatable_behind([slot.item for slot in pair.slots])
    items = [slot.item for slot in pair.slots]
    read = [t for op in operations for t in (*op.inputs, *op.outputs) if t.op.type != "Const"]
    tensors = list({t.name: t for t in (*items, *read)}.values())
    column = {t.name: number for number, t in enumerate(tensors)}
    row = {op.name: number for number, op in enumerate(operations)}
    values = BodyValues(
        size_bytes=[loop.bytes_if_kept(t) for t in tensors],
        made_by=[row.get(t.op.name) for t in tensors],
        wanted=[column[name] for name in dict.fromkeys(t.name for t in items)],
        time_s=[seconds.get(op.name, 0.0) for op in operations],
        made_bytes=[sum(loop.sizes.bytes(t) or 0 for t in op.outputs) for op in operations],
        may_repeat=[True] * len(operations),
        reads=[[column[t.name] for t in op.inputs if t.op.type != "Const"] for op in operations],
        iterations=loop.iterations(),
    )
    options = [
        Option(
            Choice(
                frozenset(tensors[value].name for value in option.way[0]),
                frozenset(operations[op].name for op in option.way[1]),
            ),
            option.held_bytes,
            option.again_s,
        )
        for option in values.options(_SHARES)
    ]
    return best_of([option for option in options if values_of_lists(pair, option.way) is not None])


def _repeatable_behind(wanted: list[tf.Tensor]) -> list[tf.Operation]:
    """The operations that may make the wanted tensors again, back to what may not."""
    found: dict[str, tf.Operation] = {}
    stack = [t.op for t in wanted]
    while stack:
        op = stack.pop()
        if op.name not in found and _may_repeat(op):
            found[op.name] = op
            stack += [t.op for t in op.inputs]
    return list(found.values())


def _may_repeat(op: tf.Operation) -> bool:
    return op.type not in op_facts.RESIDENT and op_facts.may_repeat(op)
