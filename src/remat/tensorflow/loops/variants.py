"""The ways to write a traced function: as it is, and with loops that keep less and less for their backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import tensorflow as tf

from remat.core.graph import Graph
from remat.fit.loop_menu import merged
from remat.fit.variants import Variants
from remat.running.cost_model import DeviceProfile
from remat.tensorflow import _private
from remat.tensorflow.loops.bodies import Bodies, Choice, written
from remat.tensorflow.loops.menu import menu_of
from remat.tensorflow.loops.pairs import Pair, find_pairs
from remat.tensorflow.trace.func_graph import TracedStep, trace_body
from remat.tensorflow.trace.sizes import Loop, Sizes

_MOST_VARIANTS: Final = 32
"""So many at most, those between left out evenly: a saved plan is for one of them, which must be found again."""

Trace: TypeAlias = Callable[[Mapping[tf.Operation, _private.FuncGraph]], TracedStep]
"""Traces the function with other bodies for some of its loops."""


@dataclass(frozen=True)
class Variant:
    """One way to write a function.

    Attributes:
        step: its trace.
        bodies: those that its loops get.
        in_made_order: the same trace with its operations in the order in which they were made; None where ``step`` has
            that order.
    """

    step: TracedStep
    bodies: tuple[Bodies, ...] = ()
    in_made_order: TracedStep | None = None

    @property
    def graph(self) -> Graph:
        """The joint graph."""
        return self.step.graph

    @property
    def graph_to_plan(self) -> Graph:
        """The joint graph; nothing is held in it."""
        return self.step.graph

    @property
    def as_written(self) -> Graph:
        """The joint graph with its operations in the order in which they were made."""
        return (self.step if self.in_made_order is None else self.in_made_order).graph

    def give_bodies(self) -> None:
        """Write the loops of the function in this way."""
        for bodies in self.bodies:
            bodies.give()


def variants_of(step: TracedStep, sizes: Sizes, profile: DeviceProfile, trace: Trace) -> Variants[Variant]:
    """A function as it is, then with loops that keep less and less.

    Args:
        step: the function as it is.
        sizes: of its tensors.
        profile: device figures for the predicted times.
        trace: traces it with other bodies.
    """
    pairs = find_pairs(step.operations)
    if not pairs:
        return Variants([lambda: Variant(step)])
    menus = []
    for pair in pairs:
        loop = Loop(pair.forward, sizes)
        menus.append(menu_of(pair, loop, trace_body(loop, profile)))
    rows = merged(menus)
    if len(rows) > _MOST_VARIANTS:
        rows = [rows[number * (len(rows) - 1) // (_MOST_VARIANTS - 1)] for number in range(_MOST_VARIANTS)]
    everything = [frozenset(slot.item.name for slot in pair.slots) for pair in pairs]
    makers = [partial(_variant, step, pairs, row, everything, trace) for row in rows]
    return Variants([lambda: Variant(step), *makers])


def _variant(
    step: TracedStep,
    pairs: Sequence[Pair],
    choices: Sequence[Choice],
    everything: Sequence[frozenset[str]],
    trace: Trace,
) -> Variant:
    bodies = tuple(
        written(pair, choice)
        for pair, choice, stored in zip(pairs, choices, everything, strict=True)
        if choice.stored != stored
    )
    if not bodies:
        return Variant(step)
    return Variant(trace({loop: body for one in bodies for loop, body in one.by_loop.items()}), bodies)
