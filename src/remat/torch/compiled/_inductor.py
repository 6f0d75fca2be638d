"""Every symbol of Inductor and AOTAutograd in use; ``tests/torch/test_torch_private.py`` checks each.

Importing this imports Inductor, which takes seconds: only ``remat.torch.compile`` does so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    _must_be_in_backward,
    _must_be_in_forward,
    min_cut_rematerialization_partition,
)
from torch._inductor import ir, sizevars
from torch._inductor.codegen import cpp
from torch._inductor.codegen import wrapper as lines
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.config import patch
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.virtualized import V
from torch.utils.checkpoint import CheckpointPolicy

from remat.torch._dynamo import weakly

__all__ = [
    "BackendCompilerFailed",
    "FailOnRecompileLimitHit",
    "PythonWrapperCodegen",
    "V",
    "compile_fx_inner",
    "ir",
    "lines",
    "patch",
]

_SETTINGS: Final = "remat_settings"  # Where a module carries its settings to the point where it is compiled.


class _Partitioner(CustomPartitionerFn):
    """Hands a joint graph to a function that parts it."""

    def __init__(self, partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]) -> None:
        self._partition = partition

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._partition(gm, **kwargs)

    def uuid(self) -> None:
        """No key for Inductor's caches: what this does follows from a budget and from the time that planning had."""


def backend(partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]) -> Callable[..., Any]:
    """A backend for ``torch.compile``: Inductor, with this method to part forward and backward pass.

    What it compiles is not kept on disk: the same graph is parted in another way under another budget.
    """
    patches = {"custom_partitioner_fn": _Partitioner(weakly(partition)), "fx_graph_cache": False}

    def compile_with(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(enable_autograd_cache=False), strides_remembered():
            return compile_fx(module, inputs, inner_compile=_compile_part, config_patches=patches, **kwargs)

    return compile_with


# What Inductor works out of the indices of vector loops, by symbols alone, and remembers for the last 128 questions; by
# the files that ask for it. PyTorch 2.9 has it in one of them.
_STRIDES: Final[dict[tuple[Any, str], Any]] = {
    (file, name): own
    for file in (sizevars, cpp)
    for name in ("stride_at", "simplify_index_in_vec_range", "stride_at_vec_range")
    if hasattr(own := getattr(file, name, None), "__wrapped__")
}


@contextmanager
def strides_remembered() -> Iterator[None]:
    """Inside, Inductor works each stride out once.

    Transformers' Mamba asks 1,245 questions over and over: its code was written in 16 to 28 s in place of 57, and a
    plan has it written several times.
    """
    remembering: dict[Any, Any] = {own: cache(own.__wrapped__) for own in _STRIDES.values()}
    for (file, name), own in _STRIDES.items():
        setattr(file, name, remembering[own])
    try:
        yield
    finally:
        for (file, name), own in _STRIDES.items():
            setattr(file, name, own)


def _compile_part(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    with patch(dict(module.meta.get(_SETTINGS, {}))):
        return compile_fx_inner(module, inputs, **kwargs)


def use_settings(modules: Iterable[fx.GraphModule], settings: Mapping[str, Any]) -> None:
    """Have these modules compiled with other settings than Inductor's present ones."""
    for module in modules:
        module.meta[_SETTINGS] = settings


def number_of(size: Any) -> int:
    """A size of Inductor's as a number, an example where it is symbolic, 0 where there is none."""
    known: Any = V.graph.sizevars
    # PyTorch 2.9 has the older name.
    hint = known.optimization_hint if hasattr(known, "optimization_hint") else known.size_hint
    return int(hint(size, fallback=0))


def simplified(joint: fx.GraphModule) -> fx.GraphModule:
    """The joint graph without dead code and common subexpressions, as PyTorch's own partitioner begins."""
    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)
    joint.recompile()
    return joint


def own_partition(
    joint: fx.GraphModule,
    options: dict[str, Any],
    activation_memory_budget: float = 1.0,
    must_save: Callable[[fx.Node], bool] = lambda node: False,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward pass as ``torch.compile`` parts them, given its own budget for activations.

    Args:
        joint: the joint graph, which is left alone.
        options: those with which AOTAutograd calls a partitioner.
        activation_memory_budget: a share of what is kept where time alone decides, 1.0.
        must_save: is a node never made again?
    """
    copy = copied(joint)
    for node in copy.graph.nodes:
        if must_save(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with functorch_config.patch(activation_memory_budget=activation_memory_budget):
        found: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(copy, (), **options)
    return found


def extracted(
    joint: fx.GraphModule, saved: list[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward pass with these values handed on between them, in the convention of AOTAutograd."""
    found: tuple[fx.GraphModule, fx.GraphModule] = _extract_fwd_bwd_modules(
        joint, saved, saved_sym_nodes=[], num_fwd_outputs=num_fwd_outputs
    )
    return found


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph in a module of its own; passes over it leave the first one alone."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    return fx.GraphModule(module, graph)


def is_tied(node: fx.Node) -> str:
    """The pass that a node must be in, since it writes to an input: "forward", "backward" or "" for neither."""
    if _must_be_in_backward(node):
        return "backward"
    return "forward" if _must_be_in_forward(node) else ""
