"""Every symbol of PyTorch that is not documented as public; ``tests/torch/test_torch_private.py`` checks each.

They are where this file looks for them in PyTorch 2.9 to 2.15; what differs between these says so. Those of Inductor
are in ``compiled/_inductor.py``, those of ``fully_shard`` in ``_fsdp.py``.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import TracebackType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import traceback as fx_traceback
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "fx_traceback",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

Storage: TypeAlias = torch.UntypedStorage

VERSION: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""PyTorch's major and minor version, where nothing else tells how its kernels differ."""

_autograd: Any = torch._C._autograd
_engine: Any = torch._C
_DisableTorchDispatch: Any = torch._C._DisableTorchDispatch

# Read from the operators that traced steps of PyTorch 2.13 ran. One that is missing is taken for a computation, and a
# step under a plan then departs from it.
_SILENT_NAMESPACES = frozenset({"prim", "profiler", "record_function", "c10d", "_c10d_functional"})


_ADDRESSES: Final = 1 << 40
"""Bytes of addresses that storages without memory share. A judgement, not measured: hardly a tensor of a step on one
device is larger. They are reserved and read as zeros, which takes no memory. A larger storage has no address, as all
have where the system gives none: a kernel that reads it past every check then ends the process."""


_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Take addresses without promising memory for them. The number is Linux's, which Python 3.11 does not name; elsewhere
the flag is another or none, the system then refuses, and storages without memory have no address."""


@cache
def _zeros() -> tuple[int, Any]:
    """Where ``_ADDRESSES`` bytes begin that hold nothing and can be read, 0 if the system gives none; their owner."""
    try:
        region = mmap.mmap(
            -1, _ADDRESSES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, prot=mmap.PROT_READ
        )
    except (AttributeError, OSError, ValueError, OverflowError):
        return 0, None
    return int(np.frombuffer(region, dtype=np.uint8).ctypes.data), region


@cache
def onednn_computes(dtype: torch.dtype) -> bool:
    """Has oneDNN kernels for products of this half precision on this CPU?"""
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported")())


def storage_without_memory(size_bytes: int, device: torch.device) -> Storage:
    """A storage that says that it has this size; asking for its address to write there is an error."""
    address = _zeros()[0] if size_bytes <= _ADDRESSES else 0
    storage: Storage = _engine._construct_storage_from_data_pointer(address, device, size_bytes)
    _engine._set_throw_on_mutable_data_ptr(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
    return storage


def has_memory(storage: Storage) -> bool:
    """Is it a storage of PyTorch's own, rather than a ``storage_without_memory``?"""
    try:
        storage.data_ptr()
    except RuntimeError as error:
        return not is_access_to_data(error)
    return True


BOUND_FUNCTIONS: Final[tuple[Any, ...]] = (
    _engine._VariableFunctions,
    _engine._nn,
    _engine._linalg,
    _engine._fft,
    _engine._special,
    _engine.TensorBase,
)
"""Where PyTorch keeps its operators as functions for Python, which take their arguments faster than
``torch.ops.aten``."""


def fake_mode_of(values: list[Any]) -> AbstractContextManager[Any]:
    """The mode in which the fake tensors among some values compute; nothing where there are none."""
    for value in values:
        if isinstance(value, FakeTensor):
            mode: AbstractContextManager[Any] = value.fake_mode
            return mode
    return nullcontext()


def is_access_to_data(error: RuntimeError) -> bool:
    """Is it what PyTorch says where the data of a storage without memory is asked for?"""
    return "Cannot access data pointer of Tensor" in str(error)


def is_mix_of_devices(error: Exception) -> bool:
    """Is it what PyTorch says of tensors without memory on two devices? PyTorch 2.13 words it in another way."""
    return any(words in str(error) for words in ("found at least two devices", "found two different devices"))


def fake_tensor(mode: FakeTensorMode, meta: torch.Tensor, like: torch.Tensor) -> FakeTensor:
    """A fake tensor on the device of ``like`` in the storage of a meta tensor; called outside of modes."""
    fake: Any = FakeTensor(mode, meta, like.device)
    if like.is_conj() or like.is_neg():
        with mode:
            fake = torch._conj(fake) if like.is_conj() else fake
            fake = torch._neg_view(fake) if like.is_neg() else fake
    made: FakeTensor = fake
    return made


def storage_key(storage: Storage) -> int:
    """A number that no other storage alive has: PyTorch keeps one Python object of each as long as it lives."""
    return id(storage)


def keeps_graph() -> bool:
    """Inside a backward pass: was ``retain_graph`` asked for, so that every saved tensor may be read again?"""
    return bool(_autograd._get_current_graph_task_keep_graph())


def in_backward_pass() -> bool:
    """Is autograd's engine running on this thread?"""
    return bool(_engine._current_graph_task_id() != -1)


def forward_sequence_number() -> int:
    """Inside an operator: the number of the autograd node that was made for it, if one was."""
    return int(_autograd._get_sequence_nr()) - 1


def running_node() -> tuple[str, int] | None:
    """Inside a backward pass: name and sequence number of the node that runs."""
    node = _engine._current_autograd_node()
    return None if node is None else (str(node.name()), int(node._sequence_nr()))


def no_modes() -> AbstractContextManager[Any]:
    """A context in which operators run for real, whatever traces them outside."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def is_ordered_as_channels_last(tensor: torch.Tensor) -> bool:
    """Do the strides of images say that channels come last, gaps or not? Kernels go by it where they copy a tensor."""
    return suggest_memory_format(tensor) not in (torch.contiguous_format, torch.preserve_format)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()``, of which no mode hears: in a mode it would take 60 times as long."""
    with _DisableTorchDispatch():
        return tensor.detach()


def alias(tensor: torch.Tensor, place: tuple[Any, Any, int] | None = None) -> torch.Tensor:
    """Inside an operator: the same storage and version counter in a tensor that no autograd node will hold on to.

    Args:
        tensor: any tensor.
        place: shape, strides and offset in the storage; None for those of ``tensor``.
    """
    # What ``torch.overrides.enable_reentrant_dispatch`` does, at a third of its time.
    with _engine._RestorePythonTLSSnapshot():
        return tensor.detach() if place is None else tensor.detach().as_strided(*place)


def copy_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage in which a tensor lies, as a flat tensor."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage.clone(), 0, (storage.nbytes() // tensor.element_size(),), (1,))


class BelowAutograd:
    """A context in which operators run as they did when they were seen: after autograd and autocast.

    Gradients are enabled or not as they are outside, until ``enable_grad`` says otherwise.
    """

    __slots__ = ("_autocasts", "_grad_mode", "_guard")

    def __enter__(self) -> None:
        self._grad_mode = torch.is_grad_enabled()
        self._autocasts: list[str] = []
        if _engine._is_any_autocast_enabled():
            self._autocasts = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
            for kind in self._autocasts:
                torch.set_autocast_enabled(kind, False)
        self._guard = _engine._AutoDispatchBelowAutograd()
        self._guard.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.__exit__(kind, error, trace)
        enable_grad(self._grad_mode)
        for device in self._autocasts:
            torch.set_autocast_enabled(device, True)


def autocast_to_lower(*values: torch.Tensor | None) -> tuple[Any, ...]:
    """Tensors as autocast hands them to an operator that runs in lower precision; None stays None."""
    device = next(t.device.type for t in values if t is not None)
    if device != "cpu" or not torch.is_autocast_enabled(device):
        return values
    wanted = torch.get_autocast_dtype(device)

    def lower(tensor: torch.Tensor | None) -> torch.Tensor | None:
        stays = tensor is None or tensor.dtype is torch.float64 or not tensor.is_floating_point()
        return tensor if tensor is None or stays else tensor.to(wanted)

    return tuple(map(lower, values))


def enable_grad(enabled: bool) -> None:
    """Enable gradients or not, without the context manager that ``torch.set_grad_enabled`` makes."""
    _engine._set_grad_enabled(enabled)


def sharding() -> Any:
    """The module ``remat.torch._fsdp`` where ``fully_shard`` is imported; else None, since importing it takes long."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    from remat.torch import _fsdp

    return _fsdp


def is_one_of_several() -> bool:
    """Is this process one of a process group?"""
    dist = torch.distributed
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def process_group() -> tuple[int, int, Any]:
    """This process's rank, how many there are, and the store in which they found each other."""
    dist = torch.distributed
    return dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()


@contextmanager
def observed_sharding(observer: Any) -> Iterator[None]:
    """Inside, somebody is told what ``fully_shard`` does: a ``remat.torch._fsdp.Observer``."""
    used = sharding()
    if used is None:
        yield
        return
    used.observe(observer)
    try:
        yield
    finally:
        used.ignore(observer)


def reduction(steps: Iterable[Any]) -> Any:
    """What decides what ``fully_shard`` does with the gradients of the next step; see ``_fsdp.reduction``."""
    return None if (sharded := sharding()) is None else sharded.reduction(steps)


@contextmanager
def last_of_several(steps: Iterable[Any]) -> Iterator[Any]:
    """Inside, a step is traced as the one that reduces what others left; gives ``reduction`` of then."""
    if (sharded := sharding()) is None:
        yield None
        return
    with sharded.last_of_several(steps) as found:
        yield found


def gather(tensor: torch.Tensor) -> None:
    """Bring a parameter back that ``fully_shard`` let go of; does nothing for other tensors."""
    if (sharded := sharding()) is not None:
        sharded.gather(tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a distributed tensor (DTensor) that lies in this process; any other tensor as it is."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def placement(tensor: Any) -> Any:
    """How a distributed tensor (DTensor) is distributed, for ``distributed``."""
    return tensor._spec


def distributed_tensors() -> Any:
    """The module ``remat.torch._dtensor`` where there are distributed tensors; else None."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from remat.torch import _dtensor

    return _dtensor


def runs_on_parts(types: Iterable[type]) -> bool:
    """Is one of these types that of a tensor which runs operators on others? See ``_dtensor``."""
    used = distributed_tensors() if types else None
    return used is not None and used.runs_on_parts(types)


def distribution_unseen(*, sends: bool) -> AbstractContextManager[None]:
    """Inside, modes see of distributed tensors what runs on their parts. See ``_dtensor.unseen``."""
    used = distributed_tensors()
    return nullcontext() if used is None else used.unseen(sends=sends)


def distributed(part: torch.Tensor, placement: Any) -> torch.Tensor:
    """A distributed tensor of its local part."""
    from remat.torch import _dtensor

    return _dtensor.whole(part, placement)


_COLLECTIVES: Final = {
    "all_reduce": "AllReduce",
    "all_gather_into_tensor": "AllGather",
    "reduce_scatter_tensor": "ReduceScatter",
    "all_to_all_single": "AllToAll",
    "broadcast": "Broadcast",
    "wait_tensor": "",
}
"""Functional collectives of PyTorch 2.13, by what NCCL calls them; "" for the wait. One that is missing runs as any
other silent operator, and its time is not counted."""


def run_composite(func: OpOverload, *args: Any) -> Any:
    """An operator as PyTorch composes it of others on every device, whatever a device's own kernel does."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def before_forward(wrapper: Any) -> None:
    """What ``DistributedDataParallel`` does before it calls its module; the arguments stay where they are."""
    wrapper._pre_forward()


def after_forward(wrapper: Any, result: Any) -> Any:
    """What ``DistributedDataParallel`` does with the result of its module."""
    return wrapper._post_forward(result)


def collective_kind(func: OpOverload) -> str | None:
    """What NCCL calls a functional collective; "" for the wait for one, None for any other operator."""
    return _COLLECTIVES.get(func._opname) if func.namespace == "_c10d_functional" else None


def is_silent(func: OpOverload) -> bool:
    """Is it no operator of the step: a query, a marker for a profiler, a wait, a collective that makes no tensor?"""
    return func.namespace in _SILENT_NAMESPACES and not collective_kind(func)


def flop_formula(func: OpOverload) -> Callable[..., Any] | None:
    """PyTorch's own count of an operator's floating-point operations, where it has one."""
    from torch.utils.flop_counter import flop_registry

    formula: Callable[..., Any] | None = flop_registry.get(func._overloadpacket)
    return formula


@cache
def is_mutable(func: OpOverload) -> bool:
    """Does the operator's schema say that it writes to an argument?"""
    return bool(func._schema.is_mutable)


@cache
def is_factory(func: OpOverload) -> bool:
    """Is it an operator that makes a tensor from options, such as ``zeros`` and ``empty_like``?

    PyTorch's functions for these run below autograd. What they hand out begins a version counter of its own, which
    nothing shares that is made inside of the operator.
    """
    return any(argument.name == "pin_memory" for argument in func._schema.arguments)


def written_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the operator writes to, as its schema says; lists of tensors flattened."""
    found: list[Any] = []
    for place, name in _written_places(func):
        value = args[place] if place is not None and place < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            found.append(value)
        else:
            found.extend(one for one in tree_leaves(value) if isinstance(one, torch.Tensor))
    return found


@cache
def _written_places(func: OpOverload) -> list[tuple[int | None, str]]:
    """Place, None where there is none, and name of each argument that the operator writes to."""
    return [
        (None if argument.kwarg_only else place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


# The operators with the tag "reduction" in PyTorch 2.13, for PyTorch 2.9, which has no such tag.
_REDUCTIONS = frozenset(
    [
        "all",
        "amax",
        "amin",
        "aminmax",
        "any",
        "argmax",
        "argmin",
        "count_nonzero",
        "linalg_vector_norm",
        "logsumexp",
        "max",
        "mean",
        "min",
        "nansum",
        "norm",
        "prod",
        "std",
        "std_mean",
        "sum",
        "var",
        "var_mean",
    ]
)


def is_reduction(func: OpOverload) -> bool:
    """Is the operator a sum, a maximum or the like?"""
    if tag := getattr(torch.Tag, "reduction", None):
        return tag in func.tags
    return str(func._schema.name).removeprefix("aten::") in _REDUCTIONS and torch.Tag.pointwise not in func.tags


@cache
def generator_argument(func: OpOverload) -> int | None:
    """The place of the argument with the generator to draw from, if the operator takes one."""
    return next((n for n, argument in enumerate(func._schema.arguments) if argument.name == "generator"), None)


STANDS_FOR: Final = "remat_stands_for"
"""The attribute of a leaf that names the tensor whose ``grad`` is filled in its place."""


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose ``grad`` a backward pass from the loss fills."""
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    open_nodes: list[Any] = [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaf = vars(node.variable).get(STANDS_FOR, node.variable)
            found[id(leaf)] = leaf
        open_nodes.extend(successor for successor, _ in node.next_functions)
    return list(found.values())


def by_tensor() -> MutableMapping[torch.Tensor, Any]:
    """A dictionary with tensors as keys, told apart as objects, that keeps none of them alive."""
    found: MutableMapping[torch.Tensor, Any] = WeakTensorKeyDictionary()
    return found


def memory_events(profile: Any) -> list[tuple[int, int]]:
    """(address, bytes) of each allocation on the CPU that ``torch.profiler`` saw, negative where freed."""
    found: list[tuple[int, int, int]] = []
    open_events = list(profile.profiler.kineto_results.experimental_event_tree())
    while open_events:
        event = open_events.pop()
        open_events.extend(event.children)
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    # The sort is stable: what is freed and taken at the same nanosecond stays in order.
    return [(address, size) for _, address, size in sorted(found, key=lambda one: one[0])]


def allocations(run: Callable[[], object]) -> list[int]:
    """Bytes that a call takes from the CPU's allocator, one after the other, negative where they are given back.

    It runs in a thread of its own, where no dispatch mode, autocast or profiler of the caller's is on. This is the
    profiler of old, which prints nothing; ``torch.profiler`` of 2.13 writes two lines at each use.
    """
    number = torch.get_num_threads()

    def profiled() -> list[int]:
        # OpenMP has a number of threads for each thread that asks.
        torch.set_num_threads(number)
        result, changes = with_allocations(run)
        del result
        assert changes is not None, "no profiler is on in a new thread"
        return changes

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(profiled).result()


def with_allocations(run: Callable[[], Any], device_type: str = "cpu") -> tuple[Any, list[int] | None]:
    """What a call returns, and the same of it, called in this thread; None in place of the bytes under a profiler.

    Args:
        run: the call.
        device_type: whose bytes, "cpu" or "cuda".
    """
    profiler: Any = torch._C._autograd
    if profiler._profiler_enabled():
        return run(), None
    how: Any = torch._C._profiler
    what = how.ProfilerConfig(how.ProfilerState.CPU, False, True, False, False, False, how._ExperimentalConfig())
    profiler._enable_profiler_legacy(what)
    try:
        result = run()
    finally:
        threads = profiler._disable_profiler_legacy()
    events = (event for events in threads for event in events)
    changes = [event for event in events if event.kind() == "memory_alloc"]
    if device_type == "cpu":
        return result, [event.cpu_memory_usage() for event in changes if event.cpu_memory_usage()]
    return result, [event.cuda_memory_usage() for event in changes if event.cuda_memory_usage()]


def weak(storage: Storage) -> Callable[[], Storage | None]:
    """A weak reference; the same object stands for a storage as long as that lives."""
    return weakref.ref(storage)


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """An optimizer's ``step`` without the hooks that PyTorch puts around it when the first of its kind is made."""
    step: Any = kind.step
    plain: Callable[[torch.optim.Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What runs before an optimizer's step: hooks of its own, and of all optimizers."""
    return [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]


def wrapper_like(kind: Any, tensor: torch.Tensor) -> Any:
    """A tensor of a class with a ``__torch_dispatch__`` that looks like another one and has no memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Does anybody look at the gradient of a leaf, before it is added to ``grad`` or after?"""
    hooks: tuple[Any, ...] = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return any(hooks)
