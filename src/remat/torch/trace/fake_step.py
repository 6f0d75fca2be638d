"""Runs one training step without memory: the loss, its gradients, the optimizer's update -> Recording.

Nothing large is allocated and no parameter changes. What the step makes are stand-ins, which no library can tell from
the tensors of a real step (``trace.stand_ins``), so that the traced step takes the branches of the real one.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from remat.core.collecting import without_collections
from remat.core.errors import UnsupportedStep
from remat.running.cost_model import DeviceProfile
from remat.torch import _private
from remat.torch.early_updates import update_alone
from remat.torch.trace import gpu_scratch
from remat.torch.trace.counters import numbers_put_back
from remat.torch.trace.gpu_kernels import GpuKernels, operators_of
from remat.torch.trace.origins import line_of
from remat.torch.trace.recording import Recording
from remat.torch.trace.watcher import StepWatcher

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
    gpu: DeviceProfile | None = None,
    early: Collection[torch.Tensor] = (),
    axes: Mapping[str, str] | None = None,
) -> Recording:
    """Run the loss, its gradients and the optimizer's update without memory.

    Where Python asks for a truth value that does not follow from what the step is given ("is anything infinite?"), it
    hears no. If the step then fails, it is run once more and hears yes. The first real step tells whether that was so;
    ``answered_as`` passes what it heard on to another trace.

    Args:
        loss_fn: returns the loss, a tensor of one element.
        args: its arguments.
        optimizer: whose state and update are counted; it is not changed.
        update: what happens with the gradients instead, see ``Update``; it is counted as far as it needs no values.
        accumulates: do gradients of earlier micro-batches exist, to which those of this step are added?
        resident: tensors that count although the step does not touch them.
        resident_bytes: memory that counts although no tensor of it is known.
        gpu: whose kernels the step is to run although its tensors are not there; None for those of its own device.
        early: the optimizer's parameters that are updated as soon as their gradient is there.
        axes: of a mesh that is only simulated, see ``StepWatcher``.

    Raises:
        UnsupportedStep: where Python needs the number in a tensor, or the loss cannot be differentiated.
    """
    beside = (resident, resident_bytes)

    def run(watcher: StepWatcher) -> Recording:
        if gpu is None:
            with numbers_put_back(loss_fn, args):
                return _recorded(watcher, loss_fn, args, optimizer, update, accumulates, beside, None, None, early)
        with GpuKernels(gpu) as kernels, numbers_put_back(loss_fn, args):
            recording = _recorded(watcher, loss_fn, args, optimizer, update, accumulates, beside, gpu, kernels, early)
        recording.notes = kernels.notes(operators_of(op.func for op in recording.ops))
        return recording

    hears_no, hears_yes = (StepWatcher(guess, gpu is not None, axes) for guess in (False, True))
    try:
        return run(hears_no)
    except Exception:
        if not hears_no.guesses:
            raise
    finally:
        hears_no.storages.stand_ins.retire()
    try:
        return run(hears_yes)
    finally:
        hears_yes.storages.stand_ins.retire()


def _recorded(
    watcher: StepWatcher,
    loss_fn: Callable[..., Any],
    args: Sequence[Any],
    optimizer: torch.optim.Optimizer | None,
    update: Update | None,
    accumulates: bool,
    beside: tuple[Sequence[torch.Tensor], int],
    gpu: DeviceProfile | None,
    kernels: GpuKernels | None,
    early: Collection[torch.Tensor],
) -> Recording:
    resident, resident_bytes = beside
    with without_collections(), undisturbed(), sharding_traced(watcher) as sharded, ExitStack() as stack:
        stack.enter_context(_private.distribution_unseen(sends=False))
        stack.enter_context(watcher)
        watcher.pin([t for t in _private.tree_leaves(args) if isinstance(t, torch.Tensor)], "batch")
        watcher.pin(resident, "optimizer_state")
        if resident_bytes:
            watcher.count_beside(resident_bytes)
        sharded.begin_forward()
        with (
            watcher.modules,
            watcher.taking_marks(),
            watcher.answering(),
            _without_reduction(watcher),
            torch.autograd.graph.saved_tensors_hooks(watcher.pack, watcher.unpack),
        ):
            loss = _loss_of(loss_fn, args)
        watcher.end_forward(loss)
        fakes = None if optimizer is None else _FakeOptimizer(watcher, optimizer, kernels)
        if early and fakes is not None:
            fakes.begin()
            watcher.gradients.update_early(early, fakes.update_of)
        sharded.begin_backward(accumulates)
        _differentiate(watcher, loss, accumulates)
        sharded.end_backward()
        kept = None if accumulates else loss  # Of a micro-batch nothing but gradients is left when the update comes.
        del loss
        if fakes is not None:
            fakes.begin()
            fakes.update_the_rest()
        elif update is not None:
            _run_update(watcher, update)
        del kept
    capability = gpu_scratch.capability_of(watcher.recording.device) if gpu is None else gpu.compute_capability
    if kept_bytes := gpu_scratch.cublas_bytes((op.func for op in watcher.recording.ops), capability):
        watcher.count_beside(kept_bytes)
    return watcher.finished()


def _loss_of(loss_fn: Callable[..., Any], args: Sequence[Any]) -> torch.Tensor:
    try:
        loss = loss_fn(*args)
    except (_private.DataDependentOutputException, _private.DynamicOutputShapeException) as error:
        raise UnsupportedStep(
            f"the step cannot be traced without values: {getattr(error, 'func', error)} turns a tensor's values into a "
            f"Python number or a shape (.item(), if tensor:, nonzero){_at_line_of(error)}. "
            "Compute that outside of the loss and pass the result in, or replace it by operations on tensors"
        ) from error
    except RuntimeError as error:
        if _private.is_mix_of_devices(error):
            raise UnsupportedStep(_mix_of_devices(args, str(error))) from error
        if not _private.is_access_to_data(error):
            raise
        raise UnsupportedStep(
            "the step cannot be traced without values: it takes the data of a tensor out of PyTorch (.numpy(), "
            f"data_ptr()){_at_line_of(error)}. Compute that outside of the loss and pass it in, or replace it by "
            "operations on tensors"
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            what += " that depends on no parameter"
        raise UnsupportedStep(f"the loss function returned {what}; it returns a loss of one element to differentiate")
    return loss


def _at_line_of(error: Exception) -> str:
    line = line_of(error)
    return f" at {line}" if line else ""


def _mix_of_devices(args: Sequence[Any], said: str) -> str:
    """What to write where the model is on the meta device and the batch is not, or the other way round."""
    message = "the step computes with tensors of two devices"
    for tensor in (t for t in _private.tree_leaves(args) if isinstance(t, torch.Tensor)):
        if "meta" in said and tensor.device.type != "meta":
            sizes = ", ".join(map(str, tensor.shape))
            return (
                f"{message}: the model is on the meta device, and an argument of shape {tuple(tensor.shape)} on "
                f"{tensor.device}. Put that there too: torch.empty({sizes}, dtype={tensor.dtype}, device='meta')"
            )
    return f"{message} ({' '.join(said.split())}); put the model and every argument on one"


def _differentiate(watcher: StepWatcher, loss: torch.Tensor, accumulates: bool) -> None:
    """As ``loss.backward()`` would, but leaving every ``grad`` alone, and hooks on accumulated gradients unrun."""
    leaves = _private.leaves_of(loss)
    gradients = watcher.gradients
    hooks = [
        leaf.register_hook(gradients.reduction_of(leaf) or gradients.accumulation_into(leaf, accumulates))
        for leaf in leaves
    ]
    try:
        gradients.hold(torch.autograd.grad(loss, leaves, allow_unused=True))
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


def _run_update(watcher: StepWatcher, update: Update) -> None:
    # An update that wants values (a loss scale: is everything finite?) counts up to there. A real mistake comes up
    # again in the real update.
    with suppress(RuntimeError), watcher.updating({}):
        update(watcher.gradient_of)
        return
    gc.collect()  # The error's frames hold on to fake tensors.


class _FakeOptimizer:
    """An optimizer of the same kind over fake parameters; nothing of the real one changes.

    State that the optimizer makes at its first step counts as resident: it is there from the second step on.

    Args:
        watcher: of the step.
        optimizer: the real one.
        kernels: those of a GPU that is not there, else None.
    """

    def __init__(self, watcher: StepWatcher, optimizer: torch.optim.Optimizer, kernels: GpuKernels | None) -> None:
        self._watcher = watcher
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner  # Trainers wrap theirs.
        self._optimizer = optimizer
        self._kernels = kernels
        self._fakes: dict[int, torch.Tensor] = {}
        self._clone: Any = None

    def begin(self) -> None:
        """Make it, and count its state."""
        if self._clone is not None:
            return
        watcher = self._watcher
        with watcher.paused():
            for parameter in _parameters(self._optimizer):
                own_part = watcher.stand_in(_private.local(parameter))
                fake = torch.nn.Parameter(own_part, parameter.requires_grad)
                self._fakes[id(parameter)] = fake
            self._clone = clone = _clone(self._optimizer, self._fakes, watcher)
            if self._kernels is not None:
                self._kernels.prepare(clone)
            for parameter in _parameters(clone):
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            if not clone.state:
                self._run(lambda: type(clone).step(clone))
            for parameter in _parameters(clone):
                parameter.grad = None
        state = [t for t in _private.tree_leaves(list(clone.state.values())) if isinstance(t, torch.Tensor)]
        watcher.pin(state, "optimizer_state")

    def update_of(self, parameter: torch.Tensor) -> None:
        """Update one parameter, whose gradient has been recorded, and let go of the gradient."""
        fake = self._fakes[id(parameter)]
        with self._watcher.updating({id(parameter): fake}):
            self._run(lambda: update_alone(self._clone, fake))
            fake.grad = None

    def _run(self, update: Callable[[], Any]) -> None:
        try:
            update()
        except (_private.DataDependentOutputException, _private.DynamicOutputShapeException) as error:
            raise UnsupportedStep(
                f"the update of {type(self._optimizer).__name__} cannot be traced: {getattr(error, 'func', error)} "
                "needs a tensor's values. Leave optimizer= out, and count its state with resident_bytes="
            ) from error

    def update_the_rest(self) -> None:
        """Run ``optimizer.step()`` on the gradients that are there."""
        with self._watcher.updating(self._fakes):
            self._run(lambda: type(self._clone).step(self._clone))
            for fake in self._fakes.values():
                fake.grad = None


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _clone(optimizer: torch.optim.Optimizer, fakes: dict[int, torch.Tensor], watcher: StepWatcher) -> Any:
    """An optimizer of the same kind over fake parameters, without the hooks of schedulers and scalers."""

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        # Optimizers read their step counts as numbers, which a fake tensor has only if it was made from one.
        tensor = _private.local(tensor)
        return watcher.stand_in(tensor) if tensor.dim() else torch.tensor(1.0, dtype=tensor.dtype)

    clone: Any = copy.copy(optimizer)
    clone.__dict__.pop("step", None)
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    clone.param_groups = [
        {**group, "params": [fakes[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    clone.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        known = fakes.get(id(parameter), parameter)
        clone.state[known] = _private.tree_map_only(torch.Tensor, stand_in, dict(state))
    return clone


@contextmanager
def _without_reduction(watcher: StepWatcher) -> Iterator[None]:
    """Inside, a ``DistributedDataParallel`` module runs as the module in it: its hooks want real gradients.

    The buckets in which its gradients are reduced count.
    """
    seen: set[int] = set()

    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in seen:
            seen.add(id(self))
            reduced = [p for p in self.module.parameters() if p.requires_grad]
            buckets = watcher.count_beside(sum(p.numel() * p.element_size() for p in reduced))
            if self.gradient_as_bucket_view:
                watcher.gradients.copied_to(reduced, buckets)
        return self.module(*args, **kwargs)

    with mock.patch.object(DistributedDataParallel, "forward", forward):
        yield


@contextmanager
def sharding_traced(watcher: StepWatcher) -> Iterator[_Sharding]:
    """Inside, modules under ``fully_shard`` run their own code on stand-ins; afterwards they are as they were."""
    used = _private.sharding()
    if used is None:
        yield _Sharding(watcher, None)
        return
    with used.Traced(watcher.sends if watcher.is_on_mesh else None) as traced:
        used.observe(watcher)
        try:
            yield _Sharding(watcher, traced)
        finally:
            used.ignore(watcher)


class _Sharding:
    """The sharded parameters of a traced step, and their gradients."""

    def __init__(self, watcher: StepWatcher, traced: Any) -> None:
        self._watcher = watcher
        self._traced = traced

    def begin_forward(self) -> None:
        """Whole gradients of earlier micro-batches are there from the start, where any are."""
        if self._traced is not None and self._traced.finds_whole:
            self._watcher.gradients.begin_with_whole()

    def begin_backward(self, accumulates: bool) -> None:
        """The shards are parameters; their gradients exist or do not."""
        if self._traced is None:
            return
        watcher, gradients = self._watcher, self._watcher.gradients
        self._traced.end_forward()
        watcher.pin([_private.local(one) for one in self._traced.sharded], "parameter")
        gradients.are_gathered(self._traced.gathered)
        watcher.recording.accumulation = self._traced.accumulation()
        with watcher.paused():
            given = self._traced.set_gradients(gradients.stand_in_for_shard if accumulates else None)
            self._traced.set_whole_gradients(gradients.stand_in_for_whole)
        watcher.recording.accumulates_into += [weakref.ref(one) for one in given]

    def end_backward(self) -> None:
        """Note the gradients that ``fully_shard`` made."""
        if self._traced is not None:
            found = [(one, one.grad) for one in self._traced.sharded if one.grad is not None]
            self._watcher.gradients.take([(one, _private.local(gradient)) for one, gradient in found])
            self._watcher.gradients.leave_whole(self._traced.whole_gradients)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Python's and NumPy's random states as before; PyTorch's own are not drawn from by fake tensors."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
