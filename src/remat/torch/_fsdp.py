"""Every symbol of ``fully_shard`` that is not documented as public, and what remat needs of its inside.

``fully_shard`` runs code of its own before and after a module: it gathers parameters, lets go of them, reduces
gradients. That code belongs to no plan. ``observe`` tells when it runs and when it gives memory back, which no operator
does: it sets the size of a storage. ``Traced`` lets a step run on tensors without values: nothing is sent, and
afterwards the modules are as they were. ``Accumulation`` tells what becomes of gradients where several backward passes
come before one reduction (``set_requires_gradient_sync``): whole ones stay on every rank.

The symbols are where this file looks for them in PyTorch 2.9 to 2.15; what differs between these says so.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final, Protocol, TypeAlias
from unittest import mock

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as _collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param as _param
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as _param_group
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as _State
from torch.distributed.tensor import DTensor

_own_handle: Final[Any] = getattr(_collectives, "_get_device_handle")  # noqa: B009

Sends: TypeAlias = Callable[[str, torch.Tensor, torch.Tensor, str], None]

_Group: Final = _param_group.FSDPParamGroup

# Methods that run operators of their own; what they are called from runs none.
_OWN_CODE: Final = (
    (_Group, ("unshard", "wait_for_unshard", "reshard", "post_backward", "finalize_backward")),
    (_State, ("_lazy_init",)),
)


class Observer(Protocol):
    """Who wants to know what ``fully_shard`` does."""

    def begin_own_code(self) -> None:
        """Operators that run from here on are those of ``fully_shard``."""

    def end_own_code(self) -> None:
        """They end here. Calls are nested."""

    def allocates(self, tensor: torch.Tensor) -> bool:
        """A gathered parameter's storage gets its size back; true if that must not really happen."""

    def frees(self, tensor: torch.Tensor) -> bool:
        """A gathered parameter's storage loses its size; true if that must not really happen."""


_observers: list[Observer] = []
_undo: list[Callable[[], None]] = []


def observe(observer: Observer) -> None:
    """From now on tell somebody, until ``ignore`` is called. Costs nothing where no module is sharded."""
    if next(_states(), None) is None:
        return
    if not _observers:
        _install()
    _observers.append(observer)


def ignore(observer: Observer) -> None:
    """Tell somebody no longer."""
    if observer in _observers:
        _observers.remove(observer)
        if not _observers:
            while _undo:
                _undo.pop()()


def _install() -> None:
    for owner, names in _OWN_CODE:
        for name in names:
            _replace(owner, name, _surrounded(getattr(owner, name)))
    for name, what in (("alloc_storage", "allocates"), ("free_storage", "frees")):
        new = _announced(getattr(_param, name), what)
        for module in (_param, _param_group):  # The latter has its own name for one of them.
            if hasattr(module, name):
                _replace(module, name, new)


def _replace(owner: Any, name: str, new: Any) -> None:
    old = getattr(owner, name)
    setattr(owner, name, new)
    _undo.append(lambda: setattr(owner, name, old))


def _surrounded(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        told = list(_observers)
        for observer in told:
            observer.begin_own_code()
        try:
            return own(*args, **kwargs)
        finally:
            for observer in told:
                observer.end_own_code()

    return run


def _announced(own: Callable[[torch.Tensor], None], what: str) -> Callable[[torch.Tensor], None]:
    def run(tensor: torch.Tensor) -> None:
        if not any([getattr(observer, what)(tensor) for observer in _observers]):
            own(tensor)

    return run


def _states() -> Iterator[Any]:
    """The states of all sharded modules of this process."""
    seen: set[int] = set()
    for _, reference in list(_module_state_mapping.items()):
        state = reference()
        if isinstance(state, _State) and id(state) not in seen:
            seen.add(id(state))
            yield state


def groups_of(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # PyTorch 2.9 has one.
        found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(found)


def _parameters() -> Iterator[tuple[Any, Any]]:
    """Each sharded parameter with its group."""
    for state in _states():
        for group in groups_of(state):
            for parameter in group.fsdp_params:
                yield group, parameter


def is_sharded(module: nn.Module) -> bool:
    """Is a module, or one inside of it, under ``fully_shard``?"""
    return any(isinstance(one, FSDPModule) for one in module.modules())


def gather(tensor: torch.Tensor) -> None:
    """Bring a parameter back that ``fully_shard`` let go of after the forward pass.

    The module's own backward pass, which would gather it later, then finds it there. Does nothing for other tensors.
    """
    key = id(tensor.untyped_storage())
    for group, parameter in _parameters():
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None and id(whole.untyped_storage()) == key:
            group.unshard()
            group.wait_for_unshard()
            return


def _whole_gradient(parameter: Any) -> torch.Tensor | None:
    """The gradient of a sharded parameter that was not reduced yet, as large as the parameter itself."""
    found = parameter.unsharded_accumulated_grad
    if found is None and (whole := getattr(parameter, "_unsharded_param", None)) is not None:
        found = whole.grad
    return None if found is None else getattr(found, "_local_tensor", found)


def _has_whole_gradients(groups: Iterable[Any]) -> bool:
    return any(_whole_gradient(parameter) is not None for group in groups for parameter in group.fsdp_params)


def reduction_of(groups: list[Any]) -> tuple[bool, bool, bool, bool]:
    """Are gradients reduced over shards, and over replicas? Are whole ones there, or reduced over shards alone?

    Steps that do not reduce have plans that count whole gradients from the start, so that the first is one of them.
    """
    reduces = all(group.reduce_grads for group in groups)
    over_replicas = all(group.all_reduce_grads for group in groups)
    partly = any(group._partial_reduce_output is not None for group in groups)
    return reduces, over_replicas, not reduces or _has_whole_gradients(groups), partly


_IS_LAST: list[bool] = []


class Accumulation:
    """What the modules of a step did with its gradients when it was traced, and what they would do now.

    Args:
        groups: of sharded parameters that the step gathers.
        reduction: as ``reduction_of`` says it of the traced step.
        finds_whole: does the step find whole gradients? It does not where all parameters are frozen.
    """

    def __init__(self, groups: list[Any], reduction: tuple[bool, bool, bool, bool], *, finds_whole: bool) -> None:
        self._groups = [weakref.ref(group) for group in groups]
        self._reduction = reduction
        self.finds_whole = finds_whole

    @property
    def groups(self) -> list[Any]:
        """Those that still exist."""
        return [group for weak in self._groups if (group := weak()) is not None]

    def whole_gradients(self) -> list[torch.Tensor]:
        """Those that are there now."""
        found = [_whole_gradient(parameter) for group in self.groups for parameter in group.fsdp_params]
        return [one for one in found if one is not None]

    def difference(self) -> str:
        """How a step now differs from the traced one; "" if it does not."""
        now, then = reduction_of(self.groups), self._reduction
        if now == then:
            return ""
        reduces = ("does not reduce gradients", "reduces gradients")
        if now[:2] != then[:2]:
            return f"it {reduces[all(now[:2])]}, and the planned one {reduces[all(then[:2])]}"
        found = ("finds none", "finds gradients that were not reduced yet")
        return f"it {found[any(now[2:])]}, and the planned one {found[any(then[2:])]}"


def reduction(steps: Iterable[Accumulation]) -> Hashable:
    """What decides what the next step does with its gradients; steps in which it differs need plans of their own.

    Args:
        steps: those of the same function that were traced. Other sharded modules of the process do not count.

    Returns:
        None where all gradients are reduced and none are left, as where no module is sharded.
    """
    found = reduction_of([group for step in steps for group in step.groups])
    return None if found == (True, True, False, False) else found


@contextlib.contextmanager
def last_of_several(steps: Iterable[Accumulation]) -> Iterator[Hashable]:
    """Inside, a step is traced as the one that ends an accumulation: it finds whole gradients and reduces them.

    Gives what ``reduction`` will be then. Nothing changes where all gradients are reduced in each step.
    """
    steps = list(steps)
    _IS_LAST.append(True)
    try:
        reduces, _, _, partly = reduction_of([group for step in steps for group in step.groups])
        yield reduction(steps) if reduces else (True, True, True, partly)
    finally:
        _IS_LAST.pop()


class Traced:
    """A context in which sharded modules run without values: nothing is sent, and afterwards all is as it was.

    Args:
        sends: is told of every collective: its kind as NCCL names it, the output, the input, the name of the group.
    """

    def __init__(self, sends: Sends | None = None) -> None:
        self._sends = sends
        self._patches = contextlib.ExitStack()
        self._before: list[tuple[Any, dict[str, Any]]] = []
        self._gradients: list[tuple[Any, torch.Tensor | None]] = []
        self._ran: list[Any] = []
        self._groups: list[Any] = []
        self._gathered_before: set[int] = set()
        # Parameters of which the step finds a whole gradient, by their address.
        self._whole: set[int] = set()
        # Those of which gradients of earlier micro-batches are elsewhere than in ``grad``.
        self._not_in_shards: set[int] = set()

    def __enter__(self) -> Traced:
        states = list(_states())
        if not states:
            return self
        groups = self._groups = [group for state in states for group in groups_of(state)]
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        contexts = [one for state in states for one in (state._state_ctx, state._comm_ctx)]
        modules = [module for group in groups for root in group.modules for module in root.modules()]
        for one in {id(one): one for one in (*states, *groups, *parameters, *contexts)}.values():
            self._remember(one, vars(one))
        for module in {id(module): module for module in modules}.values():
            for one in (module._parameters, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks):
                self._remember(one, one)
        self._gradients = [(one.sharded_param, one.sharded_param.grad) for one in parameters]
        self._find_whole_gradients()
        # Streams and events of the meta device are those of the CPU, which are none.
        on_cpu = lambda device_type="cuda": _own_handle("cpu" if device_type == "meta" else device_type)  # noqa: E731
        self._patches.enter_context(mock.patch.object(_collectives, "_get_device_handle", on_cpu))
        if hasattr(_collectives, "record_grad_output_stream"):  # PyTorch 2.15, which leaves it out for CPUs alone.
            nothing = lambda buffer, stream: None  # noqa: E731
            self._patches.enter_context(mock.patch.object(_collectives, "record_grad_output_stream", nothing))
        engine: Any = _Distributed(self._all_reduce)
        self._patches.enter_context(mock.patch.object(_collectives, "dist", engine))
        if self._sends is not None:
            # Elsewhere than on the CPU, ``fully_shard`` insists on an event after a reduction over replicas.
            record = lambda stream, event=None: torch.cpu.Event()  # noqa: E731
            self._patches.enter_context(mock.patch.object(torch.cpu.Stream, "record_event", record))
        for group in groups:
            group._all_gather_comm = _Nothing(group._all_gather_comm, "AllGather", self._sends)
            group._reduce_scatter_comm = _Nothing(group._reduce_scatter_comm, "ReduceScatter", self._sends)
            if any(parameter.sharded_param.device.type == "meta" for parameter in group.fsdp_params):
                self._move_to_meta(group)
            if not group.is_sharded:
                self._gathered_before.add(id(group))
                group._post_forward_indices = []
                continue
            for parameter in group.fsdp_params:
                # What the first step makes and later steps find: tensors that have a size, and no memory.
                vars(parameter).pop("_unsharded_param", None)
                parameter.all_gather_outputs = []
        return self

    def _find_whole_gradients(self) -> None:
        """Which gradients the step finds, and that it finds stand-ins in their place."""
        # Groups of one model share a context. Before the first step of several no whole gradient is there, and the plan
        # counts what the later ones find.
        begun = {id(group.comm_ctx) for group in self._groups if _has_whole_gradients([group])}
        for group in self._groups:
            reduces = group.reduce_grads
            for one in group.fsdp_params:
                found = _whole_gradient(one) is not None if id(group.comm_ctx) in begun else not reduces
                if found and one.sharded_param.requires_grad:
                    self._whole.add(id(one))
                # Of earlier micro-batches that were not reduced over replicas, the group itself holds what there is.
                if found or not group.all_reduce_grads or group._partial_reduce_output is not None:
                    self._not_in_shards.add(id(one))
                one.unsharded_accumulated_grad = None
                if (whole := getattr(one, "_unsharded_param", None)) is not None:
                    self._gradients.append((whole, whole.grad))
                    if not group.is_sharded:
                        whole.grad = None
            if _IS_LAST and not reduces:
                group.reduce_grads = group.all_reduce_grads = True

    def _move_to_meta(self, group: Any) -> None:
        """Let a group of parameters on the meta device run there, which ``fully_shard`` refuses to do."""
        group._validate_no_meta_params = lambda: None
        for one in (group, *group.fsdp_params):
            one.device = torch.device("meta")

    def __exit__(self, *exception: object) -> None:
        self._patches.close()
        for one, values in self._before:
            now = one if isinstance(one, dict) else vars(one)
            now.clear()
            now.update(values)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._before.clear()
        self._gradients.clear()
        self._groups, self._ran = [], []

    def _all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        """Stands in for the collective by which shards are reduced over the replicas."""
        if self._sends is not None:
            self._sends("AllReduce", tensor, tensor, group.group_name)

    def _remember(self, one: Any, values: dict[str, Any]) -> None:
        copied = {
            name: copy.copy(value) if isinstance(value, list | dict | set) else value for name, value in values.items()
        }
        self._before.append((one, copied))

    def end_forward(self) -> None:
        """The forward pass is over: note which modules have run."""
        self._groups = [
            group
            for group in self._groups
            # What a module runs with is gathered in the step, or was there before.
            if (id(group) in self._gathered_before and group._post_forward_indices)
            or (id(group) not in self._gathered_before and any(one.all_gather_outputs for one in group.fsdp_params))
        ]
        self._ran = [one for group in self._groups for one in group.fsdp_params]

    @property
    def sharded(self) -> list[Any]:
        """Of the modules that have run: the parameters that they have outside of a step."""
        return [one.sharded_param for one in self._ran]

    @property
    def gathered(self) -> list[torch.Tensor]:
        """The same parameters as the step computes with them."""
        return [one._unsharded_param for one in self._ran]

    @property
    def finds_whole(self) -> bool:
        """May the step find whole gradients?"""
        return bool(self._whole)

    def accumulation(self) -> Accumulation:
        """What the modules that have run do with gradients."""
        reduces, over_replicas, _, partly = reduction_of(self._groups)
        whole = any(id(one) in self._whole for one in self._ran)
        return Accumulation(self._groups, (reduces, over_replicas, whole or not reduces, partly), finds_whole=whole)

    def set_gradients(self, make: Callable[[torch.Tensor], torch.Tensor] | None) -> list[Any]:
        """Give each of them the gradient that ``make`` makes of its local part; None takes gradients away.

        Where gradients were not reduced, shards have one only if they have one now.

        Returns:
            Those that were given one.
        """
        given = []
        for parameter in self._ran:
            one = parameter.sharded_param
            has_none = id(parameter) in self._not_in_shards and one.grad is None
            one.grad = None
            if make is not None and one.requires_grad and not has_none:
                gradient = make(one._local_tensor)
                one.grad = DTensor.from_local(gradient, one.device_mesh, one.placements, run_check=False)
                given.append(one)
        return given

    def set_whole_gradients(self, make: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> None:
        """Give each gathered parameter whose whole gradient the step finds what ``make`` makes, in that dtype."""
        for one in self._ran:
            if id(one) not in self._whole:
                continue
            whole = one._unsharded_param
            if one.reduce_dtype in (None, whole.dtype):
                whole.grad = make(whole, whole.dtype)
            else:
                one.unsharded_accumulated_grad = make(whole, one.reduce_dtype)

    @property
    def whole_gradients(self) -> list[torch.Tensor]:
        """Those that are there now, of the modules that have run."""
        return [gradient for one in self._ran if (gradient := _whole_gradient(one)) is not None]


class _Distributed:
    """``torch.distributed`` as ``fully_shard`` sees it, but for its ``all_reduce``; a step's own sends as ever."""

    def __init__(self, all_reduce: Callable[..., None]) -> None:
        self.all_reduce = all_reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)


class _Nothing:
    """A collective that sends nothing; what it takes to receive is allocated as ever."""

    def __init__(self, own: Any, kind: str, sends: Sends | None) -> None:
        self._own = own
        self._kind = kind
        self._sends = sends

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = self._own.allocate(*args, **kwargs)
        return made

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **kwargs: Any) -> None:
        """Send nothing."""
        if self._sends is not None:
            self._sends(self._kind, output_tensor, input_tensor, group.group_name)
