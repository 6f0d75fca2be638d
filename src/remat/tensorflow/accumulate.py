"""``value_and_grad``: exact gradient accumulation over micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from remat.errors import UnsupportedStep
from remat.joint_plan import JointPlan
from remat.tensorflow import _private
from remat.tensorflow.gradient_tape import GradientTape
from remat.tensorflow.joint import TIMED_PIECES, OnBody, Pieces, joint_plan, outside
from remat.tensorflow.micro_batches import (
    Carried,
    Size,
    accumulator_dtype,
    added,
    batch_size_of,
    check_count,
    empty_accumulators,
    for_each_micro_batch,
)
from remat.tensorflow.resident import carried_inputs
from remat.tensorflow.rewrite import Candidate, Request

_BATCH_NORMALIZATIONS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "_FusedBatchNormEx")
REDUCTIONS = ("mean", "sum", "ratio")
Gradients = list[Any]


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
        batch = _Batch.of(args, batch_argnums)
        sources = list(variables) if variables is not None else _variables_read(fn, args, kwargs)
        objective = _Objective(fn, reduction, sources, planning if budget is not None else None)
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
        return _accumulated(objective, batch, count, kwargs)

    wrapped.joint_plan = None  # type: ignore[attr-defined]
    return wrapped


class _LoopTape(GradientTape):
    """A tape in the body of a loop, whose accumulators are handed from one iteration to the next."""

    def _carried(self, graph: _private.FuncGraph) -> frozenset[str]:
        return carried_inputs(graph)


@dataclass(frozen=True)
class _Batch:
    """The arguments of one call: the tensors to split, and how to put them back into their places."""

    args: tuple[Any, ...]
    positions: tuple[int, ...]
    leaves: list[tf.Tensor]
    names: list[str]

    @staticmethod
    def of(args: tuple[Any, ...], batch_argnums: int | Sequence[int] | None) -> _Batch:
        if batch_argnums is None:
            positions = tuple(range(len(args)))
        else:
            positions = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
        for position in positions:
            if not -len(args) <= position < len(args):
                raise UnsupportedStep(
                    f"batch_argnums={batch_argnums!r} names argument {position}, and the function got {len(args)} "
                    "positional arguments; what is batched must be passed by position"
                )
        positions = tuple(sorted({position % len(args) for position in positions}))
        args = tuple(_as_tensors(arg) if n in positions else arg for n, arg in enumerate(args))
        leaves, names = [], []
        for position in positions:
            flat = tf.nest.flatten(args[position])
            leaves += flat
            names += [
                f"argument {position}" if len(flat) == 1 else f"argument {position} (its tensor {number})"
                for number in range(len(flat))
            ]
        return _Batch(args, positions, leaves, names)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Shapes and types of what is split."""
        return tuple((tuple(leaf.shape), leaf.dtype) for leaf in self.leaves)

    def with_leaves(self, leaves: Sequence[tf.Tensor]) -> tuple[Any, ...]:
        rest = list(leaves)
        args = list(self.args)
        for position in self.positions:
            length = len(tf.nest.flatten(args[position]))
            args[position] = tf.nest.pack_sequence_as(args[position], rest[:length])
            rest = rest[length:]
        return tuple(args)


def _as_tensors(structure: Any) -> Any:
    composite = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)  # Refused later, by name.
    return tf.nest.map_structure(
        lambda leaf: leaf if isinstance(leaf, composite) else tf.convert_to_tensor(leaf), structure
    )


@dataclass(frozen=True)
class _Objective:
    """A loss function and what to make of what it returns."""

    fn: Callable[..., Any]
    reduction: str
    variables: list[Any]
    planning: dict[str, Any] | None

    @property
    def dtype(self) -> tf.DType:
        """The type that values are summed in."""
        wide = any(accumulator_dtype(v.dtype) in (tf.float64, tf.complex128) for v in self.variables)
        return tf.float64 if wide else tf.float32

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor | None]:
        """The value of ``fn``, and its denominator where it returns one."""
        result = self.fn(*args, **kwargs)
        pair = isinstance(result, tuple | list)
        if pair != (self.reduction == "ratio") or (pair and len(result) != 2):
            got = f"{len(result)} values" if pair else "one value"
            raise UnsupportedStep(
                f"with reduction={self.reduction!r} the function must return "
                f"{'a pair (sum, denominator)' if self.reduction == 'ratio' else 'one scalar'}, and it returned {got}"
            )
        value, denominator = (result[0], result[1]) if pair else (result, None)
        value = tf.convert_to_tensor(value)
        denominator = None if denominator is None else tf.stop_gradient(tf.cast(denominator, self.dtype))
        for part in (value, denominator):
            if part is not None and part.shape.rank != 0:
                raise UnsupportedStep(
                    f"the function returned a tensor of the shape {part.shape} where "
                    f"reduction={self.reduction!r} needs a scalar; reduce it inside the function"
                )
        return value, denominator

    def tape(self, kind: type[GradientTape] = GradientTape) -> Any:
        return tf.GradientTape() if self.planning is None else kind(**self.planning)

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tf.Tensor, Gradients]:
        with self.tape() as tape:
            value, denominator = self.call(args, kwargs)
            if denominator is not None:
                value = tf.math.divide_no_nan(value, tf.cast(denominator, value.dtype))
        return value, tape.gradient(value, self.variables)


@_private.left_alone_by_autograph
def _choose(objective: _Objective, batch: _Batch, kwargs: dict[str, Any]) -> JointPlan:
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
            value, gradients = _accumulated(plain, cut, TIMED_PIECES, options, on_body)
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
        return joint_plan(Candidate.of(function.graph, {}, in_xla), pieces, batch_size, request, coupled)

    joint = outside(chosen)
    print(joint, flush=True)
    return joint


def _accumulated(
    objective: _Objective, batch: _Batch, count: int, kwargs: dict[str, Any], on_body: OnBody | None = None
) -> tuple[tf.Tensor, Gradients]:
    batch_size = batch_size_of(batch.leaves, batch.names)
    if isinstance(batch_size, int):
        if batch_size < count:
            raise UnsupportedStep(
                f"a batch of {batch_size} samples cannot be split into {count} micro-batches; give a larger batch, or "
                f"at most micro_batches={batch_size}"
            )
    elif not _private.in_xla_context(tf.compat.v1.get_default_graph()):
        message = f"a batch of fewer samples cannot be split into {count} micro-batches"
        check = tf.debugging.assert_greater_equal(batch_size, count, message=message)
        with tf.control_dependencies([] if check is None else [check]):
            batch_size = tf.identity(batch_size)
    has_gradient = [False] * len(objective.variables)
    value_dtypes = []

    def body(leaves: list[tf.Tensor], size: Size, carried: Carried) -> Carried:
        if on_body is not None:
            on_body(batch.leaves, leaves)
        value_total, denominator_total, *totals = carried
        with objective.tape(_LoopTape) as tape:
            value, denominator = objective.call(batch.with_leaves(leaves), kwargs)
            value_dtypes.append(value.dtype)
            value = tf.cast(value, objective.dtype)
            if objective.reduction == "mean":
                value *= tf.cast(size, value.dtype) / tf.cast(batch_size, value.dtype)
        gradients = tape.gradient(value, objective.variables)
        for number, gradient in enumerate(gradients):
            has_gradient[number] |= gradient is not None
        if denominator is not None:
            denominator_total += denominator
        totals = [added(total, gradient) for total, gradient in zip(totals, gradients, strict=True)]
        return [value_total + value, denominator_total, *totals]

    zero = tf.zeros((), objective.dtype)
    initial = [zero, zero, *empty_accumulators(objective.variables)]
    value, denominator, *totals = for_each_micro_batch(batch.leaves, batch_size, count, body, initial)
    if objective.reduction == "ratio":
        value = tf.math.divide_no_nan(value, denominator)
        totals = [tf.math.divide_no_nan(total, tf.cast(denominator, total.dtype)) for total in totals]
    gradients = [
        tf.cast(total, variable.dtype) if has else None
        for total, variable, has in zip(totals, objective.variables, has_gradient, strict=True)
    ]
    return tf.cast(value, value_dtypes[0]), gradients


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
