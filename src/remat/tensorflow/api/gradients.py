"""``gradients``: ``tf.gradients`` with its arguments, in less memory; in ``tf.function`` and in TensorFlow 1 graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.core.plan import Plan
from remat.fit.request import Request
from remat.tensorflow import _private
from remat.tensorflow._traces import call_when_traced
from remat.tensorflow.api.checkpoints import KNEE, Checkpoints, check_rule, checked_levers
from remat.tensorflow.first_run import watch_first_run
from remat.tensorflow.planned import rewrite
from remat.tensorflow.replicas import refuse_replicas
from remat.tensorflow.trace.func_graph import FunctionToPlan
from remat.tensorflow.trace.sizes import batch_sizes
from remat.tensorflow.trace.which_run import SessionGraph

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
    levers: Sequence[str] = ("recompute",),
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
        levers: as in ``GradientTape``, with a budget in a ``tf.function``.
        kwargs: further arguments of ``tf.gradients``.

    Returns:
        One gradient for each of ``xs``: a tensor, ``tf.IndexedSlices`` or None.

    Raises:
        UnsupportedStep: in eager mode, where a shape or a checkpoint is unknown, or for slices of a TensorFlow 1 graph.
        InfeasibleBudget: where no schedule fits; in a ``tf.function`` when its trace ends.
        ValueError: for both ``checkpoints`` and ``budget``, for an unknown rule, and for levers that are none, unknown,
            or slices without a budget.
    """
    check_rule(checkpoints)
    if checkpoints is None and budget is None:
        checkpoints = KNEE
    request = Request(
        budget,
        checkpoints=checkpoints,
        planner=planner,
        time_limit_s=time_limit_s,
        options=options or {},
        levers=checked_levers(levers, checkpoints),
    ).check("gradients")
    if tf.executing_eagerly():
        raise UnsupportedStep(
            "remat.tensorflow.gradients was called in eager mode, where nothing can be planned; put @tf.function on "
            "the step that uses it, or use remat.tensorflow.recompute"
        )
    refuse_replicas("remat.tensorflow.gradients", "use remat.tensorflow.GradientTape in the function of strategy.run")
    graph = tf.compat.v1.get_default_graph()
    forward_ends = len(graph.get_operations())
    found: list[Any] = _plain_gradients(ys, xs, grad_ys=grad_ys, **kwargs)
    if all(gradient is None for gradient in found):
        return found
    asked = _Asked(request, batch_size, forward_ends)
    if isinstance(graph, _private.FuncGraph):
        _plan_when_traced(graph, asked)
    else:
        part = SessionGraph(graph, [*tf.nest.flatten(ys), *tf.nest.flatten(found, expand_composites=True)])
        asked.carry_out(part)
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


@dataclass(frozen=True)
class _Asked:
    """What one call asked for, or several calls in one function."""

    request: Request
    batch_size: int | None
    forward_ends: int

    def together_with(self, other: _Asked) -> _Asked:
        """Both calls as one: the function is planned once, however many gradients it takes.

        Raises:
            UnsupportedStep: where they differ in more than in the tensors to keep.
        """
        kept, more = self.request.checkpoints, other.request.checkpoints
        if isinstance(kept, list | tuple) and isinstance(more, list | tuple):
            kept = more = [*kept, *more]
        others_request = replace(other.request, checkpoints=None)
        if (
            type(kept) is not type(more)
            or (isinstance(kept, str) and kept != more)
            or replace(self.request, checkpoints=None) != others_request
            or self.batch_size != other.batch_size
        ):
            raise UnsupportedStep(
                "gradients was called twice in one function with different checkpoints or budgets; the function is "
                "planned as a whole, so give both calls the same"
            )
        return replace(self, request=replace(others_request, checkpoints=kept))

    def carry_out(self, graph: Any) -> None:
        """Plan and rewrite a function whose trace is about to end, or a part of a TensorFlow 1 graph."""
        is_function = isinstance(graph, _private.FuncGraph)
        in_xla = is_function and _private.in_xla_context(graph)
        function = FunctionToPlan(
            graph, batch_sizes(graph, self.batch_size), in_xla=in_xla, forward_ends=self.forward_ends
        )
        plan = rewrite(function, self.request).plan
        _last_plan[:] = [plan]
        if is_function and self.request.budget is not None:
            watch_first_run(graph, plan)


def _plan_when_traced(graph: Any, asked: _Asked) -> None:
    earlier: _Asked | None = getattr(graph, "_remat_asked", None)
    graph._remat_asked = asked if earlier is None else earlier.together_with(asked)
    if earlier is None:
        call_when_traced(lambda succeeded: graph._remat_asked.carry_out(graph) if succeeded else None)
