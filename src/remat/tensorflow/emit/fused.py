"""Runs that the graph optimizer makes one kernel of: a product, its bias and a Gelu.

It does so only where nobody else reads what lies between, and where no control edge touches it. In a plain step the
backward pass reads what a Gelu computes on its way. Under a plan that makes it anew later, the first run may be one
kernel, which is cheaper than in the plain step, and makes none of it. Activations of one operation are a chain whose
order the data gives, so that no edge keeps them apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import tensorflow as tf

from remat.core.schedule import Schedule
from remat.tensorflow import _private
from remat.tensorflow.peak.carried_out import is_read_as_the_graph_says
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.trace.func_graph import TracedStep

Group: TypeAlias = tuple[int, ...]
"""The positions in a schedule of what becomes one kernel, rising: the product first, then its bias."""

_Instance: TypeAlias = tuple[int, int]  # A tensor, and the position of the run that made it; -1 for an input.

_GELUS: Final[tuple[Mapping[str, int], ...]] = (
    {"Mul": 3, "Neg": 1, "Erfc": 1},  # Keras'
    {"Mul": 4, "AddV2": 2, "Pow": 1, "Tanh": 1},  # in tanh's form, of both
)
"""By kind, the operations of a Gelu that oneDNN runs within a product. Seen in TensorFlow 2.19 to 2.21."""

_KINDS: Final = frozenset(kind for gelu in _GELUS for kind in gelu)
_MOST: Final = max(sum(gelu.values()) for gelu in _GELUS)
_DTYPE: Final = "float32"
"""Of bfloat16 a kernel rounds once what its parts round several times: another number than the second run makes."""


def fuses() -> bool:
    """Does the graph optimizer make one kernel of several operations here, as it does for oneDNN's?"""
    options = tf.config.optimizer.get_experimental_options()
    is_off = options.get("disable_meta_optimizer", False) or not options.get("remapping", True)
    return _private.uses_onednn() and not is_off and not current_device().is_gpu


def fused_groups(step: TracedStep, schedule: Schedule, positions: Sequence[int]) -> list[Group]:
    """What becomes one kernel of a schedule, where the graph optimizer ``fuses``. In O(reads).

    Args:
        step: the traced function, before anything of it is rewritten.
        schedule: for its graph.
        positions: of the runs in it that are carried out, rising.
    """
    readers = _readers(step, schedule, positions)
    groups = (_group_at(step, schedule, readers, position) for position in positions)
    return [group for group in groups if group is not None]


def _readers(step: TracedStep, schedule: Schedule, positions: Sequence[int]) -> Mapping[_Instance, Sequence[int]]:
    """Who reads what a run made, until the op runs again; the length of the schedule stands for who called the step."""
    made: dict[int, int] = {}
    readers: dict[_Instance, list[int]] = defaultdict(list)
    for position in positions:
        op = step.graph.ops[schedule[position]]
        for tensor in dict.fromkeys(op.inputs):
            readers[tensor, made.get(tensor, -1)].append(position)
        made.update(dict.fromkeys(op.outputs, position))
    for tensor in step.graph.outputs:
        readers[tensor, made.get(tensor, -1)].append(len(schedule))
    return readers


def _group_at(
    step: TracedStep, schedule: Schedule, readers: Mapping[_Instance, Sequence[int]], position: int
) -> Group | None:
    """The group whose product runs at a position."""

    def kind(at: int) -> str:
        return step.graph.ops[schedule[at]].kind if at < len(schedule) else ""

    def who_reads(at: int) -> Sequence[int]:
        return [reader for tensor in step.graph.ops[schedule[at]].outputs for reader in readers.get((tensor, at), ())]

    def is_alone(at: int) -> bool:
        return is_read_as_the_graph_says(step, schedule[at])

    operation = step.operations[schedule[position]]
    if kind(position) != "MatMul" or operation.outputs[0].dtype.name != _DTYPE or not is_alone(position):
        return None
    behind = who_reads(position)
    if len(behind) != 1 or kind(behind[0]) != "BiasAdd":
        return None
    members = [position, behind[0]]
    kinds: Counter[str] = Counter()
    waiting = sorted(who_reads(members[-1]))
    while waiting and kinds.total() < _MOST and kind(waiting[0]) in _KINDS:
        members.append(waiting[0])
        kinds[kind(waiting[0])] += 1
        inner = set().union(*map(who_reads, members[1:-1]))
        if dict(kinds) in _GELUS and inner <= set(members) and all(map(is_alone, members[1:-1])):
            return tuple(members)
        waiting = sorted((inner | set(who_reads(members[-1]))) - set(members))
    return None
