"""``value_and_grad``: the value and the gradients of a function, its batch cut into pieces, each within a budget.

What must hold for the result to be that of the whole batch: sums are accumulated and divided once, by the denominator
that the whole batch has; a piece with fewer samples counts by its real size; the accumulator is float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle

from remat.core.errors import UnsupportedStep
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.fit.request import Request
from remat.micro_batches.cut import batch_places, check_count, count_samples, cut
from remat.micro_batches.reduce import MEAN, RATIO, check_reduction, sum_and_denominator, trained_denominator
from remat.paddle import _private
from remat.paddle.captured import Captured
from remat.paddle.recompute import layers_of
from remat.paddle.tensors import closed_over, tensors_in


def value_and_grad(
    fn: Callable[..., Any],
    parameters: Sequence[Any] | None = None,
    *,
    micro_batches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: str = "mean",
    budget: int | str | None = None,
    plan: Plan | None = None,
    resident_bytes: int = 0,
    planner: str = "auto",
    time_limit_s: float | None = None,
    device: str | None = None,
    **options: Any,
) -> ValueAndGrad:
    """A function that computes the value and the gradients of ``fn``, one micro-batch in memory at a time.

    ::

        step = remat.paddle.value_and_grad(loss_fn, net.parameters(), micro_batches=4, budget="60%")
        loss, gradients = step(x, y)

    Gradients are summed in float32 at least and divided once, so unequal micro-batches and unequal denominators make no
    difference. ``grad`` of the parameters is left alone. A batch normalisation sees one micro-batch only, which changes
    it; recomputation does not.

    Args:
        fn: takes the arguments of one micro-batch, returns what ``reduction`` says.
        parameters: what to differentiate by; None takes those of the layers that ``fn`` is, is a method of or closes
            over, and the arguments that take a gradient.
        micro_batches: how many pieces, cut as ``numpy.array_split`` cuts.
        batch_argnums: positional arguments whose first axis is the batch; None means all that are tensors and take no
            gradient.
        reduction: what ``fn`` returns. "mean": one number, a mean over the samples. "sum": one number, a sum over them.
            "ratio": a pair (sum, denominator); the result is the sums' total over the denominators' total, 0 where that
            is 0, and the denominator is not differentiated.
        budget: peak bytes of a piece, everything counted that it reads or makes: an int, "4GiB", or "60%" of the plain
            step of the whole batch. With a budget or a plan ``fn`` is captured by ``paddle.jit.to_static``.
        plan: a plan made earlier for the same piece, loaded from a file say, instead of a budget.
        resident_bytes: memory that counts although ``fn`` does not touch it: the optimizer's state, say.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning.
        device: profile for the predicted times.
        **options: passed on to the planner.

    Returns:
        A callable. It returns the detached value and a list with one gradient for each parameter, None where ``fn``
        does not depend on it. ``plan`` is the newest plan.

    Raises:
        ValueError: for a count below 1, an unknown reduction, or both a budget and a plan.
        InvalidBudget: for a budget that cannot be read.
    """
    request = Request(budget, plan, planner=planner, time_limit_s=time_limit_s, options=options)
    request.check("remat.paddle.value_and_grad", takes_auto=False)
    return ValueAndGrad(
        fn,
        parameters,
        check_count(micro_batches),
        batch_argnums,
        check_reduction(reduction),
        request,
        resident_bytes,
        device,
    )


class ValueAndGrad:
    """What ``value_and_grad`` returns.

    Attributes:
        plans: one for each size of piece, the newest last.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        parameters: Sequence[Any] | None,
        count: int,
        batch_argnums: int | Sequence[int] | None,
        reduction: str,
        request: Request,
        resident_bytes: int,
        device: str | None,
    ) -> None:
        self._fn = fn
        self._parameters = None if parameters is None else list(parameters)
        self._count = count
        self._batch_argnums = batch_argnums
        self._reduction = reduction
        self._request = request
        self._whole_bytes: dict[Any, int] = {}
        self._resident_bytes = resident_bytes
        self._device = device
        self._captured: Captured | None = None
        self._run: Callable[..., Any] = fn
        if request.plans:
            self._captured = Captured(fn, request, resident_bytes, device)
            self._run = self._captured

    @property
    def plans(self) -> list[Any]:
        """The plans made so far, one for each size of piece."""
        return [] if self._captured is None else self._captured.plans

    @property
    def plan(self) -> Any:
        """The newest plan; None before the first call, or without a budget."""
        return self.plans[-1] if self.plans else None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """The value and the gradients of a batch.

        Raises:
            UnsupportedStep: where the arguments do not agree on the size of the batch, or ``fn`` returns something else
                than the reduction says.
            InfeasibleBudget: at the first call, if no schedule fits; it names the smallest budget.
        """
        parameters = self._differentiated(args)
        places, samples = self._batch_of(args)
        if self._captured is not None and self._count > 1 and "%" in str(self._request.budget):
            self._captured.share_of_bytes = self._plain_bytes(args, kwargs)
        total = _Total(self._reduction, samples, len(parameters))
        pieces = [(group.size, start) for group in cut(samples, self._count) for start in group.starts]
        for size, start in pieces:
            is_whole = len(pieces) == 1
            piece = [a if is_whole or n not in places else a[start : start + size] for n, a in enumerate(args)]
            value, denominator = sum_and_denominator(self._run(*piece, **kwargs), self._reduction)
            if value.size != 1:
                raise UnsupportedStep(
                    f"{getattr(self._fn, '__name__', type(self._fn).__name__)!r} returns a tensor of the shape "
                    f"{list(value.shape)}, and a loss is one number; return its mean or its sum"
                )
            if isinstance(denominator, paddle.Tensor) and not denominator.stop_gradient:
                raise trained_denominator("a parameter")
            gradients = self._gradients(value, parameters, args)
            total.add(value.detach(), denominator, size, gradients)
            del value, gradients
        return total.finish(parameters)

    def _differentiated(self, args: Sequence[Any]) -> list[Any]:
        if self._parameters is not None:
            return self._parameters
        layers = layers_of(self._fn, args)
        found = [p for layer in layers for p in layer.parameters()] + tensors_in((args, closed_over(self._fn)))
        by_id = {id(tensor): tensor for tensor in found if not tensor.stop_gradient}
        if not by_id:
            raise UnsupportedStep(
                f"no parameter was found that {getattr(self._fn, '__name__', 'the function')!r} uses; name them: "
                "value_and_grad(fn, net.parameters())"
            )
        return list(by_id.values())

    def _batch_of(self, args: Sequence[Any]) -> tuple[tuple[int, ...], int]:
        """Positions of the arguments that hold the batch, and its samples."""
        tensors = [n for n, arg in enumerate(args) if isinstance(arg, paddle.Tensor) and arg.stop_gradient]
        places = batch_places(self._batch_argnums, len(args), tensors)
        if self._count == 1 and not places:
            return (), 1
        shapes = [tuple(getattr(args[place], "shape", ())) for place in places]
        if self._count == 1:
            return places, next((shape[0] for shape in shapes if shape), 1)
        samples = count_samples(shapes, [f"argument {place}" for place in places])
        assert samples is not None, "every shape is known"
        return places, samples

    def _gradients(self, value: Any, parameters: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The gradients of one piece; ``grad`` of every parameter is as before.

        ``paddle.grad`` would hold what a recomputation makes until its end; ``backward`` lets it go.
        """
        others = (p for layer in layers_of(self._fn, args) for p in layer.parameters())
        before = {id(p): (p, _private.gradient_of(p)) for p in (*parameters, *others) if not p.stop_gradient}
        for parameter, _ in before.values():
            parameter.grad = None
        try:
            value.backward()
            return [_private.gradient_of(parameter) for parameter in parameters]
        finally:
            for parameter, gradient in before.values():
                parameter.grad = gradient

    def _plain_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The plain peak of the whole batch, which "60%" is a share of."""
        key = tuple(tuple(one.shape) for one in tensors_in((args, kwargs)))
        if key not in self._whole_bytes:
            graph = Captured(self._fn, Request(), device=self._device).program_of(*args, **kwargs).graph
            self._whole_bytes[key] = simulate(graph, graph.plain_schedule).peak_bytes + self._resident_bytes
        return self._whole_bytes[key]


class _Total:
    """Sums over the pieces of one batch: the value, its denominator, the gradients."""

    def __init__(self, reduction: str, samples: int, parameters: int) -> None:
        self._reduction = reduction
        self._samples = samples
        self._dtype: Any = None
        self._value: Any = None
        self._denominator: Any = None
        self._gradients: list[Any] = [None] * parameters

    def add(self, value: Any, denominator: Any, size: int, gradients: Sequence[Any]) -> None:
        """One more piece."""
        weight = size / self._samples if self._reduction == MEAN else 1.0
        self._dtype = value.dtype
        if self._reduction == RATIO:
            wide = _wide(paddle.to_tensor(denominator)).detach()
            self._denominator = wide if self._denominator is None else self._denominator + wide
        self._value = _sum(self._value, value, weight)
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                self._gradients[place] = _sum(self._gradients[place], gradient, weight)

    def finish(self, parameters: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Divide once."""
        factor = None
        if self._reduction == RATIO:
            # A batch that is all masked has nothing to learn from: 0 / 0 is 0.
            is_empty = self._denominator == 0
            one = paddle.ones_like(self._denominator)
            factor = paddle.where(
                is_empty, paddle.zeros_like(one), one / paddle.where(is_empty, one, self._denominator)
            )
        found = []
        for gradient, parameter in zip(self._gradients, parameters, strict=True):
            if gradient is not None and factor is not None:
                gradient = gradient * factor.astype(gradient.dtype)
            found.append(gradient if gradient is None else gradient.astype(parameter.dtype))
        value = self._value if factor is None else self._value * factor.astype(self._value.dtype)
        return value.astype(self._dtype), found


def _wide(tensor: Any) -> Any:
    """At least float32: a sum of many pieces in half precision drifts, and stalls."""
    return tensor if tensor.dtype in (paddle.float32, paddle.float64) else tensor.astype("float32")


def _sum(total: Any, more: Any, weight: float) -> Any:
    wide = _wide(more)
    wide = wide if weight == 1.0 else wide * weight
    return wide if total is None else total.add_(wide)
