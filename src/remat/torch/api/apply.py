"""A plan -> the training step: what autograd saves is kept or made again, tensor by tensor, as the plan says."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

import torch

from remat.core.errors import PlanMismatch
from remat.core.plan import Plan
from remat.torch import _private
from remat.torch.api.plan import StepPlan
from remat.torch.emit.planned_forward import PlannedForward, PlannedOp
from remat.torch.emit.recipes import Node, Recipe, new_storages, tensors_in
from remat.torch.emit.replay import NodeTable, SavedTensor, StepState, kept, read_kept
from remat.torch.trace import op_facts

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
        self._planned = PlannedForward(plan)
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


class _Watch(_private.TorchDispatchMode):
    """Sees the operators of one forward pass, below autograd and autocast, and keeps what the plan needs of them."""

    def __init__(self, planned: PlannedForward, owner: Applied) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._planned = planned
        self._owner = owner
        self._state = StepState(planned.directions)
        self._nodes = NodeTable()
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
        # A single result of the operator that is planned here is a new one, as far as following the plan is concerned.
        if isinstance(out, torch.Tensor) and out.shape == planned.shape:
            self._advance_to(self._position + 1)
        else:
            self._follow(planned, func, args, kwargs, out)
        return out

    def _watched(self, planned: PlannedOp | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that the plan keeps something of, or that is not the one that it has here."""
        if _private.is_silent(func):
            return func(*args, **kwargs)
        if planned is None:
            self._protect(func, args, kwargs)
            return func(*args, **kwargs)
        recipe = None
        if planned.func is func and planned.repeats:
            recipe = self._nodes.call(self._position, func, args, kwargs)
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
        """Go on in the plan after a call, if it is the one that the plan has here, and remember what the plan keeps."""
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
        """The plan goes on at this op, and nothing has been saved since the one before."""
        self._position = position
        self._turn = 0
        self._next = self._planned.ops[position] if position < len(self._planned.ops) else None
        if self._unmatched:
            self._unmatched.clear()

    def _unplanned(self, func: Any, shapes: list[tuple[int, ...]]) -> None:
        """An operator that the plan does not have here: one too many, or the plan has some that this step left out.

        Models branch in small ways on the values in a batch (is there any padding?). Nothing is recorded of what does
        not match, so that it is kept; a few operators in a row that match further on are where the plan goes on.
        """
        self._unmatched.append((func, shapes))
        if len(self._unmatched) >= _SURE_MATCH:
            place = self._planned.find(self._unmatched[-_SURE_MATCH:], self._position)
            if place is not None:
                self._advance_to(place)
            elif len(self._unmatched) >= _MOST_UNMATCHED:
                self._depart()

    def _remember(self, number: int, tensor: torch.Tensor, is_kept: bool, recipe: Recipe | None) -> None:
        node = self._state.nodes[number] = Node(number, tensor)
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
        self._follows, self._next = False, None
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
        self._turn = turn + 1
        read = self._planned.reads.get((self._position, turn))
        if read is None or not self._follows or type(tensor) is not torch.Tensor:
            return kept(tensor)
        node = self._nodes.of(tensor)
        if node is None or node.number != read[1] or tensor.is_conj() or tensor.is_neg():
            return kept(tensor)
        return SavedTensor(self._state, read[0], node, tensor)


def _unpack(saved: Any) -> Any:
    """Called by autograd when a backward node reads what it saved. It holds on to no forward pass."""
    return saved.read() if type(saved) is SavedTensor else read_kept(saved)
