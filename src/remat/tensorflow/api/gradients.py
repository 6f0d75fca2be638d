"""``gradients``: ``tf.gradients`` with its arguments, in less memory; in ``tf.function`` and in TensorFlow 1 graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.core.plan import Plan
from remat.running.cost_model import device_here, get_profile
from remat.tensorflow import _private
from remat.tensorflow.api.checkpoints import RULES, Checkpoints, chosen_plan, with_device_figures
from remat.tensorflow.emit.write import emit
from remat.tensorflow.peak.compiled import Program
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.peak.resident import resident_elsewhere_bytes
from remat.tensorflow.planned import Request, Rewritten, plan_for_allocator, plan_for_program
from remat.tensorflow.trace.func_graph import trace_func_graph
from remat.tensorflow.trace.session_graph import SessionGraph

_plain_gradients = tf.gradients


@_private.left_alone_by_autograph
def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    checkpoints: Checkpoints = None,
    budget: int | str | None = None,
    *,
    planner: str = "auto",
    time_limit_s: float | None = None,
    batch_size: int | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """``tf.gradients``, with the step rewritten so that less of the forward pass is kept; the same numbers.

    In a ``tf.function`` the whole function is planned when its trace ends, what stands after this call included. In a
    ``tf.compat.v1`` graph what leads to ``ys`` and to the gradients is planned now.

    Args:
        ys: as in ``tf.gradients``; likewise
        xs: and
        grad_ys: the incoming gradients, None for ones.
        checkpoints: what to keep. A list of tensors; "memory" (about sqrt(N) cuts at the narrowest places, articulation
            points where there are such); "speed" (results of convolutions and matrix products); "collection" (tensors
            in the graph's collection "checkpoints"); or None: then ``budget`` decides.
        budget: peak device bytes of the step, everything counted: an int, "4GiB", "60%" of the plain peak or "auto" for
            a GPU's memory less a margin. With neither checkpoints nor a budget: the knee between memory and time.
        planner: a planner's name, for a budget or the knee.
        time_limit_s: wall seconds that planning may use in each round.
        batch_size: the size of dimensions that are unknown in the graph.
        options: passed on to the planner.
        kwargs: further arguments of ``tf.gradients``.

    Returns:
        One gradient for each of ``xs``: a tensor, ``tf.IndexedSlices`` or None.

    Raises:
        UnsupportedStep: in eager mode, or where a shape or a checkpoint is unknown.
        InfeasibleBudget: where no schedule fits; in a ``tf.function`` when its trace ends.
        ValueError: for both ``checkpoints`` and ``budget``, or an unknown rule.
    """
    if isinstance(checkpoints, str) and checkpoints not in RULES:
        raise ValueError(
            f"checkpoints={checkpoints!r} is no rule; give one of {', '.join(RULES)}, a list of tensors, or a budget"
        )
    if checkpoints is not None and budget is not None:
        raise ValueError(f"gradients takes checkpoints or a budget, not both (budget={budget!r}); leave one out")
    if tf.executing_eagerly():
        raise UnsupportedStep(
            "remat.tensorflow.gradients was called in eager mode, where nothing can be planned; put @tf.function on "
            "the step that uses it, or use remat.tensorflow.recompute"
        )
    graph = tf.compat.v1.get_default_graph()
    forward_ends = len(graph.get_operations())
    found: list[Any] = _plain_gradients(ys, xs, grad_ys=grad_ys, **kwargs)
    if all(gradient is None for gradient in found):
        return found
    wish = _Wish(checkpoints, Request(budget, None, planner, time_limit_s, options or {}), batch_size, forward_ends)
    if isinstance(graph, _private.FuncGraph):
        _plan_when_traced(graph, wish)
    else:
        part = SessionGraph(graph, [*tf.nest.flatten(ys), *tf.nest.flatten(found, expand_composites=True)])
        _last_plan[:] = [_rewrite(part, wish).plan]
    return found


@_private.left_alone_by_autograph
def gradients_memory(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> list[Any]:
    """``gradients`` with ``checkpoints="memory"``."""
    return gradients(ys, xs, grad_ys, "memory", **kwargs)


@_private.left_alone_by_autograph
def gradients_speed(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> list[Any]:
    """``gradients`` with ``checkpoints="speed"``."""
    return gradients(ys, xs, grad_ys, "speed", **kwargs)


@_private.left_alone_by_autograph
def gradients_collection(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> list[Any]:
    """``gradients`` with ``checkpoints="collection"``."""
    return gradients(ys, xs, grad_ys, "collection", **kwargs)


@contextlib.contextmanager
def replaced_gradients(
    checkpoints: Checkpoints = None, budget: int | str | None = None, **kwargs: Any
) -> Iterator[None]:
    """Make ``tf.gradients`` and ``tf.compat.v1.gradients`` be ``gradients`` inside, for code that one cannot change.

        with remat.tensorflow.replaced_gradients("memory"):
            train_op = build_the_model_of_others()

    TensorFlow's own optimizers (``tf.compat.v1.train.Optimizer.minimize``) are reached, too. It holds for the whole
    process, other threads included.

    Args:
        checkpoints: as in ``gradients``; likewise
        budget: in bytes.
        kwargs: further arguments of ``gradients``.
    """

    @_private.left_alone_by_autograph
    def replacement(ys: Any, xs: Any, grad_ys: Any = None, name: str = "gradients", *args: Any, **more: Any) -> Any:
        names = ("colocate_gradients_with_ops", "gate_gradients", "aggregation_method", "stop_gradients")
        more |= dict(zip(names, args, strict=False))
        more.pop("colocate_gradients_with_ops", None)  # TensorFlow 2 has no such argument.
        return gradients(ys, xs, grad_ys, checkpoints, budget, name=name, **more, **kwargs)

    with _private.replaced_gradients(replacement):
        yield


def last_plan() -> Plan | None:
    """The plan of the newest call of ``gradients`` that has been planned; None before the first."""
    return _last_plan[0] if _last_plan else None


_last_plan: list[Plan] = []


@dataclass
class _Wish:
    """What one call asked for."""

    checkpoints: Checkpoints
    request: Request
    batch_size: int | None
    forward_ends: int

    def agrees_with(self, other: _Wish) -> bool:
        lists = isinstance(self.checkpoints, list | tuple) and isinstance(other.checkpoints, list | tuple)
        same = lists or (
            isinstance(self.checkpoints, str | None)
            and isinstance(other.checkpoints, str | None)
            and self.checkpoints == other.checkpoints
        )
        return same and self.request == other.request and self.batch_size == other.batch_size


def _plan_when_traced(graph: Any, wish: _Wish) -> None:
    """Plan the function once, however many gradients it takes."""
    earlier: _Wish | None = getattr(graph, "_remat_wish", None)
    if earlier is not None:
        if not earlier.agrees_with(wish):
            raise UnsupportedStep(
                "gradients was called twice in one function with different checkpoints or budgets; the function is "
                "planned as a whole, so give both calls the same"
            )
        if isinstance(earlier.checkpoints, list | tuple) and isinstance(wish.checkpoints, list | tuple):
            earlier.checkpoints = [*earlier.checkpoints, *wish.checkpoints]
        return
    graph._remat_wish = wish

    def finish(succeeded: bool) -> None:
        if succeeded:
            _last_plan[:] = [_rewrite(graph, wish).plan]

    _private.call_when_traced(finish)


def _rewrite(graph: Any, wish: _Wish) -> Rewritten:
    device = current_device()
    allocator = device.allocator
    in_xla = isinstance(graph, _private.FuncGraph) and _private.in_xla_context(graph)
    input_shapes = _input_shapes(graph, wish.batch_size)
    step = trace_func_graph(
        graph,
        profile=get_profile(device_here("a100" if device.is_gpu else "cpu")),
        input_shapes=input_shapes,
        allocator=allocator,
    )
    resident_bytes = resident_elsewhere_bytes(graph, input_shapes)
    request = wish.request
    if request.budget is None:
        forward = frozenset(step.operations[0].graph.get_operations()[: wish.forward_ends])
        plan = chosen_plan(
            step,
            wish.checkpoints,
            forward,
            planner=request.planner,
            time_limit_s=request.time_limit_s,
            options=request.options,
        )
        plan = with_device_figures(plan, step, allocator, resident_bytes)
    else:
        budget = device.auto_budget_bytes() if request.budget == "auto" else request.budget
        if in_xla:
            program = Program(graph, step, input_shapes, allocator)
            plan = plan_for_program(step, budget, program, request, resident_bytes)
        else:
            plan = plan_for_allocator(step.graph, budget, allocator, request, resident_bytes)
    return Rewritten(plan, step, emit(plan, step, in_xla=in_xla))


def _input_shapes(graph: Any, batch_size: int | None) -> dict[str, tuple[int, ...]]:
    if batch_size is None:
        return {}
    return {
        t.name: tuple(batch_size if d is None else d for d in t.shape)
        for t in graph.inputs
        if t.shape.rank is not None and not t.shape.is_fully_defined()
    }
