"""``value_and_grad``: exact gradient accumulation over micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.fit.request import Request
from remat.micro_batches.options import JointPlan
from remat.tensorflow import _private
from remat.tensorflow.micro_batches.choose import TIMED_PIECES, OnBody, Pieces, joint_plan, outside
from remat.tensorflow.micro_batches.loop import batch_size_of, check_count
from remat.tensorflow.micro_batches.objective import Batch, Gradients, Objective, accumulated
from remat.tensorflow.planned import candidate_of
from remat.tensorflow.trace.func_graph import FunctionToPlan

_BATCH_NORMALIZATIONS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "_FusedBatchNormEx")
REDUCTIONS = ("mean", "sum", "ratio")


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
            one iteration; with ``micro_batches="auto"``, of the batch in one piece.
        planner: a planner's name.
        time_limit_s: wall seconds that an anytime planner may use.
        options: passed on to the planner.

    Returns:
        A function of ``fn``'s arguments. It returns the value, a scalar, and a list with one gradient per variable, of
        the variable's shape and type: None where ``fn`` does not depend on it. With one micro-batch a sparse gradient
        stays ``tf.IndexedSlices``; otherwise it is dense. Its attribute ``joint_plan`` is what "auto" chose last.

    Raises:
        ValueError: for a reduction or a number of micro-batches that does not exist.
        UnsupportedStep: by the function returned, where an argument cannot be split, the batch has fewer samples than
            micro-batches, or ``fn`` returns something else than the reduction says.
        InfeasibleBudget: by the function returned, where no schedule keeps the budget.
    """
    fixed_count = None if micro_batches == "auto" else check_count(micro_batches)
    if fixed_count is None and budget is None:
        raise ValueError("micro_batches='auto' chooses what a budget costs least with; give one, for example \"4GiB\"")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, not {reduction!r}")
    planning = dict(options, budget=budget, planner=planner, time_limit_s=time_limit_s)
    if budget is None and options:
        raise ValueError(f"{', '.join(options)}: an option of the planner, which needs a budget=")

    chosen: dict[Any, JointPlan] = {}

    def wrapped(*args: Any, **kwargs: Any) -> tuple[tf.Tensor, Gradients]:
        batch = Batch.of(args, batch_argnums)
        sources = list(variables) if variables is not None else _variables_read(fn, args, kwargs)
        objective = Objective(fn, reduction, sources, planning if budget is not None else None)
        count = fixed_count
        if count is None:
            if tf.executing_eagerly():
                raise UnsupportedStep(
                    "micro_batches='auto' plans a function, and this one was called outside tf.function; put "
                    "@tf.function on the step that uses it"
                )
            joint = chosen.get(batch.signature) or _choose(objective, batch, kwargs)
            chosen[batch.signature] = wrapped.joint_plan = joint  # type: ignore[attr-defined]
            count = joint.micro_batches
            objective = dataclasses.replace(objective, planning=planning | {"budget": joint.budget_bytes})
        if count == 1:
            return objective.whole(args, kwargs)
        return accumulated(objective, batch, count, kwargs)

    wrapped.joint_plan = None  # type: ignore[attr-defined]
    return wrapped


@_private.left_alone_by_autograph
def _choose(objective: Objective, batch: Batch, kwargs: dict[str, Any]) -> JointPlan:
    """The joint plan of a function that is being traced, made aside and printed."""
    batch_size = batch_size_of(batch.leaves, batch.names)
    unknown = [name for leaf, name in zip(batch.leaves, batch.names, strict=True) if not leaf.shape.is_fully_defined()]
    if unknown:
        raise UnsupportedStep(
            f"micro_batches='auto' chooses for one size, and the shape of {unknown[0]} is not known while the function "
            "is traced; leave the input_signature out, or give a number of micro_batches"
        )
    in_xla = _private.in_xla_context(tf.compat.v1.get_default_graph())
    assert objective.planning is not None
    names = ("budget", "planner", "time_limit_s")
    request = Request(
        **{name: objective.planning[name] for name in names},
        options={name: value for name, value in objective.planning.items() if name not in names},
    )
    # Only what the user wrote is AutoGraph's business.
    fn = _private.converted_by_autograph(objective.fn, always=True)
    plain = dataclasses.replace(objective, fn=fn, planning=None)
    everything = (batch.args, kwargs)
    flat = tf.nest.flatten(everything)
    # Tensors of the function that is being traced exist there only: aside, others stand for them.
    split = [n for n, value in enumerate(flat) if any(value is leaf for leaf in batch.leaves)]
    whole_args = [
        n
        for n, value in enumerate(flat)
        if n not in split and isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value)
    ]

    def rebuilt(values: Mapping[int, tf.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tf.nest.pack_sequence_as(everything, [values.get(n, value) for n, value in enumerate(flat)])  # type: ignore[no-any-return]

    def in_one_piece(*values: tf.Tensor) -> Any:
        args, options = rebuilt(dict(zip(split + whole_args, values, strict=True)))
        return plain.whole(args, options)

    def pieces() -> Pieces:
        def run(leaves: list[tf.Tensor], on_body: OnBody) -> Any:
            others = {n: tf.zeros(flat[n].shape, flat[n].dtype) for n in whole_args}
            args, options = rebuilt(dict(zip(split, leaves, strict=True)) | others)
            cut = dataclasses.replace(batch, args=args, leaves=leaves)
            value, gradients = accumulated(plain, cut, TIMED_PIECES, options, on_body)
            return [value, *(gradient for gradient in gradients if gradient is not None)]

        leaves = [tf.zeros(flat[n].shape, flat[n].dtype) for n in split]
        return Pieces(run, leaves, [tuple(leaf.shape) for leaf in leaves], in_xla)

    def chosen() -> JointPlan:
        specs = [tf.TensorSpec(flat[n].shape, flat[n].dtype) for n in split + whole_args]
        function = tf.function(in_one_piece, jit_compile=in_xla, autograph=False).get_concrete_function(*specs)
        coupled = [
            op.name
            for op in function.graph.get_operations()
            if op.type in _BATCH_NORMALIZATIONS and op.get_attr("is_training")
        ]
        return joint_plan(
            candidate_of(FunctionToPlan(function.graph, in_xla=in_xla)), pieces, batch_size, request, coupled
        )

    joint = outside(chosen)
    print(joint, flush=True)
    return joint


def _variables_read(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tf.Variable]:
    found: list[tf.Variable] = []

    def read() -> None:
        with tf.GradientTape() as tape:
            fn(*args, **kwargs)
        found.extend(tape.watched_variables())

    tf.function(read).get_concrete_function()  # Traced, not run: what the function does besides happens later.
    if not found:
        raise UnsupportedStep(
            "the function reads no trainable variable, so there is nothing to differentiate by; give variables="
        )
    return found
