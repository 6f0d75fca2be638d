"""What a node of a joint graph is: a view, a random draw, a call that may run twice; what it reads and how large it is.

A *value* is a node with a storage of its own. Views are no values: they are made anew, at no cost, wherever they are
read. Nor are numbers, which Python takes out of a tensor (``.item()``) and computes with. An operator with several
results is one node, and its results are the values.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx

from remat.torch._private import OpOverload, is_mutable, tree_leaves
from remat.torch.graph_mode.collectives import SIZE_BYTES, Gather, GatheredParameter, OwnCode
from remat.torch.graph_mode.layouts import InLayout, laid_out
from remat.torch.trace import aot_notes, cpu_times, cpu_trials, gpu_scratch, op_facts, stand_ins

# Operators that hand on the storage of their argument, though their schema does not say so.
_SILENT_VIEWS: Final = frozenset(
    f"aten::{name}"
    for name in ("_unsafe_view", "lift_fresh", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
)

_aten: Final = torch.ops.aten

# While it traces, AOTAutograd turns a write of random numbers into an operator that returns them. Eager PyTorch writes.
_FILLS: Final[dict[Any, Any]] = {
    _aten.bernoulli.p: _aten.bernoulli_.float,
    _aten.bernoulli.Tensor: _aten.bernoulli_.Tensor,
    _aten.uniform.default: _aten.uniform_.default,
    _aten.normal_functional.default: _aten.normal_.default,
    _aten.exponential.default: _aten.exponential_.default,
    _aten.log_normal.default: _aten.log_normal_.default,
    _aten.geometric.default: _aten.geometric_.default,
    _aten.cauchy.default: _aten.cauchy_.default,
    _aten.random.default: _aten.random_.default,
    getattr(_aten.random, "from"): getattr(_aten.random_, "from"),
    _aten.random.to: _aten.random_.to,
}


class Fill:
    """Random numbers in a new tensor, as ``torch.empty(...).bernoulli_(0.5)`` draws them.

    Args:
        func: the operator that writes them.
        like: a tensor of the same shape, strides, dtype and device.

    Attributes:
        func: the operator.
        device: of the tensor.
    """

    def __init__(self, func: OpOverload, like: torch.Tensor) -> None:
        self.func = func
        self.__name__ = op_facts.base_name(func).partition("::")[2]
        self.__module__ = __name__
        self.__qualname__ = self.__name__
        self.device = like.device
        self._geometry = (tuple(like.shape), tuple(like.stride()))
        self._dtype = like.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The numbers; ``generator=`` says where from."""
        made: torch.Tensor = torch.empty_strided(*self._geometry, dtype=self._dtype, device=self.device)
        self.func._op(made, *args, **kwargs)
        return made


def with_fills(joint: fx.GraphModule) -> None:
    """Draw random numbers as eager PyTorch does, into a tensor of the shape and strides of the one it writes to."""
    for node in list(joint.graph.nodes):
        func = _FILLS.get(node.target) if node.op == "call_function" else None
        if func is None or not isinstance(node.args[0], fx.Node):
            continue
        like = node.args[0].meta["val"]
        if not stand_ins.is_dense(like):
            continue
        with joint.graph.inserting_before(node):
            fill = joint.graph.call_function(Fill(func, like), tuple(node.args[1:]), dict(node.kwargs))
        fill.meta = {**node.meta, "val": torch.empty_like(like)}
        node.replace_all_uses_with(fill)
        joint.graph.erase_node(node)


def without_idle_views(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Read what lies at a place of a storage directly, where views lead away from the place and back to it.

    Autograd detaches what it reads again, and transposes a weight twice to multiply with it.
    """
    (output,) = joint.graph.find_nodes(op="output")
    (results,) = output.args
    assert isinstance(results, list | tuple)
    returned = Counter(one for one in results if isinstance(one, fx.Node))
    in_storage = Counter(map(base_of, returned))
    gradients = set(results[num_fwd_outputs:])
    for node in list(joint.graph.nodes):
        same = _same_place(node) if is_view(node) and not is_part(node) else None
        if same is None:
            continue
        # What is returned stays a tensor of its own, unless it is the only one in its storage.
        is_alone = node in gradients and returned[node] == 1 and in_storage[base_of(same)] == 1
        is_alone = is_alone and (is_call(same) or is_view(same))
        node.replace_all_uses_with(same, delete_user_cb=lambda user, alone=is_alone: alone or user is not output)
        if is_alone:
            returned[same] = returned.pop(node)
            gradients.add(same)


def _same_place(view: fx.Node) -> fx.Node | None:
    """What a view is made of, directly or through others, that lies where the view does."""
    if view.meta.get("saved_tensor_with_no_vc_check"):
        return None
    wanted = _place(view)
    node = view
    while wanted is not None and is_view(node):
        node = _whole(node)
        if _place(node) == wanted:
            return node
    return None


def _place(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    kind = (value.dtype, value.is_conj(), value.is_neg())
    return (tuple(value.shape), tuple(value.stride()), value.storage_offset(), kind)


def is_part(node: fx.Node) -> bool:
    """Is the node one of the results of an operator with several?"""
    return node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """Does the node share the storage of what it reads?"""
    if node.op != "call_function":
        return False
    if is_part(node):
        return is_view(_whole(node))
    if isinstance(node.target, GatheredParameter):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    if is_mutable(node.target):
        return False
    return node.target.is_view or op_facts.base_name(node.target) in _SILENT_VIEWS


def is_number(node: fx.Node) -> bool:
    """Is the node a number of Python's, or what it made of such numbers?"""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymFloat)


def _whole(part: fx.Node) -> fx.Node:
    whole = part.args[0]
    assert isinstance(whole, fx.Node)
    return whole


def base_of(node: fx.Node) -> fx.Node:
    """The value, or the input, in whose storage a node lies."""
    while is_view(node) or writes(node):
        node = _whole(node)
    return node


def outputs_of(joint: fx.GraphModule) -> list[fx.Node]:
    """What a joint graph returns, numbers and what is None left out."""
    (output,) = joint.graph.find_nodes(op="output")
    return [one for one in tree_leaves(output.args) if isinstance(one, fx.Node)]


def values_read(node: fx.Node) -> list[fx.Node]:
    """The values and inputs that a call reads, each once."""
    return [value for value in dict.fromkeys(_storages_read(node)) if value.op != "get_attr"]


def _storages_read(node: fx.Node) -> Iterator[fx.Node]:
    for one in node.all_input_nodes:
        if is_number(one):
            yield from _storages_read(one)
        else:
            yield base_of(one)


def results_of(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The values that a call makes, each with its place among the results; those that nobody reads are left out."""
    if writes(node):
        return []
    if isinstance(node.meta.get("val"), list | tuple):
        return sorted((int(user.args[1]), user) for user in node.users if is_part(user))  # type: ignore[arg-type]
    return [(0, node)]


def unread_bytes(node: fx.Node) -> int:
    """Bytes of those results of a call that nobody reads: it makes them all the same, and they are gone after it."""
    values = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(values, list | tuple):
        return 0
    read = {place for place, _ in results_of(node)}
    unread = (value for place, value in enumerate(values) if place not in read)
    return sum(_elements_bytes(value) for value in unread if isinstance(value, torch.Tensor))


def is_call(node: fx.Node) -> bool:
    """Is the node an operator that makes something, rather than a view, a part of another's results or a number?"""
    return node.op == "call_function" and not (is_part(node) or is_view(node) or is_number(node))


def writes(node: fx.Node) -> bool:
    """Does the call write to an argument, as its schema says?"""
    return isinstance(node.target, OpOverload) and is_mutable(node.target)


def statistics_of(node: fx.Node) -> list[fx.Node]:
    """The buffers of a normalisation that the call moves, though its schema does not say so."""
    if not isinstance(node.target, OpOverload) or not op_facts.may_write(node.target) or is_mutable(node.target):
        return []
    args, _ = arguments(node)
    moved = {id(tensor) for tensor in op_facts.running_statistics(node.target, tuple(args))}
    return [one for one in node.all_input_nodes if id(one.meta.get("val")) in moved]


def draws(node: fx.Node) -> bool:
    """Does the call draw random numbers?"""
    if isinstance(node.target, Fill):
        return True
    if not isinstance(node.target, OpOverload) or not op_facts.may_draw(node.target):
        return False
    args, kwargs = arguments(node)
    return op_facts.is_random(node.target, tuple(args), kwargs)


def may_repeat(node: fx.Node, overwritten: set[fx.Node]) -> bool:
    """May the call run again with the same result and no other effect?

    Args:
        node: the call.
        overwritten: inputs that the step writes to.
    """
    args, kwargs = arguments(node)
    read = set(values_read(node)) - set(statistics_of(node))
    if read & overwritten or kwargs.get("generator") is not None:
        return False
    if draws(node):
        # Another state of the generator is put in for the second run.
        return not isinstance(node.target, OpOverload) or op_facts.may_repeat_draw(node.target)
    if isinstance(node.target, Gather) or node.target is laid_out:
        return True
    func = node.target.func if isinstance(node.target, InLayout) else node.target
    if not isinstance(func, OpOverload) or is_mutable(func):
        return False
    return op_facts.may_repeat(func, tuple(args), kwargs, on_gpu=device_of(node).type != "cpu")


def device_of(node: fx.Node) -> torch.device:
    """Where the call computes."""
    for value in tensors_of(node):
        return value.device
    for one in node.all_input_nodes:
        for value in tensors_of(one):
            return value.device
    return torch.device("cpu")


def attribute_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """What a node that reads an attribute of the module stands for: a constant of the function, or a part of it."""
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def flops(node: fx.Node, *, on_cpu: bool) -> float:
    """Floating-point operations of one run, or those of a product that a CPU could do in its time."""
    args, kwargs = arguments(node)
    if isinstance(node.target, OwnCode):
        return cpu_times.collective_flops() if on_cpu and node.target.moved_bytes else 0.0
    func = node.target.func if isinstance(node.target, Fill | InLayout) else node.target
    if not isinstance(func, OpOverload):
        return 0.0
    call = (func, tuple(args), kwargs, node.meta.get("val"))
    counted = op_facts.flops(*call)
    return cpu_times.flops(*call, counted) if on_cpu else counted


def scratch_bytes(node: fx.Node) -> int:
    """Bytes that a call needs while it runs, beside what it reads and makes."""
    if isinstance(node.target, OwnCode):
        return node.target.scratch_bytes
    if not isinstance(node.target, OpOverload):
        return 0
    args, kwargs = arguments(node)
    if device_of(node).type == "cpu":
        return cpu_trials.scratch_bytes(node.target, tuple(args), kwargs, node.meta.get("val"))
    return gpu_scratch.workspace_bytes(node.target, tuple(args), kwargs, node.meta.get("val"))


def size_bytes(node: fx.Node) -> int:
    """Bytes of the storage of a value or an input, or of its elements where the storage is not known."""
    if SIZE_BYTES in node.meta:
        return int(node.meta[SIZE_BYTES])
    return sum(max(_elements_bytes(t), _storage_bytes(t)) for t in tensors_of(node))


def _elements_bytes(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(span * tensor.element_size())


def _storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else 0


def moved_bytes(node: fx.Node) -> int:
    """Bytes that a call reads and makes."""
    if isinstance(node.target, OwnCode):
        return node.target.moved_bytes
    read = sum(_dense_bytes(t) for one in node.all_input_nodes for t in tensors_of(one))
    return read + sum(_dense_bytes(t) for t in tensors_of(node))


def elements_bytes(node: fx.Node) -> int:
    """Bytes of the elements of what a node makes, whatever its storage holds beside them."""
    return sum(_dense_bytes(t) for t in tensors_of(node))


def _dense_bytes(tensor: torch.Tensor) -> int:
    return int(math.prod(tensor.shape)) * tensor.element_size()


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that tracing saw for a node."""
    return (t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor))


def arguments(node: fx.Node) -> Any:
    """The arguments of a call, with the tensors that tracing saw."""
    # Quicker than a map over trees of any kind; this is asked several times for each call.
    args: Any = fx.map_arg(node.args, _value)
    kwargs: Any = fx.map_arg(dict(node.kwargs), _value)
    return args, kwargs


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def layer_of(node: fx.Node) -> str:
    """The path of the module that a node belongs to."""
    path = aot_notes.layer_of(node)
    for written in ("._modules", "]", "'", '"', "L[", "G["):
        path = path.replace(written, " ")
    parts = [part for part in path.replace("[", " ").replace(".", " ").split() if part != "self"]
    return ".".join(parts)
