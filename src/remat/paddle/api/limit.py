"""``limit_memory``: a layer or a ``paddle.Model`` within a byte budget, in whatever loop trains it."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import Any, Final

import paddle

from remat.core.errors import UnsupportedStep
from remat.fit.first_step import OnChange, replans
from remat.fit.request import Request
from remat.paddle.candidate import ProgramPlan
from remat.paddle.captured import CannotCapture, Captured
from remat.paddle.first_step import FirstStep
from remat.paddle.layerwise import Layerwise
from remat.paddle.tensors import bytes_of, tensors_in

_NAME: Final = "remat_limit"
"""Where what replaces a layer's ``forward`` holds the limit. A limit holds the layer, so that in a dictionary of weak
keys both would live as long as the program."""


def limit_memory(
    layer_or_model: Any,
    budget: int | str = "60%",
    *,
    resident_bytes: int = 0,
    planner: str = "auto",
    time_limit_s: float | None = None,
    device: str | None = None,
    on_change: OnChange = "replan",
    strict: bool = False,
    **options: Any,
) -> Any:
    """Train a layer, or a ``paddle.Model``, within a byte budget and with the same numbers.

    One line; the loop, ``fit``, ``DataParallel`` and the optimizer stay as they are::

        net = remat.paddle.limit_memory(net, "4GiB")
        loss = criterion(net(x), y); loss.backward(); optimizer.step(); optimizer.clear_grad()

    The layer is captured by ``paddle.jit.to_static``. Each signature (shapes, data types, training or not) is planned
    when it is first called. Operators that run again are copied into the program of the backward pass; dropout repeats
    by the mask that it drew, and a batch normalisation moves its statistics once. Calls in evaluation are left alone.
    Where Paddle cannot capture the layer, it runs eagerly: those of the layers in it that the plan chooses are
    recomputed as ``remat.paddle.recompute`` does it, and a warning says so.

    Args:
        layer_or_model: a layer, whose ``forward`` is replaced on the instance, or a ``paddle.Model``. With
            ``DataParallel`` give the layer first, then wrap it.
        budget: peak bytes from the call of the layer to the end of its backward pass, everything counted that they read
            or make (parameters, inputs, gradients, what lies between), and what lies outside of the layer, such as the
            loss: an int, "4GiB", or "60%" of the layer's own plain peak. With a ``paddle.Model`` also the optimizer's
            state, and its update.
        resident_bytes: memory that counts although the layer does not touch it: the optimizer's state, say.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning.
        device: profile for the predicted times.
        on_change: what happens where the first step under a plan takes more than the budget, or the next one would,
            because of gradients that are kept as zeros: "replan" plans again, for what the step took, three times at
            most; "keep" leaves the plan. On a CPU only; on a GPU nothing is measured.
        strict: raise an error where the budget does not hold then either, from the call after; else this is logged as a
            warning, once.
        **options: passed on to the planner.

    Returns:
        What was given. ``plan_of`` shows its newest plan; ``measured_peak_bytes`` is what the first step under it took.

    Raises:
        TypeError: for something else.
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: at the first call of a signature, if no schedule fits; it names the smallest budget.
        UnsupportedStep: at the first call, where ``to_static`` cannot capture the layer, and it calls no other layers.
            For a ``paddle.Model`` in static graph mode.
        PlanMismatch: with ``strict``, after a step that took more than the budget.
        ValueError: for another ``on_change``.
    """
    plans_again = replans(on_change)
    if isinstance(layer_or_model, paddle.Model) and not paddle.in_dynamic_mode():
        raise UnsupportedStep(
            "limit_memory of a paddle.Model is for dynamic graph mode; call paddle.disable_static() before you make "
            "the model, or write the static program yourself and call remat.paddle.plan_program"
        )
    layer = layer_or_model.network if isinstance(layer_or_model, paddle.Model) else layer_or_model
    if isinstance(layer, paddle.DataParallel):
        layer = layer._layers
    if not isinstance(layer, paddle.nn.Layer):
        raise TypeError(
            f"limit_memory takes a paddle.nn.Layer or a paddle.Model, not {type(layer_or_model).__name__}; for a "
            "function use remat.paddle.value_and_grad(fn, budget=...)"
        )
    request = Request(budget, planner=planner, time_limit_s=time_limit_s, options=options)
    request.check("remat.paddle.limit_memory", takes_auto=False)
    if _limit_on(layer) is not None:
        raise UnsupportedStep(
            f"the memory of this {type(layer).__name__} is limited already; make a new instance for another budget"
        )
    limit = Limit(layer, request, resident_bytes, device, plans_again=plans_again, strict=strict)
    if isinstance(layer_or_model, paddle.Model):
        _ModelTraining(layer_or_model, limit)
    return layer_or_model


def plan_of(layer_or_model: Any) -> ProgramPlan | None:
    """The newest plan of a layer or a model whose memory is limited; None before its first training call.

    Raises:
        ValueError: where ``limit_memory`` was not called for it.
    """
    layer = layer_or_model.network if isinstance(layer_or_model, paddle.Model) else layer_or_model
    layer = layer._layers if isinstance(layer, paddle.DataParallel) else layer
    limit = _limit_on(layer) if isinstance(layer, paddle.nn.Layer) else None
    if limit is None:
        raise ValueError(
            f"the memory of this {type(layer_or_model).__name__} is not limited; call "
            "remat.paddle.limit_memory(it, budget) first"
        )
    plans = limit.plans
    return plans[-1] if plans else None


def _limit_on(layer: Any) -> Limit | None:
    limit: Limit | None = getattr(vars(layer).get("forward"), _NAME, None)
    return limit if limit is not None and limit.is_of(layer) else None  # A copy of a layer shares what replaces it.


class Limit:
    """What replaces a layer's ``forward``.

    Args:
        layer: whose memory is limited.
        request: with a budget.
        resident_bytes: memory that counts beside the layer's.
        device: profile for the predicted times.
        plans_again: is a signature planned once more after a first step that took more than its budget?
        strict: is a step over its budget an error?

    Attributes:
        captured: the layer's programs.
        layerwise: what runs in their place where the layer cannot be captured.
    """

    def __init__(
        self,
        layer: Any,
        request: Request,
        resident_bytes: int,
        device: str | None,
        *,
        plans_again: bool,
        strict: bool,
    ) -> None:
        self._plain = layer.forward
        self._layer = weakref.ref(layer)
        self._request = request
        self._resident_bytes = resident_bytes
        self._plans_again = plans_again
        self._strict = strict
        self.captured = Captured(layer.forward, request, resident_bytes, device, plans_again=plans_again, strict=strict)
        self.layerwise: Layerwise | None = None

        plain = type(layer).forward

        @functools.wraps(plain)
        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs) if self.is_of(layer) else plain(layer, *args, **kwargs)

        # paddle.Model asks how many inputs a layer takes, and does not look behind a wrapper.
        forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
        setattr(forward, _NAME, self)
        layer.forward = types.MethodType(forward, layer)

    def is_of(self, layer: Any) -> bool:
        """Is this the layer whose memory is limited? A copy of it is not."""
        return self._layer() is layer

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the layer."""
        layer = self._layer()
        if layer is None or not (layer.training and paddle.is_grad_enabled() and paddle.in_dynamic_mode()):
            return self._plain(*args, **kwargs)
        if self.layerwise is None:
            try:
                return self.captured(*args, **kwargs)
            except CannotCapture as error:
                self.layerwise = Layerwise(
                    layer,
                    self._plain,
                    self._request,
                    self._resident_bytes,
                    error.reason,
                    plans_again=self._plans_again,
                    strict=self._strict,
                )
                self.layerwise.training = self.captured.training
        return self.layerwise(*args, **kwargs)

    @property
    def first_step(self) -> FirstStep | None:
        """The first step under the plan that ran last."""
        return self.captured.first_step if self.layerwise is None else self.layerwise.first_step

    @property
    def plans(self) -> list[ProgramPlan]:
        """The plans made so far, the newest last."""
        return self.captured.plans if self.layerwise is None else self.layerwise.plans


class _ModelTraining:
    """What a ``paddle.Model`` does with its layer: loss, backward pass and update in one ``train_batch``.

    Args:
        model: whose ``train_batch`` is replaced on the instance.
        limit: that of its layer.

    Attributes:
        gradients_are_cleared: did the last step set them to zero? The next one then makes all of them anew, so that
            their bytes may go.
    """

    def __init__(self, model: Any, limit: Limit) -> None:
        self.gradients_are_cleared = False
        self._model = weakref.ref(model)
        limit.captured.training = self
        plain = type(model).train_batch

        @functools.wraps(plain)
        def train_batch(model: Any, inputs: Any, labels: Any = None, update: bool = True) -> Any:
            try:
                result = plain(model, inputs, labels, update)
            except BaseException:
                self.gradients_are_cleared = False
                raise
            self.gradients_are_cleared = bool(update)
            if (first_step := limit.first_step) is not None:
                first_step.note_update()
            return result

        model.train_batch = types.MethodType(train_batch, model)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state at this moment."""
        optimizer = getattr(self._model(), "_optimizer", None)
        if optimizer is None:
            return 0
        return bytes_of(tensors_in(optimizer.state_dict()))
