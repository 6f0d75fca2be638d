"""A training step under a plan: what the forward pass keeps, and when the backward pass makes the rest again.

Nothing here can give a wrong number: a tensor is either the one that the forward pass made, or made again by the same
operator from the same inputs. The plan only says when something is kept, made and let go. Whatever is asked for in
another order than planned (``retain_graph``, parts of the graph) is made on the spot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch.emit.eager_order import Directions, Rerun
from remat.torch.emit.recipes import (
    Activation,
    ActivationTable,
    Recipe,
    check_version,
    kept,
    new_storages,
    read_kept,
    tensors_in,
    values_of,
)
from remat.torch.trace import op_facts
from remat.torch.trace.recording import Recording

_SURE_MATCH: Final = 4
"""So many operators in a row that match further on in the plan are where it goes on. A judgement, not measured: with
fewer a coincidence loses the plan's place, with more a step with a small branch keeps more than it has to."""
_MOST_UNMATCHED: Final = 64
"""After so many operators that the plan does not have, the step has departed from it. A judgement, not measured: a
larger number keeps their shapes longer before it is said, a smaller one gives up on a longer branch."""


class PlannedOp:
    """What is known beforehand of one op of the forward pass, so that the step needs little more than a look at it.

    Attributes:
        func: the operator.
        made: the storages that it makes, by number.
        shapes: of their tensors; None where a shape is not known.
        shape: the only one of them, where it makes one storage; else None.
        is_kept: for each of the storages, is it kept for a recomputation?
        repeats: does the op run again?
        writes: storages of the step that it writes to.
        is_watched: is there more to do than to see whether the step follows the plan?
    """

    __slots__ = ("func", "is_kept", "is_watched", "made", "repeats", "shape", "shapes", "writes")

    def __init__(self, recording: Recording, directions: Directions, index: int) -> None:
        storages, op = recording.storages, recording.ops[index]
        self.func = op.func
        self.made = op.makes
        self.shapes = tuple(storages[number].shape for number in op.makes)
        self.shape = self.shapes[0] if len(self.shapes) == 1 else None
        self.is_kept = tuple(number in directions.kept for number in op.makes)
        self.repeats = index in directions.rerun
        self.writes = frozenset(number for number in op.writes if storages[number].made_by is not None)
        self.is_watched = self.repeats or True in self.is_kept or op_facts.may_write(op.func)

    def has(self, func: Any, shapes: list[tuple[int, ...]]) -> bool:
        """Is a call of an operator that made tensors of these shapes the one that was planned?"""
        if func is not self.func or len(shapes) != len(self.shapes):
            return False
        return all(known is None or known == shape for shape, known in zip(shapes, self.shapes, strict=True))


class PlannedForward:
    """The forward pass under a plan, made once and used by every step.

    Args:
        recording: of the step.
        directions: what the plan does about each saved tensor.

    Attributes:
        ops: what is known of each.
        names: their names, for messages.
        reads: by position and turn of a tensor that autograd saves: its number, and that of its storage.
    """

    def __init__(self, recording: Recording, directions: Directions) -> None:
        self.directions = directions
        self.ops = [PlannedOp(recording, directions, index) for index in range(recording.forward_ops)]
        self.names = [op.name for op in recording.ops[: recording.forward_ops]]
        self.reads = {
            (saved.position, saved.turn): (number, directions.instance[number][0])
            for number, saved in enumerate(recording.saved)
            if number in directions.instance
        }

    def find(self, calls: list[tuple[Any, list[tuple[int, ...]]]], start: int) -> int | None:
        """The place after the first run of planned ops, from ``start`` on, that are like these calls."""
        for place in range(start, len(self.ops) - len(calls) + 1):
            if all(self.ops[place + n].has(*call) for n, call in enumerate(calls)):
                return place + len(calls)
        return None


class ForwardWatcher(_private.TorchDispatchMode):
    """Sees the operators of one forward pass, below autograd and autocast, and keeps what the plan needs of them.

    Args:
        planned: the forward pass as planned.
        departed: called once if the pass does not follow the plan, with where it does not.
    """

    def __init__(self, planned: PlannedForward, departed: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._planned = planned
        self._departed = departed
        self._state = StepState(planned.directions)
        self._table = ActivationTable()
        self._follows = True
        self._unmatched: list[tuple[Any, list[tuple[int, ...]]]] = []
        self._advance_to(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        planned = self._next
        if planned is None or planned.func is not func or planned.is_watched:
            return self._watched(planned, func, args, kwargs)
        out = func(*args, **kwargs)
        # The usual case: the planned operator made one tensor of the planned shape, of which the plan keeps nothing.
        if isinstance(out, torch.Tensor) and out.shape == planned.shape:
            self._advance_to(self._position + 1)
        else:
            self._follow(planned, func, args, kwargs, out)
        return out

    def _watched(self, planned: PlannedOp | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call of which the plan keeps something, or which is not the one that the plan has here."""
        if _private.is_silent(func):
            return func(*args, **kwargs)
        if planned is None:
            self._protect(func, args, kwargs)
            return func(*args, **kwargs)
        recipe = None
        if planned.func is func and planned.repeats:
            recipe = self._table.call(self._position, func, args, kwargs)
        writes = op_facts.may_write(func) and op_facts.written(func, args, kwargs)
        if writes:
            expected = planned.writes if planned.func is func else frozenset()
            self._before_writes(func, args, kwargs, writes, expected)
        out = func(*args, **kwargs)
        self._follow(planned, func, args, kwargs, out, recipe, writes=bool(writes))
        return out

    def _follow(
        self,
        planned: PlannedOp,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        recipe: Recipe | None = None,
        *,
        writes: bool = False,
    ) -> None:
        """After a call: if it is the one that the plan has here, remember what the plan keeps of it, and go on."""
        outputs = tensors_in((out,))
        places = new_storages(outputs, tensors_in((*args, *kwargs.values())))
        if outputs and not places and not writes:
            return  # A view, though the operator's schema does not say so.
        made = [outputs[place] for place in places]
        shapes = [tuple(tensor.shape) for tensor in made]
        if not planned.has(func, shapes):
            self._unplanned(func, shapes)
            return
        self._advance_to(self._position + 1)
        if recipe is not None:
            recipe.outputs = places
            self._state.recipes[recipe.number] = recipe
        for number, tensor, is_kept in zip(planned.made, made, planned.is_kept, strict=True):
            if is_kept or recipe is not None:
                self._remember(number, tensor, is_kept, recipe)

    def _advance_to(self, position: int) -> None:
        """The next op of the plan is this one. No tensor has been saved since the op before."""
        self._position = position
        self._turn = 0
        self._next = self._planned.ops[position] if position < len(self._planned.ops) else None
        if self._unmatched:
            self._unmatched.clear()

    def _unplanned(self, func: Any, shapes: list[tuple[int, ...]]) -> None:
        """Note an operator that the plan does not have here: the step runs one more, or has left some out.

        Models branch in small ways on the values in a batch (is there any padding?). What does not match is kept. Where
        a few operators in a row match further on in the plan, it goes on there.
        """
        self._unmatched.append((func, shapes))
        if len(self._unmatched) >= _SURE_MATCH:
            place = self._planned.find(self._unmatched[-_SURE_MATCH:], self._position)
            if place is not None:
                self._advance_to(place)
            elif len(self._unmatched) >= _MOST_UNMATCHED:
                self._depart()

    def _remember(self, number: int, tensor: torch.Tensor, is_kept: bool, recipe: Recipe | None) -> None:
        activation = self._state.activations[number] = Activation(number, tensor)
        if is_kept:
            activation.value = _private.alias(tensor)
        if recipe is not None:
            activation.recipe = recipe
            recipe.activations.append(activation)
        self._table.add(tensor, activation)

    # Writes in place.

    def _before_writes(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
        expected: frozenset[int],
    ) -> None:
        for tensor in written:
            activation = self._table.of(tensor)
            if activation is None:
                continue
            if activation.number not in expected:
                self._table.settle(activation, tensor)
            elif activation.recipe is not None:
                activation.recipe.writes.append(self._table.call(self._position, func, args, kwargs))

    def _protect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._table and not _private.in_backward_pass():
            for tensor in op_facts.written(func, args, kwargs):
                if (activation := self._table.of(tensor)) is not None:
                    self._table.settle(activation, tensor)

    def _depart(self) -> None:
        self._follows, self._next = False, None
        func, shapes = self._unmatched[0]
        planned, name = self._planned.ops[self._position], self._planned.names[self._position]
        self._departed(
            f"op {self._position} of the forward pass is {func.name()} making {shapes or 'nothing'}, the plan has "
            f"{name} making {list(planned.shapes) or 'nothing'}"
        )

    def finish(self) -> None:
        """The forward pass is over. If its last operators were not in the plan, it has departed from it."""
        if self._follows and len(self._unmatched) >= _SURE_MATCH:
            self._depart()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves."""
        turn = self._turn
        self._turn = turn + 1
        read = self._planned.reads.get((self._position, turn))
        if read is None or not self._follows or type(tensor) is not torch.Tensor:
            return kept(tensor)
        activation = self._table.of(tensor)
        if activation is None or activation.number != read[1] or tensor.is_conj() or tensor.is_neg():
            return kept(tensor)
        return _Packed(self._state, read[0], activation, tensor)


def unpack(packed: Any) -> Any:
    """Called by autograd when a backward node reads what it saved. A function: a method would keep a watcher alive."""
    return packed.read() if type(packed) is _Packed else read_kept(packed)


class StepState:
    """What one forward pass leaves behind for its backward pass, and which of the planned reads are still to come.

    Attributes:
        activations: by the number of their storage.
        recipes: by the number of the recorded op.
    """

    def __init__(self, directions: Directions) -> None:
        self._directions = directions
        self._pending = dict(directions.pending)
        self._read: set[int] = set()
        self._begun: set[int] = set()
        self.activations: dict[int, Activation] = {}
        self.recipes: dict[int, Recipe] = {}

    def value_for(self, saved: int, activation: Activation) -> torch.Tensor:
        """The value that a saved tensor's storage has, once everything has run that the plan recomputes here.

        Args:
            saved: the number of the saved tensor that a backward node reads.
            activation: its storage.
        """
        self._read.add(saved)
        op = self._directions.begins.get(saved)
        if op is not None and op not in self._begun:
            self._begun.add(op)
            with _private.BelowAutograd():
                for rerun in self._directions.reruns[op]:
                    self._rerun(rerun)
        return activation.value if activation.value is not None else values_of([activation])[id(activation)]

    def released(self, saved: int) -> None:
        """Autograd let go of a saved tensor. If it was never read, its read may still come from another tensor."""
        if saved in self._read:
            self._release(self._directions.instance[saved])

    def _rerun(self, rerun: Rerun) -> None:
        recipe = self.recipes.get(rerun.op)
        if recipe is None:
            return  # The forward pass ended or departed before it.
        missing = recipe.missing()
        made = recipe.run(values_of(missing) if missing else {})
        for activation, tensor in zip(recipe.activations, made, strict=True):
            instance = rerun.keeps.get(activation.number)
            if instance is not None and not activation.is_settled and self._pending[activation.number, instance] > 0:
                activation.value, activation.instance = tensor, instance
        del made
        if not _private.keeps_graph():
            for used in rerun.uses:
                self._release(used)

    def _release(self, instance: tuple[int, int]) -> None:
        pending = self._pending
        pending[instance] -= 1
        number = instance[0]
        activation = self.activations.get(number)
        if activation is None or activation.is_settled or activation.value is None:
            return
        # Reads of earlier instances that are still to come read this one.
        for earlier in range(activation.instance, -1, -1):
            if pending.get((number, earlier), 0) > 0:
                return
        activation.value = None


class _Packed:
    """What stands in autograd's graph for a tensor that the plan makes again."""

    __slots__ = ("_activation", "_place", "_saved", "_state", "_version")

    def __init__(self, state: StepState, saved: int, activation: Activation, tensor: torch.Tensor) -> None:
        self._state = state
        self._saved = saved
        self._activation = activation
        self._place = activation.place_of(tensor)
        self._version = tensor._version

    def read(self) -> torch.Tensor:
        """The tensor; called when a backward activation needs it."""
        activation = self._activation
        value = self._state.value_for(self._saved, activation)
        if (activation.instance == 0 or activation.is_settled) and value is activation.value:
            check_version(value, self._version, self._place[0])
        return activation.part(value, self._place)

    def __del__(self) -> None:
        self._state.released(self._saved)
