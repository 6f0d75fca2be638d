"""``GradientTape``: a drop-in for ``tf.GradientTape`` that keeps a byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.core.plan import Plan
from remat.fit.request import WHOLE_STEP_LEVERS, Request
from remat.tensorflow import _private
from remat.tensorflow._traces import call_when_traced
from remat.tensorflow.api.checkpoints import check_rule, checked_levers
from remat.tensorflow.emit.emit import Rewritten
from remat.tensorflow.first_run import watch_first_run
from remat.tensorflow.planned import rewrite
from remat.tensorflow.replicas import Replica, check_can_be_planned, replica_here
from remat.tensorflow.trace.func_graph import FunctionToPlan
from remat.tensorflow.trace.sizes import batch_sizes


class GradientTape(tf.GradientTape):  # type: ignore[misc]
    """A ``tf.GradientTape`` for use inside ``tf.function`` whose step keeps a budget.

    TensorFlow's own tape writes the backward operations. When the trace of the function ends, the whole function
    (optimizer update included) is planned and rewritten in place: the same numbers, less memory, more time.

    Args:
        budget: peak device bytes of the function, everything counted: an int, "4GiB", "60%" of the plain peak, or
            "auto" for a GPU's memory less a margin.
        plan: a plan made earlier for the same function, instead of a budget.
        checkpoints: tensors to keep, everything else between them being recomputed where that is exact.
        planner: a planner's name.
        time_limit_s: wall seconds that an anytime planner may use.
        batch_size: the size of dimensions that are unknown while the function is traced.
        persistent: as in ``tf.GradientTape``.
        watch_accessed_variables: as in ``tf.GradientTape``.
        strict: raise an error, from the function's first call, where that took more than the budget by over 1 %; else
            this is logged as a warning. What it took is ``plan.measured_peak_bytes``, where the device has a counter.
        levers: what a plan may do. "recompute" runs operations again. "split" runs the widest part of the function that
            can be cut, the head of a language model say, slice by slice; then sums are taken in another order, and
            numbers differ by rounding; see docs/split.md. "update" runs each update of an optimizer in the function as
            soon as its gradient is final; the plan says what forbids it.
        **options: passed on to the planner.

    Attributes:
        plan: the plan in force, once the trace has ended; None before.

    Raises:
        UnsupportedStep: outside ``tf.function``, or for a loss that depends on none of the sources.
        InfeasibleBudget: when the trace ends, where no schedule fits; it names the smallest budget.
        PlanMismatch: with ``strict``, as said there.
        ValueError: unless exactly one of ``budget``, ``plan`` and ``checkpoints`` is given.
    """

    def __init__(
        self,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
        *,
        budget: int | str | None = None,
        plan: Plan | None = None,
        checkpoints: Sequence[tf.Tensor] | None = None,
        planner: str = "auto",
        time_limit_s: float | None = None,
        batch_size: int | None = None,
        strict: bool = False,
        levers: Sequence[str] = ("recompute",),
        **options: Any,
    ) -> None:
        super().__init__(persistent=persistent, watch_accessed_variables=watch_accessed_variables)
        given = [
            name
            for name, value in (("budget", budget), ("plan", plan), ("checkpoints", checkpoints))
            if value is not None
        ]
        if len(given) != 1:
            raise ValueError(
                f"GradientTape takes exactly one of budget=, plan= and checkpoints=, not {given or 'none of them'}"
            )
        check_rule(checkpoints)
        request = Request(
            budget, plan, checkpoints, planner, time_limit_s, options, levers=checked_levers(levers, checkpoints)
        )
        self._request = request.check("GradientTape", takes_levers=WHOLE_STEP_LEVERS)
        self._batch_size = batch_size
        self._strict = strict
        self._func_graph: _private.FuncGraph | None = None
        self._in_xla = False
        self._replica: Replica | None = None
        self._rewritten: Rewritten | None = None
        self._forward_ends: int | None = None
        self._traced = False
        self._known_outputs: list[tf.Tensor] = []

    def __enter__(self) -> GradientTape:
        if tf.executing_eagerly():
            raise UnsupportedStep(
                "remat.tensorflow.GradientTape was entered outside tf.function, where operations run at once and "
                "nothing can be planned; put @tf.function on the step that uses it"
            )
        graph = tf.compat.v1.get_default_graph()
        if not isinstance(graph, _private.FuncGraph):
            raise UnsupportedStep(
                "remat.tensorflow.GradientTape was entered in a TensorFlow 1 graph; put the step into a tf.function"
            )
        self._func_graph = graph
        self._in_xla = _private.in_xla_context(graph)
        self._replica = replica_here("remat.tensorflow.GradientTape")
        check_can_be_planned(self._replica, "GradientTape", self._request, in_xla=self._in_xla)
        call_when_traced(self._finish)
        super().__enter__()
        return self

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As in ``tf.GradientTape``; refuses a target that depends on none of the sources."""
        if self._func_graph is not None and self._forward_ends is None:
            self._forward_ends = len(self._func_graph.get_operations())
        gradients = super().gradient(target, sources, *args, **kwargs)
        if all(gradient is None for gradient in tf.nest.flatten(gradients)):
            names = ", ".join(str(getattr(s, "name", s)) for s in tf.nest.flatten(sources)[:3])
            raise UnsupportedStep(
                f"the target {getattr(target, 'name', target)} depends on none of the {len(tf.nest.flatten(sources))} "
                f"sources ({names}, ...), so there is no backward pass to plan; compute the loss from the variables "
                "inside the tape"
            )
        self._known_outputs += [t for t in tf.nest.flatten([target, gradients]) if isinstance(t, tf.Tensor)]
        return gradients

    @property
    def plan(self) -> Plan | None:
        """The plan in force.

        Read inside the function, after ``gradient``, it plans at once: what the function does afterwards is then not
        counted. Before ``gradient`` it is None.
        """
        if self._rewritten is None and self._known_outputs and not self._traced:
            self._rewrite(self._known_outputs)
        return self._rewritten.plan if self._rewritten is not None else None

    @property
    def recomputed_operations(self) -> tuple[str, ...]:
        """Names of the recomputations that were written into the function, in schedule order."""
        return tuple(copy.name for copy in self._rewritten.copies) if self._rewritten is not None else ()

    def _finish(self, succeeded: bool) -> None:
        self._traced = True
        if succeeded and self._known_outputs and self._rewritten is None:
            self._rewrite(None)
        graph = self._func_graph
        if succeeded and self._rewritten is not None and graph is not None and not self._carried(graph):
            watch_first_run(graph, self._rewritten.plan, strict=self._strict, replica=self._replica)

    def _rewrite(self, outputs: Sequence[tf.Tensor] | None) -> None:
        graph = self._func_graph
        assert graph is not None
        function = FunctionToPlan(
            graph,
            batch_sizes(graph, self._batch_size),
            in_xla=self._in_xla,
            outputs=outputs,
            forward_ends=self._forward_ends,
            carried=self._carried(graph),
            replica=self._replica,
        )
        self._rewritten = rewrite(function, self._request)

    def _carried(self, graph: _private.FuncGraph) -> frozenset[str]:
        """Names of the function's inputs that no caller keeps."""
        return frozenset()
