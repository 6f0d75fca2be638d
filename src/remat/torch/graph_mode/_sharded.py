"""Every symbol of ``fully_shard`` that graph mode uses: groups of parameters that are gathered, let go of and reduced.

``fully_shard`` works from hooks on modules, which a captured step does not run. A captured step calls the same engine
at the moments of its schedule: whatever is sent, and in which layout, is ``fully_shard``'s own. Where this file looks
for its symbols they are in PyTorch 2.9 to 2.15.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, TrainingState

from remat.torch import _fsdp, _private

_engine: Final[Any] = Variable._execution_engine

# Steps that reduce their gradients, that leave them whole, and that reduce them with those that were left, as
# ``_fsdp.reduction_of`` tells them apart.
_IN_EACH_STEP: Final = (True, True, False, False)
_IN_A_LATER_STEP: Final = (False, False, True, False)
_FOR_SEVERAL_STEPS: Final = (True, True, True, False)


class _Forwards:
    """Captured forward passes of the modules of one root since autograd was last done.

    Where autograd runs the backward passes of several at once, it adds their gradients up before ``fully_shard``
    reduces them. All processes count the same, whatever their memory still holds.

    Attributes:
        count: how many.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_waiting = False
        # Parameters whose gradients of several calls are added up, with what earlier backward passes left in ``grad``.
        self._adds_up: dict[Any, torch.Tensor | None] = {}

    def reset_when_done(self) -> None:
        """Called in a backward pass: begin to count anew when autograd is done."""
        if not self._is_waiting:
            self._is_waiting = True
            _engine.queue_callback(self._reset)

    def _reset(self) -> None:
        self.count, self._is_waiting = 0, False

    def is_adding_up(self, parameter: Any) -> bool:
        """Has this backward pass added to the gradient of the parameter already?"""
        return parameter in self._adds_up

    def add_up(self, parameter: Any) -> None:
        """From here on ``grad`` of the whole parameter is of this backward pass alone; the rest is added at its end.

        Called before ``fully_shard`` asks to be called at the end.
        """
        if not self._adds_up:
            _engine.queue_callback(self._add_earlier)
        whole = parameter._unsharded_param
        self._adds_up[parameter], whole.grad = whole.grad, None

    def _add_earlier(self) -> None:
        for parameter, earlier in self._adds_up.items():
            whole = parameter._unsharded_param
            if earlier is not None:
                whole.grad = earlier if whole.grad is None else earlier.add_(whole.grad)
        self._adds_up.clear()


class _Inputs:
    """What the newest captured forward pass has seen of the inputs of modules that are gathered together.

    Attributes:
        need_gradients: do some? Then ``fully_shard`` reduces in the backward pass of each call, else at its end.
    """

    def __init__(self) -> None:
        self.need_gradients = False


_forwards: weakref.WeakKeyDictionary[Any, _Forwards] = weakref.WeakKeyDictionary()


def _forwards_of(state: Any) -> _Forwards:
    return _forwards.setdefault(state._state_ctx, _Forwards())


class ShardedGroup:
    """Parameters that ``fully_shard`` gathers together.

    Args:
        state: what ``fully_shard`` knows of their modules.
        group: its group of parameters.

    Attributes:
        gathered_bytes: of all parameters of the group, gathered and padded.
        gather_scratch_bytes: what a gather needs beside these while it runs.
        inputs: what is known of the inputs of their modules.
    """

    def __init__(self, state: Any, group: Any) -> None:
        self.state = state
        self._group = group
        self._forwards = _forwards_of(state)
        self.inputs = _Inputs()
        sizes = [self._gathered_bytes(one) for one in group.fsdp_params]
        self.gathered_bytes = sum(sizes)
        # What was received lies in one buffer, from which it is copied; twice where a parameter is cut along another
        # axis than the first.
        twice = sum(size for size, one in zip(sizes, group.fsdp_params, strict=True) if one.fsdp_placement.dim != 0)
        # One process by itself copies each parameter, in another type if need be.
        cast = max((size for size, one in zip(sizes, group.fsdp_params, strict=True) if one.param_dtype), default=0)
        self.gather_scratch_bytes = self.gathered_bytes + twice if self._shards > 1 else cast

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters as a step computes with them, whole: each the same object in every step."""
        return [one._unsharded_param for one in self._group.fsdp_params]

    def part_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This process's part of a whole parameter, as modules show it between steps."""
        found: torch.Tensor = self._group.fsdp_params[
            [id(one) for one in self.parameters].index(id(parameter))
        ].sharded_param
        return found

    @property
    def classes(self) -> set[str]:
        """Names of the classes of the modules inside of which the parameters are whole."""
        return {type(one).__name__ for one in self._group.modules}

    @property
    def comes_again(self) -> bool:
        """Does ``fully_shard`` let go of the parameters after the forward pass, and gather them for the backward?"""
        return bool(self._group._reshard_after_forward)

    @property
    def shards_bytes(self) -> list[int]:
        """Bytes of this process's part of each parameter."""
        data = [one._sharded_param_data for one in self._group.fsdp_params]
        return [one.numel() * one.element_size() for one in data]

    @property
    def _shards(self) -> int:
        info = self._group.mesh_info
        return int(info.shard_mesh_size) if isinstance(info, FSDPMeshInfo) else 1

    def _gathered_bytes(self, parameter: Any) -> int:
        dtype = parameter.param_dtype or parameter.orig_dtype
        return int(parameter._sharded_param_data.numel()) * self._shards * int(dtype.itemsize)

    def reduced_bytes(self, places: Sequence[int]) -> tuple[int, int, int]:
        """What reducing the gradients of some parameters makes, in bytes.

        Args:
            places: of the parameters that have gradients, in the group.

        Returns:
            This process's part of the gradients; what is sent, which ``fully_shard`` holds until the next reduction;
            and what is needed beside the two while it runs.
        """
        if not self._group.reduce_grads:
            return 0, 0, 0
        found = [self._group.fsdp_params[place] for place in places]
        numel = sum(one._sharded_param_data.numel() for one in found)
        first = found[0]
        reduced = first.reduce_dtype or first.param_dtype or first.orig_dtype
        part = numel * first.orig_dtype.itemsize
        beside = 0 if reduced == first.orig_dtype else numel * reduced.itemsize
        turned = [one for one in found if one.fsdp_placement.dim != 0 and self._shards > 1]
        sent = numel * self._shards * reduced.itemsize
        scratch = beside + sum(self._gathered_bytes(one) for one in turned) + (sent if self._copies_what_is_sent else 0)
        if isinstance(self._group.mesh_info, HSDPMeshInfo):
            part += beside  # Held until the end of the backward pass.
        return part, sent, scratch

    @property
    def whole_gradients_bytes(self) -> int:
        """Bytes of the gradients of all parameters before they are reduced."""
        return sum(
            one._orig_size.numel() * (one.reduce_dtype or one.param_dtype or one.orig_dtype).itemsize
            for one in self._group.fsdp_params
            if one.sharded_param.requires_grad
        )

    @property
    def _copies_what_is_sent(self) -> bool:
        """Does the process group reduce a copy? gloo does."""
        return self._shards > 1 and dist.get_backend(self._group._reduce_scatter_process_group) == "gloo"

    @property
    def kept_buffers(self) -> int:
        """How many reductions hold what they sent at a time."""
        return int(getattr(self._group.comm_ctx, "reduce_scatter_max_input_buffers", 1))

    def prepare(self) -> None:
        """Make the objects of the whole parameters, without memory, as the first gather would."""
        for one in self._group.fsdp_params:
            if not hasattr(one, "_unsharded_param"):
                dtype = one.param_dtype or one.orig_dtype
                one.init_all_gather_outputs(
                    [one._sharded_param_data.numel()], [dtype], self._shards, self._group.device
                )
                one.init_unsharded_param()
                one.free_unsharded_param()

    def show_whole(self) -> None:
        """Have modules show their parameters whole, whether these have memory or not."""
        for one in self._group.fsdp_params:
            whole, shard = one._unsharded_param, one.sharded_param
            if whole.requires_grad != shard.requires_grad:
                whole.requires_grad_(shard.requires_grad)
            one._setattr_on_modules(whole)

    def show_as_is(self) -> None:
        """Have modules show their parameters as they are: this process's part unless they are gathered."""
        if not self._group.is_unsharded:
            for one in self._group.fsdp_params:
                one._setattr_on_modules(one.sharded_param)

    def gather(self) -> None:
        """Give the whole parameters memory and values, if they have none."""
        group = self._group
        # In the state of a forward pass the gather has a stream of its own, and in that of a backward pass what was
        # received goes as soon as it is copied.
        with group.use_training_state(TrainingState.FORWARD):
            group.unshard(group.unshard_async_op)
        with group.use_training_state(TrainingState.PRE_BACKWARD):
            group.wait_for_unshard()

    def let_go(self) -> None:
        """Take the memory of the whole parameters away."""
        self._group._to_sharded()

    @property
    def waits(self) -> bool:
        """May autograd run the backward passes of several calls at once, whose gradients are added up first?"""
        return self._forwards.count > 1

    def take(self, places: Sequence[int], gradients: Sequence[torch.Tensor | tuple[torch.Tensor, ...]]) -> None:
        """Add the gradients of the parameters at these places, or their parts, to ``grad``, to be reduced.

        The step may write to them later, so that they are copied unless the reduction comes right behind.
        """
        stay = self.waits or not self._group.reduce_grads
        parameters = [self._group.fsdp_params[place] for place in places]
        if self.waits and not any(map(self._forwards.is_adding_up, parameters)):
            self._begin_to_add_up()
        for one, given in zip(parameters, gradients, strict=True):
            whole = one._unsharded_param
            for gradient in given if isinstance(given, tuple) else (given,):
                if whole.grad is not None:
                    whole.grad.add_(gradient)
                else:
                    with self._counted_from_the_start():
                        whole.grad = gradient.clone() if stay else gradient

    def _begin_to_add_up(self) -> None:
        """What earlier backward passes left is reduced by itself, or joins when all gradients of this one are there."""
        group = self._group
        earlier = [one for one in group.fsdp_params if one.unsharded_accumulated_grad is not None or _has_whole(one)]
        if earlier and group.reduce_grads and self.inputs.need_gradients:
            # So ``fully_shard`` does behind the first call, when autograd has not yet added up what comes of them all.
            with self._reduced_as_planned(), group.use_training_state(TrainingState.PRE_BACKWARD):
                group.post_backward()
        for one in group.fsdp_params:
            self._forwards.add_up(one)

    def reduce(self) -> None:
        """Reduce the gradients that were taken over the processes, into ``grad`` of each parameter's part.

        Where several backward passes may run at once, ``fully_shard`` does so when autograd is done.
        """
        # What is left to do when autograd is done, for groups without gradients too.
        self.state._register_root_post_backward_final_callback()
        self._forwards.reset_when_done()
        if not self.waits:
            with self._reduced_as_planned():
                self._group.post_backward()

    @contextmanager
    def _reduced_as_planned(self) -> Iterator[None]:
        """Inside, ``fully_shard`` does not let go of parameters: the schedule says when."""
        group = self._group
        lets_go, group.reshard_after_backward = group.reshard_after_backward, False
        try:
            with self._counted_from_the_start():
                yield
        finally:
            group.reshard_after_backward = lets_go

    def _counted_from_the_start(self) -> AbstractContextManager[None]:
        """Whole gradients that the step leaves count as there before it, so that nobody sees them being made."""
        return nullcontext() if self._group.reduce_grads else _private.no_modes()


class ShardedModules:
    """All modules under ``fully_shard`` that a function uses.

    Args:
        modules: that the function uses, whatever they are.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        sharded = [one for one in modules if isinstance(one, FSDPModule)]
        inner = {id(one) for outer in sharded for one in outer.modules() if one is not outer}
        self._roots: list[Any] = [one for one in sharded if id(one) not in inner]
        self._states: list[Any] = list(dict.fromkeys(_state_of(one) for one in sharded))
        self._hooks: list[tuple[Any, int, Any, Any]] | None = None
        self.groups: list[ShardedGroup] = []

    @property
    def parameters(self) -> set[Any]:
        """This process's parts of the parameters."""
        groups = [group for state in self._states for group in _fsdp.groups_of(state)]
        return {one.sharded_param for group in groups for one in group.fsdp_params}

    @property
    def reduction(self) -> tuple[bool, bool, bool, bool]:
        """What the next step does with its gradients, see ``_fsdp.reduction_of``."""
        return _fsdp.reduction_of([group for state in self._states for group in _fsdp.groups_of(state)])

    @property
    def whole_gradients_bytes(self) -> int:
        """Bytes of the gradients that earlier steps may have left unreduced."""
        return 0 if self.reduction == _IN_EACH_STEP else sum(one.whole_gradients_bytes for one in self.groups)

    def why_not(self) -> str:
        """Why steps of these modules are not captured as things stand; "" where they are.

        All processes find the same, since their modules are the same.
        """
        own = [group for state in self._states for group in _fsdp.groups_of(state)]
        parameters = [one for group in own for one in group.fsdp_params]
        if any(len(_fsdp.groups_of(state)) > 1 for state in self._states):
            return "has parameters on several meshes"
        if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in own):
            return "keeps its parameters on the CPU"
        if any(one.is_dtensor for one in parameters):
            return "has parameters that tensor parallelism cuts as well"
        if any(hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather") for one in parameters):
            return "has parameters of a type that changes how they are gathered"
        if not all(group.reshard_after_backward for group in own):
            return "keeps its parameters gathered after the backward pass (set_reshard_after_backward)"
        if self.reduction not in (_IN_EACH_STEP, _IN_A_LATER_STEP, _FOR_SEVERAL_STEPS):
            return "reduces gradients over replicas in some steps only (set_requires_all_reduce)"
        if not all(state._state_ctx.is_last_backward for state in self._states):
            return "is told that a backward pass is not the last (set_is_last_backward)"
        return ""

    def prepare(self) -> None:
        """Let ``fully_shard`` do what it does before the first step, and make the objects of whole parameters."""
        if self._hooks is not None:
            return
        for root in self._roots:
            _state_of(root)._lazy_init()
        self.groups = [ShardedGroup(state, one) for state in self._states for one in _fsdp.groups_of(state)]
        for group in self.groups:
            group.prepare()
        inputs = {group.state: group.inputs for group in self.groups}
        self._hooks = [hook for state in self._states for hook in _hooks_of(state, inputs.get(state))]

    def as_outside(self, result: Any) -> Any:
        """What a step has returned, with this process's parts in place of whole parameters."""
        whole = {id(one): group for group in self.groups for one in group.parameters}
        if not any(id(one) in whole for one in _private.tree_leaves(result)):
            return result
        return _private.tree_map_only(
            torch.Tensor, lambda one: whole[id(one)].part_of(one) if id(one) in whole else one, result
        )

    @contextmanager
    def shown_whole(self) -> Iterator[None]:
        """Inside, modules have their parameters whole, though without memory, and none of ``fully_shard``'s hooks."""
        assert self._hooks is not None, "prepare() comes first"
        for root in self._roots:
            # Gathers wait for the optimizer's update.
            state = _state_of(root)
            state._root_pre_forward(root, (), {})
            state._state_ctx.iter_forward_root = None
        for group in self.groups:
            # A forward pass without a backward pass may have left them, from before an update.
            group.let_go()
            group.inputs.need_gradients = False
        for hooks, number, _, instead in self._hooks:
            hooks[number] = instead
        for group in self.groups:
            group.show_whole()
        try:
            yield
            for root in self._roots:
                _forwards_of(_state_of(root)).count += 1
        finally:
            for group in self.groups:
                group.show_as_is()
            for hooks, number, own, _ in self._hooks:
                hooks[number] = own


def _state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def _has_whole(parameter: Any) -> bool:
    return parameter._unsharded_param.grad is not None


def _hooks_of(state: Any, inputs: _Inputs | None) -> Iterator[tuple[Any, int, Any, Any]]:
    """The hooks of a state: where each stands, its number there, itself, and what a captured step does in its place."""
    policy = state._mp_policy
    before = functools.partial(_before, inputs, policy.param_dtype if policy.cast_forward_inputs else None)
    after = functools.partial(_cast_results, policy.output_dtype) if policy.output_dtype else _nothing
    for handle, instead in ((state._pre_forward_hook_handle, before), (state._post_forward_hook_handle, after)):
        for one in getattr(handle, "handles", (handle,)):
            hooks: OrderedDict[int, Callable[..., Any]] = one.hooks_dict_ref()
            if one.id in hooks:
                yield hooks, one.id, hooks[one.id], instead


def _nothing(*args: Any) -> None:
    """A hook that changes nothing."""


def _before(inputs: _Inputs | None, dtype: torch.dtype | None, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if inputs is not None and torch.is_grad_enabled() and _needs_gradients((args, kwargs)):
        inputs.need_gradients = True
    return None if dtype is None else (_cast(dtype, args), _cast(dtype, kwargs))


def _needs_gradients(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, one.name) for one in dataclasses.fields(value)]
    # PyTorch 2.9 captures no union of types.
    is_several = isinstance(value, list) or isinstance(value, tuple)  # noqa: SIM101
    return is_several and any([_needs_gradients(one) for one in value])


def _cast_results(dtype: torch.dtype, module: nn.Module, args: Any, result: Any) -> Any:
    return _cast(dtype, result)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    """The floating-point tensors in a value in another type, as ``fully_shard`` casts them."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_cast(dtype, one) for one in value])
    if isinstance(value, tuple):
        return tuple([_cast(dtype, one) for one in value])
    if isinstance(value, list):
        return [_cast(dtype, one) for one in value]
    if isinstance(value, dict):
        found = {name: _cast(dtype, one) for name, one in value.items()}
        return found if type(value) is dict else type(value)(found)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{one.name: _cast(dtype, getattr(value, one.name)) for one in dataclasses.fields(value)}
        )
    return value
