"""``value_and_grad``: exact gradient accumulation over micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.fit.request import Request
from remat.micro_batches.cut import check_count_or_auto
from remat.micro_batches.options import MicroBatchChoice
from remat.micro_batches.reduce import check_reduction
from remat.tensorflow import _private
from remat.tensorflow.api.checkpoints import checked_levers
from remat.tensorflow.micro_batches.choose import (
    TIMED_PIECES,
    OnBody,
    Pieces,
    bytes_of_share,
    choose_count,
    outside,
)
from remat.tensorflow.micro_batches.loop import batch_size_of
from remat.tensorflow.micro_batches.objective import Batch, Gradients, Objective, accumulated
from remat.tensorflow.planned import PlannableFunction
from remat.tensorflow.replicas import refuse_replicas
from remat.tensorflow.trace.func_graph import FunctionToPlan

_BATCH_NORMALIZATIONS: Final = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "_FusedBatchNormEx")
"""Operations whose training form couples the samples of a batch. Layers made of other operations are not recognised."""


def value_and_grad(
    fn: Callable[..., Any],
    variables: Sequence[tf.Variable] | None = None,
    *,
    micro_batches: int | str = 1,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: str = "mean",
    budget: int | str | None = None,
    planner: str = "auto",
    time_limit_s: float | None = None,
    levers: Sequence[str] = ("recompute",),
    **options: Any,
) -> Callable[..., tuple[tf.Tensor, Gradients]]:
    """A function that computes ``fn`` and its gradients micro-batch by micro-batch, as if in one piece.

    Works inside ``tf.function``, with and without XLA, and eagerly. Gradients are summed in float32 (float64 where the
    variable is) and divided once, so unequal micro-batches and unequal denominators make no difference. Where
    ``micro_batches`` does not divide the batch of B samples, the first B % micro_batches pieces have one sample more.
    What couples the samples of a batch, such as BatchNormalization or a contrastive loss, sees a micro-batch only.

    Args:
        fn: takes the arguments of one micro-batch, returns what ``reduction`` says; anything that it does besides
            (dropout, state) happens once per micro-batch.
        variables: what to differentiate by; None takes the trainable variables that ``fn`` reads, found by one more
            trace.
        micro_batches: how many pieces; 1 computes in one piece. "auto" chooses, when the function is traced, what keeps
            the budget at the least predicted time, of which it prints a line per possibility: ``fn`` is traced aside
            and timed on zeros, and the variables that it writes get their values back. The shapes have to be known.
            Where the function has batch-normalizing operations, as few pieces as fit.
        batch_argnums: positions of the arguments that are split along their first dimension, nested structures in all
            their tensors; None splits every positional argument. Keyword arguments are passed on whole.
        reduction: what ``fn`` returns. "mean": one number, a mean over the samples. "sum": one number, a sum over them.
            "ratio": a pair (sum, denominator), for example of a loss per token; the result is the sums' total over the
            denominators' total, 0 where that is 0, and the denominator is not differentiated.
        budget: peak device bytes of one iteration, everything counted, that recomputation has to keep, inside
            ``tf.function``: as ``GradientTape`` takes it. None plans nothing. A percentage is one of the plain peak of
            the batch in one piece, whatever the number of micro-batches; the shapes then have to be known.
        planner: a planner's name.
        time_limit_s: wall seconds that an anytime planner may use.
        levers: as in ``GradientTape``; with micro-batches, for each of them.
        options: passed on to the planner.

    Returns:
        A function of ``fn``'s arguments. It returns the value, a scalar, and a list with one gradient per variable, of
        the variable's shape and type: None where ``fn`` does not depend on it. A sparse gradient (of an embedding)
        stays ``tf.IndexedSlices``, the rows of one micro-batch behind those of another; it is dense where it is called
        outside of ``tf.function`` with several micro-batches. Its attribute ``choice`` is what "auto" chose last (and
        so is ``joint_plan``, the attribute's earlier name).

    Raises:
        ValueError: for a reduction or a number of micro-batches that does not exist, and for levers that are none,
            unknown, or given without a budget.
        UnsupportedStep: by the function returned, where an argument cannot be split, the batch has fewer samples than
            micro-batches, or ``fn`` returns something else than the reduction says.
        InfeasibleBudget: by the function returned, where no schedule keeps the budget.
    """
    fixed_count = check_count_or_auto(micro_batches, budget)
    check_reduction(reduction)
    if budget is None and options:
        raise ValueError(f"{', '.join(options)}: an option of the planner, which needs a budget=")
    request = Request(
        budget, planner=planner, time_limit_s=time_limit_s, options=options, levers=checked_levers(levers, None)
    )
    request.check("remat.tensorflow.value_and_grad")
    if budget is None and request.levers != ("recompute",):
        raise ValueError(f"levers={request.levers!r} say how a budget is kept, and there is none; give budget=")

    budgets: dict[Any, int] = {}
    choices: dict[Any, MicroBatchChoice] = {}

    @_private.left_alone_by_autograph
    def wrapped(*args: Any, **kwargs: Any) -> tuple[tf.Tensor, Gradients]:
        # Only what the user wrote is AutoGraph's business.
        converted = _private.converted_by_autograph(fn)
        batch = Batch.of(args, batch_argnums)
        sources = list(variables) if variables is not None else _variables_read(converted, args, kwargs)
        objective = Objective(converted, reduction, sources, request)
        count = fixed_count
        if count is None:
            if tf.executing_eagerly():
                raise UnsupportedStep(
                    "micro_batches='auto' plans a function, and this one was called outside tf.function; put "
                    "@tf.function on the step that uses it"
                )
            choice = choices.get(batch.signature) or _Aside(objective, batch, kwargs).choice()
            choices[batch.signature] = wrapped.choice = wrapped.joint_plan = choice  # type: ignore[attr-defined]
            count, budget_bytes = choice.micro_batches, choice.budget_bytes
            objective = dataclasses.replace(objective, request=dataclasses.replace(request, budget=budget_bytes))
        elif count > 1 and "%" in str(budget) and not tf.executing_eagerly():
            if batch.signature not in budgets:
                budgets[batch.signature] = _Aside(objective, batch, kwargs).budget_bytes()
            in_bytes = dataclasses.replace(request, budget=budgets[batch.signature])
            objective = dataclasses.replace(objective, request=in_bytes)
        if count == 1:
            return objective.whole(args, kwargs)
        return accumulated(objective, batch, count, kwargs)

    wrapped.choice = wrapped.joint_plan = None  # type: ignore[attr-defined]
    return wrapped


class _Aside:
    """A function that is being traced, traced once more aside: in one piece, or in micro-batches.

    Args:
        objective: the function, and how to plan it.
        batch: what is cut.
        kwargs: keyword arguments, the same for every micro-batch.
    """

    def __init__(self, objective: Objective, batch: Batch, kwargs: dict[str, Any]) -> None:
        refuse_replicas("micro_batches='auto' or a share such as \"60%\"", "give numbers of micro_batches and of bytes")
        self._batch = batch
        self._request = objective.request
        self._in_xla = _private.in_xla_context(tf.compat.v1.get_default_graph())
        self._plain = dataclasses.replace(objective, request=Request())
        self._everything = (batch.args, kwargs)
        self._flat = tf.nest.flatten(self._everything)
        # Tensors of the function that is being traced exist there only: aside, others stand for them.
        self._split = [n for n, value in enumerate(self._flat) if any(value is leaf for leaf in batch.leaves)]
        self._passed_whole = [
            n
            for n, value in enumerate(self._flat)
            if n not in self._split and isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value)
        ]
        for leaf, name in zip(batch.leaves, batch.names, strict=True):
            if not leaf.shape.is_fully_defined():
                raise UnsupportedStep(
                    f"micro_batches='auto' and shares such as \"60%\" are for one size, and the shape of {name} is not "
                    "known while the function is traced; leave the input_signature out, or give numbers of "
                    "micro_batches and of bytes"
                )

    def budget_bytes(self) -> int:
        """The budget in bytes, a share being one of the plain peak of the batch in one piece."""
        assert self._request.budget is not None
        return bytes_of_share(self._request.budget, outside(lambda: PlannableFunction(self._in_one_piece())))

    def choice(self) -> MicroBatchChoice:
        """The number of micro-batches that costs least, which is printed."""
        batch_size = batch_size_of(self._batch.leaves, self._batch.names)
        assert isinstance(batch_size, int), "every shape is known"

        def chosen() -> MicroBatchChoice:
            function = self._in_one_piece()
            coupled = [
                op.name
                for op in function.func_graph.get_operations()
                if op.type in _BATCH_NORMALIZATIONS and op.get_attr("is_training")
            ]
            return choose_count(PlannableFunction(function), self._pieces, batch_size, self._request, coupled)

        choice = outside(chosen)
        print(choice, flush=True)
        return choice

    def _in_one_piece(self) -> FunctionToPlan:
        def whole(*values: tf.Tensor) -> Any:
            return self._plain.whole(*self._with(dict(zip(self._split + self._passed_whole, values, strict=True))))

        specs = [tf.TensorSpec(self._flat[n].shape, self._flat[n].dtype) for n in self._split + self._passed_whole]
        function = tf.function(whole, jit_compile=self._in_xla, autograph=False).get_concrete_function(*specs)
        return FunctionToPlan(function.graph, in_xla=self._in_xla)

    def _pieces(self) -> Pieces:
        def run(leaves: list[tf.Tensor], on_body: OnBody) -> Any:
            others = {n: tf.zeros(self._flat[n].shape, self._flat[n].dtype) for n in self._passed_whole}
            args, kwargs = self._with(dict(zip(self._split, leaves, strict=True)) | others)
            batch = dataclasses.replace(self._batch, args=args, leaves=leaves)
            value, gradients = accumulated(self._plain, batch, TIMED_PIECES, kwargs, on_body)
            return [value, *(gradient for gradient in gradients if gradient is not None)]

        leaves = [tf.zeros(self._flat[n].shape, self._flat[n].dtype) for n in self._split]
        return Pieces(run, leaves, [tuple(leaf.shape) for leaf in leaves], self._in_xla)

    def _with(self, values: Mapping[int, tf.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors in some places."""
        flat = [values.get(n, value) for n, value in enumerate(self._flat)]
        return tf.nest.pack_sequence_as(self._everything, flat)  # type: ignore[no-any-return]


def _variables_read(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tf.Variable]:
    found: list[tf.Variable] = []

    def read() -> None:
        with tf.GradientTape() as tape:
            fn(*args, **kwargs)
        found.extend(tape.watched_variables())

    # Traced, not run: what the function does besides happens later.
    tf.function(read, autograph=False).get_concrete_function()
    if not found:
        raise UnsupportedStep(
            "the function reads no trainable variable, so there is nothing to differentiate by; give variables="
        )
    return found
