"""A plan -> the training step: what autograd saves is kept or made again, tensor by tensor, as the plan says."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

import torch

from remat.errors import PlanMismatch
from remat.plan import Plan
from remat.torch import _private, op_facts
from remat.torch.planning import StepPlan
from remat.torch.recipes import Node, Recipe, new_storages
from remat.torch.replay import NodeTable, SavedTensor, StepState

_log = logging.getLogger("remat")

# So many operators in a row that match further on in the plan are no coincidence.
_SURE_MATCH = 4
_MOST_UNMATCHED = 64


def apply(plan: Plan) -> Applied:
    """Run a forward pass under a plan.

    ::

        with remat.torch.apply(plan):
            loss = loss_fn(*args)
        loss.backward()

    Everything else of the training loop stays as it is. Each use of the result is one forward pass; it may be used any
    number of times, also several before one backward pass. A step that departs from the plan (another shape, another
    branch) keeps, from there on, what plain PyTorch would keep; the first time this is logged as a warning.

    Args:
        plan: from ``remat.torch.plan``.

    Returns:
        A context manager, whose ``departures`` counts the steps that did not follow the plan.

    Raises:
        PlanMismatch: for a plan without its traced step, as loaded from a file.
    """
    if not isinstance(plan, StepPlan):
        raise PlanMismatch(
            "apply takes a plan that remat.torch.plan made; for one that was loaded from a file, "
            "remat.torch.plan(loss_fn, *args, plan=loaded) traces the step again and checks that it is the same"
        )
    return Applied(plan)


class Applied:
    """What ``apply`` returns: a context manager that may be entered again and again.

    Attributes:
        plan: the plan.
        departures: how many forward passes did not follow it.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.departures = 0
        self._planned = _PlannedForward(plan)
        self._open: list[tuple[_Watch, Any]] = []

    def __enter__(self) -> Applied:
        watch = _Watch(self._planned, self)
        hooks = torch.autograd.graph.saved_tensors_hooks(watch.pack, _unpack)
        watch.__enter__()  # type: ignore[no-untyped-call]
        hooks.__enter__()
        self._open.append((watch, hooks))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch, hooks = self._open.pop()
        hooks.__exit__(kind, error, trace)
        watch.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            watch.finish()

    def departed(self, where: str) -> None:
        """Count a step that does not follow the plan, and say so once."""
        self.departures += 1
        if self.departures == 1:
            _log.warning(
                "This step departs from the plan: %s. From there on it keeps what plain PyTorch keeps: its numbers are "
                "right, its memory is not limited. Plan again for other shapes or branches. This is said once.",
                where,
            )


class _PlannedOp:
    """What is known beforehand of one op of the forward pass."""

    __slots__ = ("func", "is_kept", "made", "repeats", "shapes", "writes")

    def __init__(self, plan: StepPlan, index: int) -> None:
        storages, directions = plan.step.recording.storages, plan.directions
        op = plan.step.recording.ops[index]
        self.func = op.func
        self.made = op.makes
        self.shapes = tuple(storages[number].shape for number in op.makes)
        self.is_kept = tuple(number in directions.kept for number in op.makes)
        self.repeats = index in directions.rerun
        self.writes = frozenset(number for number in op.writes if storages[number].made_by is not None)

    def has(self, func: Any, shapes: list[tuple[int, ...]]) -> bool:
        """Is a call of an operator that made tensors of these shapes the one that was planned?"""
        if func is not self.func or len(shapes) != len(self.shapes):
            return False
        return all(known is None or known == shape for shape, known in zip(shapes, self.shapes, strict=True))


class _PlannedForward:
    """The forward pass of a plan: its ops, and which node each saved tensor reads."""

    def __init__(self, plan: StepPlan) -> None:
        recording, instance = plan.step.recording, plan.directions.instance
        self.directions = plan.directions
        self.ops = [_PlannedOp(plan, index) for index in range(recording.forward_ops)]
        self.names = [op.name for op in recording.ops[: recording.forward_ops]]
        self.reads = {
            (slot.position, slot.turn): (number, instance[number][0])
            for number, slot in enumerate(recording.slots)
            if number in instance
        }

    def find(self, calls: list[tuple[Any, list[tuple[int, ...]]]], start: int) -> int | None:
        """The place after the first run of planned ops, from ``start`` on, that are like these calls."""
        for place in range(start, len(self.ops) - len(calls) + 1):
            if all(self.ops[place + n].has(*call) for n, call in enumerate(calls)):
                return place + len(calls)
        return None


class _Watch(_private.TorchDispatchMode):
    """Sees the operators of one forward pass, below autograd and autocast, and keeps what the plan needs of them."""

    def __init__(self, planned: _PlannedForward, owner: Applied) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._planned = planned
        self._owner = owner
        self._state = StepState(planned.directions)
        self._nodes = NodeTable()
        self._position = 0
        self._turn = 0
        self._follows = True
        self._unmatched: list[tuple[Any, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func.is_view and not _private.is_mutable(func)) or _private.is_silent(func):
            return func(*args, **kwargs)
        if not self._follows or self._position == len(self._planned.ops):
            self._protect(func, args, kwargs)
            return func(*args, **kwargs)
        planned = self._planned.ops[self._position]
        as_planned = planned.func is func
        recipe = self._nodes.call(self._position, func, args, kwargs) if as_planned and planned.repeats else None
        writes = op_facts.written(func, args, kwargs)
        self._before_writes(func, args, kwargs, writes, planned.writes if as_planned else frozenset())
        out = func(*args, **kwargs)
        made = new_storages(out, _tensors_in(args, kwargs))
        is_view = not made and not writes and (isinstance(out, torch.Tensor) or _tensors_in((out,), {}))
        if is_view or op_facts.base_name(func) == "aten::lift_fresh":
            return out
        shapes = [tuple(t.shape) for t in made]
        if not planned.has(func, shapes):
            self._unplanned(func, shapes)
            return out
        self._unmatched.clear()
        self._advance_to(self._position + 1)
        if recipe is not None or True in planned.is_kept:
            self._remember(planned, made, recipe)
        return out

    def _advance_to(self, position: int) -> None:
        self._position = position
        self._turn = 0

    def _unplanned(self, func: Any, shapes: list[tuple[int, ...]]) -> None:
        """An operator that the plan does not have here: one too many, or the plan has some that this step left out.

        Models branch in small ways on the values in a batch (is there any padding?). Nothing is recorded of what does
        not match, so that it is kept; a few operators in a row that match further on are where the plan goes on.
        """
        self._unmatched.append((func, shapes))
        if len(self._unmatched) >= _SURE_MATCH:
            place = self._planned.find(self._unmatched[-_SURE_MATCH:], self._position)
            if place is not None:
                self._unmatched.clear()
                self._advance_to(place)
            elif len(self._unmatched) >= _MOST_UNMATCHED:
                self._depart()

    def _remember(self, planned: _PlannedOp, made: list[torch.Tensor], recipe: Recipe | None) -> None:
        if recipe is not None:
            self._state.recipes[recipe.number] = recipe
        for number, tensor, is_kept in zip(planned.made, made, planned.is_kept, strict=True):
            node = self._state.nodes[number] = Node(number)
            if is_kept:
                node.value = _private.alias(tensor)
            if recipe is not None:
                node.recipe = recipe
                recipe.nodes.append(node)
            self._nodes.add(tensor, node)

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
            node = self._nodes.of(tensor)
            if node is None:
                continue
            if node.number not in expected:
                self._nodes.settle(node, tensor)
            elif node.recipe is not None:
                node.recipe.writes.append(self._nodes.call(self._position, func, args, kwargs))

    def _protect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._nodes and not _private.in_backward_pass():
            for tensor in op_facts.written(func, args, kwargs):
                if (node := self._nodes.of(tensor)) is not None:
                    self._nodes.settle(node, tensor)

    def _depart(self) -> None:
        self._follows = False
        func, shapes = self._unmatched[0]
        planned, name = self._planned.ops[self._position], self._planned.names[self._position]
        self._owner.departed(
            f"op {self._position} of the forward pass is {func.name()} making {shapes or 'nothing'}, the plan has "
            f"{name} making {list(planned.shapes) or 'nothing'}"
        )

    def finish(self) -> None:
        """The forward pass is over; one that ended among operators that the plan does not have departed from it."""
        if self._follows and len(self._unmatched) >= _SURE_MATCH:
            self._depart()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves."""
        turn = self._turn
        self._turn += 1
        if not self._follows or type(tensor) is not torch.Tensor or (node := self._nodes.of(tensor)) is None:
            return tensor
        slot, number = self._planned.reads.get((self._position, turn), (-1, -1))
        if number != node.number or tensor.is_conj() or tensor.is_neg():
            return tensor
        return SavedTensor(self._state, slot, node, tensor)


def _unpack(saved: Any) -> Any:
    """Called by autograd when a backward node reads what it saved. It holds on to no forward pass."""
    return saved.read() if isinstance(saved, SavedTensor) else saved


def _tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(one for one in value if isinstance(one, torch.Tensor))
    return found
