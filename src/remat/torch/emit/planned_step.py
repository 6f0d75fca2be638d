"""A training step under a plan: what the forward pass keeps, and when the backward pass makes the rest again.

Nothing here can give a wrong number: a tensor is either the one that the forward pass made, or made again by the same
operator from the same inputs. The plan only says when something is kept, made and let go. Whatever is asked for in
another order than planned (``retain_graph``, parts of the graph) is made on the spot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch.emit.backward_reads import MadeAgain, StepState
from remat.torch.emit.out_of_step import SavedOutOfStep, UnplannedCall
from remat.torch.emit.planned_forward import PlannedForward, PlannedOp
from remat.torch.emit.recipes import Activation, ActivationTable, Recipe, kept, new_storages, read_kept, tensors_in
from remat.torch.trace import draws, op_facts
from remat.torch.trace.draws import Draw

_ITEM: Final = torch.ops.aten._local_scalar_dense.default

_SURE_MATCH: Final = 4
"""So many operators in a row that match further on in the plan are where it goes on. A judgement, not measured: with
fewer a coincidence loses the plan's place, with more a step with a small branch keeps more than it has to."""
_MOST_UNMATCHED: Final = 64
"""After so many operators that the plan does not have, the step has departed from it. A judgement, not measured: a
larger number keeps their shapes longer before it is said, a smaller one gives up on a longer branch."""


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
        # While the step runs operators that the plan does not have: the last of them, how many they were, and what
        # autograd has saved since.
        self._unmatched: deque[UnplannedCall] = deque(maxlen=_SURE_MATCH)
        self._unmatched_count = 0
        self._saved_since: list[SavedOutOfStep] = []
        # Bytes by storage of what autograd saved and the plan would have made again.
        self._held: dict[int, int] = {}
        self._lost: int | None = None
        # Saved tensors of the plan for which one of the step stands.
        self._used: set[int] = set()
        # What operators made that the plan does not have.
        self._unplanned_made: dict[int, Callable[[], Any]] = {}
        self.first_difference: str | None = None
        # What Python heard where it asked for truth values.
        self.answers: list[bool] = []
        self._own_code_depth = 0
        self._position = 0
        self._advance_to(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and _private.runs_on_parts(types):
            return NotImplemented  # What runs on the parts of distributed tensors comes here.
        if op_facts.is_view(func) or self._own_code_depth:
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

    def begin_own_code(self) -> None:
        """Operators from here on are those of ``fully_shard``, which no plan changes."""
        self._own_code_depth += 1

    def end_own_code(self) -> None:
        """They end here."""
        self._own_code_depth -= 1

    def allocates(self, tensor: torch.Tensor) -> bool:
        """A parameter is gathered, as in the plain step."""
        return False

    def frees(self, tensor: torch.Tensor) -> bool:
        """A gathered parameter is let go of, as in the plain step."""
        return False

    def _watched(self, planned: PlannedOp | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call of which the plan keeps something, or which is not the one that the plan has here."""
        if _private.is_silent(func):
            return func(*args, **kwargs)
        if func is _ITEM:  # Python asks for a value, which is no operator of the plan.
            value = func(*args, **kwargs)
            if isinstance(value, bool):
                self.answers.append(value)
            return value
        if planned is None:
            self._protect(func, args, kwargs)
            return func(*args, **kwargs)
        recipe, draw = None, None
        if planned.func is func and planned.repeats:
            recipe = self._table.call(planned.number, func, args, kwargs)
        elif op_facts.is_random(func, args, kwargs) and op_facts.may_repeat(func, args, kwargs, on_gpu=False):
            draw = draws.note(func, args, kwargs)  # The call may turn out to be planned further on.
        writes = op_facts.may_write(func) and op_facts.written(func, args, kwargs)
        if writes:
            expected = planned.writes if planned.func is func else frozenset()
            self._before_writes(func, args, kwargs, writes, expected)
        out = func(*args, **kwargs)
        self._follow(planned, func, args, kwargs, out, recipe, draw, writes=bool(writes))
        return out

    def _follow(
        self,
        planned: PlannedOp,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        recipe: Recipe | None = None,
        draw: Draw | None = None,
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
            self._unplanned(UnplannedCall(func, args, kwargs, made, places, draw, self._saved_since))
            return
        self._advance_to(self._position + 1)
        if recipe is not None:
            recipe.outputs = places
        self._made_by_plan(planned, made, recipe)

    def _made_by_plan(self, planned: PlannedOp, made: list[torch.Tensor], recipe: Recipe | None) -> None:
        if recipe is not None:
            self._state.recipes[recipe.number] = recipe
        elif planned.repeats:
            for number, tensor in zip(planned.made, made, strict=True):
                self._note_held(tensor, number)
        for number, tensor, is_kept in zip(planned.made, made, planned.is_kept, strict=True):
            if is_kept or recipe is not None:
                self._remember(number, tensor, is_kept, recipe).has_own_count = planned.is_factory

    def _advance_to(self, position: int) -> None:
        """The next op of the plan is this one. No tensor has been saved since the op before."""
        if self._unmatched:
            self._in_step_again(self._saved_since, self._position)
            self._forget_unmatched()
        self._position = position
        self._turn = 0
        self._next = self._planned.ops[position] if position < len(self._planned.ops) else None

    def _unplanned(self, call: UnplannedCall) -> None:
        """Note an operator that the plan does not have here: the step runs one more, or has left some out.

        Models branch in small ways on the values in a batch (is there any padding?). What does not match is kept. Where
        a few operators in a row match further on in the plan, it goes on there, and they are taken for planned.
        """
        if self.first_difference is None:
            self.first_difference = self._difference(call)
        self._saved_since = []
        self._unmatched.append(call)
        for tensor in call.made:
            storage = tensor.untyped_storage()
            self._unplanned_made[_private.storage_key(storage)] = _private.weak(storage)
        self._unmatched_count += 1
        if len(self._unmatched) == _SURE_MATCH:
            place = self._planned.find(self._unmatched, self._position)
            if place is not None:
                calls = list(self._unmatched)
                self._forget_unmatched()
                for count, one in enumerate(calls, 1):
                    self._was_planned(one, place + count - 1, calls[count:])
                self._advance_to(place + _SURE_MATCH)
            elif self._unmatched_count >= _MOST_UNMATCHED:
                self._depart()

    def _was_planned(self, call: UnplannedCall, number: int, later: list[UnplannedCall]) -> None:
        """A call that came out of step was that of a planned op: do what would have been done in step."""
        self._in_step_again(call.saved, number)
        for tensor in call.made:
            self._unplanned_made.pop(_private.storage_key(tensor.untyped_storage()), None)
        planned = self._planned.ops[number]
        own = [self._table.of(tensor) for tensor in call.written]
        recipe = None
        if planned.repeats or any(activation is not None and activation.recipe is not None for activation in own):
            recipe = call.recipe(planned.number, self._table, later)
        for tensor, activation in zip(call.written, own, strict=True):
            if activation is None or activation.recipe is None:
                continue
            if recipe is not None and activation.number in planned.writes:
                activation.recipe.writes.append(recipe)
            else:
                activation.recipe = None
                activation.hold(tensor)
        if not call.written:
            self._made_by_plan(planned, call.made, recipe if planned.repeats else None)

    def _forget_unmatched(self) -> None:
        self._unmatched.clear()
        self._unmatched_count = 0
        self._saved_since = []

    def _in_step_again(self, saved: list[SavedOutOfStep], position: int) -> None:
        """What was saved before the planned op at a position, and after one that was not planned, is what it reads."""
        first = self._planned.turns[position] - len(saved)
        for turn, one in enumerate(saved, first):
            one.packed = self._planned_read(one.tensor, position, turn)
            if one.packed is None and self._unplanned_made and one.tensor is not None:
                self._note_unplanned(one.tensor)
            if one.packed is not None:
                one.tensor = None

    def _remember(self, number: int, tensor: torch.Tensor, is_kept: bool, recipe: Recipe | None) -> Activation:
        activation = self._state.activations[number] = Activation(number, tensor)
        if is_kept:
            activation.value = _private.alias(tensor)
        if recipe is not None:
            activation.recipe = recipe
            recipe.activations.append(activation)
        self._table.add(tensor, activation)
        return activation

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
            activation.count_with(tensor)
            if activation.number in expected and activation.recipe is None:
                continue
            number = self._planned.ops[self._position].number
            write = self._table.call(number, func, args, kwargs) if activation.number in expected else None
            if activation.recipe is None or write is None:
                self._table.settle(activation, tensor)
            else:
                activation.recipe.writes.append(write)

    def _protect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._table and not _private.in_backward_pass():
            for tensor in op_facts.written(func, args, kwargs):
                if (activation := self._table.of(tensor)) is not None:
                    self._table.settle(activation, tensor)

    def _difference(self, call: UnplannedCall) -> str:
        planned, name = self._planned.ops[self._position], self._planned.names[self._position]
        return (
            f"op {self._position} of the forward pass is {call.func.name()} making {call.shapes or 'nothing'}, "
            f"the plan has {name} making {list(planned.shapes) or 'nothing'}"
        )

    def _depart(self) -> None:
        self._follows, self._next = False, None
        self._forget_unmatched()
        assert self.first_difference is not None
        self._departed(self.first_difference)

    def finish(self, most_held_bytes: float) -> None:
        """The forward pass is over. If its last operators were not in the plan, it has departed from it.

        It has as well if it holds more than so many bytes that the plan makes again.
        """
        held_bytes = sum(self._held.values())
        if self._follows and self._unmatched_count >= _SURE_MATCH:
            self._depart()
        elif self._follows and held_bytes > most_held_bytes:
            if self.first_difference is None and self._lost is not None:
                name = self._planned.names[self._lost]
                self.first_difference = f"op {self._lost} of the forward pass, {name}, has no recipe"
            self._departed(f"{self.first_difference}; {held_bytes} bytes are kept that the plan does not keep")
        self._forget_unmatched()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves."""
        if type(tensor) is not torch.Tensor and (part := _private.local(tensor)) is not tensor:
            packed = self.pack(part)
            return kept(tensor) if type(packed) is tuple else PackedPart(packed, _private.placement(tensor))
        if self._unmatched:
            # Where the plan goes on, and whether it makes this tensor again, is not known yet.
            saved = SavedOutOfStep(tensor)
            self._saved_since.append(saved)
            return saved
        turn = self._turn
        self._turn = turn + 1
        found = self._planned_read(tensor, self._position, turn)
        if found is None and self._unplanned_made:
            self._note_unplanned(tensor)
        return found or kept(tensor)

    def _planned_read(self, tensor: torch.Tensor | None, position: int, turn: int) -> MadeAgain | None:
        """What stands for a tensor that the plan reads in the backward pass as it says; None where it does not."""
        reads = self._planned.reads.get(position)
        if reads is None or not self._follows or type(tensor) is not torch.Tensor:
            return None
        read = reads.get(turn)
        activation = self._table.of(tensor)
        is_shifted = self.first_difference is not None and activation is not None
        if is_shifted and activation is not None and (read is None or read[1] != activation.number):
            # An operator saves one tensor less without a mask, so that the others move up.
            same = [one for one in reads.values() if one[1] == activation.number]
            read = next((one for one in same if one[0] not in self._used), same[0] if same else read)
        if read is None:
            return None
        if activation is None or activation.number != read[1] or tensor.is_conj() or tensor.is_neg():
            self._note_held(tensor, read[1])
            return None
        if read[0] in self._used and activation.recipe is None:
            return None  # Its value may be gone at the second read, and nothing makes it again.
        self._used.add(read[0])
        return MadeAgain(self._state, read[0], activation, tensor)

    def _note_unplanned(self, tensor: torch.Tensor) -> None:
        """A tensor stays kept; if an operator made it that the plan does not have, the plan does not count it."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            made = self._unplanned_made.get(_private.storage_key(storage))
            if made is not None and made() is storage:
                self._held[_private.storage_key(storage)] = storage.nbytes()

    def _note_held(self, tensor: torch.Tensor, number: int) -> None:
        """A tensor stays kept at a place where the plan reads a storage that it makes again."""
        if number in self._planned.directions.kept:
            return
        storage = tensor.untyped_storage()
        self._held[_private.storage_key(storage)] = storage.nbytes()
        if self._lost is None:
            self._lost = self._planned.makers[number]


class PackedPart:
    """What stands in autograd's graph for a distributed tensor whose part the plan may make again.

    Args:
        part: what stands for the part.
        placement: how the tensor is distributed.
    """

    __slots__ = ("_part", "_placement")

    def __init__(self, part: MadeAgain | SavedOutOfStep, placement: Any) -> None:
        self._part = part
        self._placement = placement

    def read(self) -> torch.Tensor:
        """The distributed tensor; called when a backward activation needs it."""
        return _private.distributed(self._part.read(), self._placement)


def unpack(packed: Any) -> Any:
    """Called by autograd when a backward node reads what it saved. A function: a method would keep a watcher alive."""
    return read_kept(packed) if type(packed) is tuple else packed.read()
