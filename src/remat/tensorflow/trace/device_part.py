"""The part of a traced step that one device runs: a graph of its own, to be planned within that device's budget.

Where replicas share a process, as under ``tf.distribute.MirroredStrategy``, one function holds the operations of all of
them. Each operation names its device. What crosses from one device to another stays where TensorFlow put it: a tensor
that comes from elsewhere is resident for the whole step, and one that is read elsewhere lives to the end and is made
once. Both count more than there is, never less.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from remat.core.graph import Graph
from remat.tensorflow.trace.func_graph import TracedStep


def device_part(step: TracedStep, device: str) -> TracedStep:
    """What one device runs of a step, in program order.

    Operations without a device, such as those that put the replicas' results together, belong to no part. A plan for a
    part moves no first computation, so that whatever waits for several parts finds them in program order still.

    Args:
        step: the whole function.
        device: the full name, as operations carry it.
    """
    graph = step.graph
    chosen = [number for number, operation in enumerate(step.operations) if operation.device == device]
    place = {number: position for position, number in enumerate(chosen)}
    made = {tensor for number in chosen for tensor in graph.ops[number].outputs}
    read = {tensor for number in chosen for tensor in graph.ops[number].inputs}
    pinned = set(graph.inputs)
    resident_here = {t for t in pinned if step.tensors[t].op.device == device}
    kept = sorted(made | read | resident_here)
    renumbered = {tensor: number for number, tensor in enumerate(kept)}
    elsewhere = [op for number, op in enumerate(graph.ops) if number not in place]
    read_elsewhere = {tensor for op in elsewhere for tensor in op.inputs} | set(graph.outputs)

    ops = []
    for number in chosen:
        op = graph.ops[number]
        ops.append(
            dataclasses.replace(
                op,
                inputs=tuple(renumbered[t] for t in op.inputs),
                outputs=tuple(renumbered[t] for t in op.outputs),
                after=tuple(sorted(place[before] for before in op.after if before in place)),
                in_place=tuple(
                    (renumbered[source], renumbered[target]) for source, target in op.in_place if source in renumbered
                ),
                recomputable=op.recomputable and read_elsewhere.isdisjoint(op.outputs),
            )
        )
    tensors = []
    for tensor in kept:
        described = graph.tensors[tensor]
        source = described.alias_of
        tensors.append(dataclasses.replace(described, alias_of=None if source is None else renumbered.get(source)))
    part = Graph(
        ops=tuple(ops),
        tensors=tuple(tensors),
        inputs=tuple(renumbered[t] for t in kept if t not in made),
        outputs=tuple(renumbered[t] for t in kept if t in made and t in read_elsewhere),
        free_order=graph.free_order,
        notes=graph.notes,
    )
    return TracedStep(part, tuple(step.operations[n] for n in chosen), tuple(step.tensors[t] for t in kept))


def inputs_of_device(graph: tf.Graph, device: str) -> list[tf.Tensor]:
    """The inputs of a function that operations of one device read."""
    return [tensor for tensor in graph.inputs if any(reader.device == device for reader in tensor.consumers())]
