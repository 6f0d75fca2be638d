"""Records one training step on fake tensors.

Nothing is allocated and no parameter changes: PyTorch's ``FakeTensorMode`` carries shapes, strides and devices only.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from remat.core.errors import UnsupportedStep
from remat.torch import _private
from remat.torch.trace.marks import marks_go_to
from remat.torch.trace.recorder import StepRecorder
from remat.torch.trace.recording import Recording
from remat.torch.trace.replicas import without_reduction

Update: TypeAlias = Callable[[Callable[[torch.Tensor], torch.Tensor | None]], None]
"""An optimizer's update, as a function of what gives a parameter's gradient; writes to real tensors change none."""


def record_step(
    loss_fn: Callable[..., Any],
    args: Sequence[Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    update: Update | None = None,
    accumulates: bool = False,
    resident: Sequence[torch.Tensor] = (),
    resident_bytes: int = 0,
) -> Recording:
    """Run the loss, its gradients and the optimizer's update on fake tensors.

    Args:
        loss_fn: returns the loss, a tensor of one element.
        args: its arguments.
        optimizer: whose state and update are counted; it is not changed.
        update: what happens with the gradients instead, see ``Update``; it is counted as far as it needs no values.
        resident: tensors that count although the step does not touch them.
        resident_bytes: memory that counts likewise.
        accumulates: do gradients of earlier micro-batches exist, to which those of this step are added?

    Raises:
        UnsupportedStep: where Python needs the value of a tensor, or the loss cannot be differentiated.
    """
    recorder = StepRecorder()
    with undisturbed(), ExitStack() as stack:
        stack.enter_context(recorder.storages.fake_mode)
        stack.enter_context(recorder)
        recorder.pin([t for t in _private.tree_leaves(args) if isinstance(t, torch.Tensor)], "batch")
        recorder.pin(resident, "optimizer_state")
        if resident_bytes:
            recorder.count_beside(resident_bytes)
        with (
            recorder.names,
            marks_go_to(recorder.mark),
            without_reduction(recorder.count_beside),
            torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack),
        ):
            loss = _loss_of(loss_fn, args)
        recorder.end_forward(loss)
        _differentiate(recorder, loss, accumulates)
        kept = None if accumulates else loss  # Of a micro-batch nothing but gradients is left when the update comes.
        del loss
        if optimizer is not None:
            from remat.torch.trace.update import record_update

            record_update(recorder, optimizer)
        elif update is not None:
            _follow(update, recorder)
        del kept
    return recorder.finished()


def _loss_of(loss_fn: Callable[..., Any], args: Sequence[Any]) -> torch.Tensor:
    try:
        loss = loss_fn(*args)
    except (_private.DataDependentOutputException, _private.DynamicOutputShapeException) as error:
        raise UnsupportedStep(
            f"the step cannot be traced without values: {getattr(error, 'func', error)} turns a tensor's values into a "
            "Python number or a shape (.item(), if tensor:, nonzero). Compute that outside of the loss and pass the "
            "result in, or replace it by operations on tensors"
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            what += " that depends on no parameter"
        raise UnsupportedStep(f"the loss function returned {what}; it returns a loss of one element to differentiate")
    return loss


def _differentiate(recorder: StepRecorder, loss: torch.Tensor, accumulates: bool) -> None:
    """As ``loss.backward()`` would, but leaving every ``grad`` alone, and hooks on accumulated gradients unrun."""
    leaves = _private.leaves_of(loss)
    hooks = [leaf.register_hook(recorder.accumulation_into(leaf, accumulates)) for leaf in leaves]
    try:
        recorder.hold_gradients(torch.autograd.grad(loss, leaves, allow_unused=True))
    except (_private.DataDependentOutputException, _private.DynamicOutputShapeException) as error:
        raise UnsupportedStep(
            f"the backward pass cannot be traced: {getattr(error, 'func', error)} needs a tensor's values"
        ) from error
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise UnsupportedStep(
            "torch.utils.checkpoint with use_reentrant=True runs a backward pass of its own and cannot be traced; give "
            "use_reentrant=False, or take the checkpoint out and leave the choice to the plan"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _follow(update: Update, recorder: StepRecorder) -> None:
    recorder.begin_update({})
    # Where it wants values (a loss scale: is everything finite?), what it did up to there counts. A real mistake comes
    # up again in the real update.
    with suppress(RuntimeError):
        update(recorder.gradient_of)
        return
    gc.collect()  # The error's frames hold on to fake tensors.


@contextmanager
def undisturbed() -> Iterator[None]:
    """Python's and NumPy's random states as before; PyTorch's own are not drawn from by fake tensors."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
