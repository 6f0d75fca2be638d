"""How a model is distributed over a mesh: by PyTorch's own ``parallelize_module`` and ``fully_shard``.

Blocks are found by their place: the longest ``ModuleList`` or ``Sequential`` of modules of one class. Each block is one
unit of ``fully_shard``, each embedding and each linear layer outside of the blocks another, and the model the last.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from remat.core.errors import UnsupportedStep
from remat.running.network import Mesh

STYLES: Final[dict[str, str]] = {
    "colwise": "the rows of a Linear's weight are cut: its input is whole, its output cut along the last axis",
    "rowwise": "the columns are cut: its input is cut along the last axis, and its output summed up by an all-reduce",
    "colwise_gathered": "as colwise, and the output is gathered: for the last layer, whose loss reads all of it",
    "rowwise_embedding": "the rows of an Embedding's weight are cut, and its output summed up by an all-reduce",
}
"""The styles of tensor parallelism by name, each one of ``torch.distributed.tensor.parallel``."""

DEFAULT_STYLES: Final[dict[str, str]] = {
    **{f"*.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wq", "wk", "wv")},
    **{f"*.{name}": "colwise" for name in ("gate", "up", "w1", "w3", "fc1", "c_fc")},
    **{f"*.{name}": "rowwise" for name in ("o_proj", "down_proj", "out_proj", "wo", "down", "w2", "fc2")},
    **{name: "rowwise_embedding" for name in ("*embed_tokens", "*tok_embeddings", "embedding", "*.embedding")},
    **{name: "colwise_gathered" for name in ("lm_head", "*.lm_head", "output")},
}
"""The styles of layers by pattern, for decoders that name their layers as Llama, Mistral and torchtitan do."""


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential | None]:
    """The name of the list of a model's repeated blocks, and the list; None where there is none."""
    best: tuple[str, nn.ModuleList | nn.Sequential | None] = "", None
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or (best[0] and name.startswith(f"{best[0]}.")):
            continue
        if len(module) > max(1, len(best[1] or ())) and len({type(block) for block in module}) == 1:
            best = name, module
    return best


def shard(
    model: nn.Module,
    mesh: Mesh,
    devices: Any,
    *,
    styles: Mapping[str, str] | None = None,
    mixed_precision: str | None = None,
    reshard_after_forward: bool | None = None,
) -> None:
    """Distribute a model, in place. Along ``data`` alone nothing is done: every device has the whole model.

    Args:
        model: on the meta device.
        mesh: as written.
        devices: the same as a ``DeviceMesh``.
        styles: for tensor parallelism, the style of each layer by a pattern of its name; ``DEFAULT_STYLES`` if None.
        mixed_precision: the dtype of parameters that ``fully_shard`` gathers, "bfloat16"; gradients are then reduced
            in float32.
        reshard_after_forward: as ``fully_shard`` takes it.

    Raises:
        UnsupportedStep: where a size does not divide, or a layer has no style.
    """
    if mesh.size("tensor") > 1:
        _cut_matrices(model, mesh, devices["tensor"], DEFAULT_STYLES if styles is None else styles)
    if mixed_precision is not None and mesh.size("fsdp") == 1:
        raise UnsupportedStep(
            f"mixed precision {mixed_precision} is what fully_shard gathers parameters in, and the mesh {mesh} has no "
            "axis fsdp; make the model in that dtype"
        )
    if mesh.size("fsdp") > 1:
        names = tuple(name for name, size in mesh.axes if name == "fsdp" or (name == "data" and size > 1))
        over = devices[names] if len(names) > 1 else devices[names[0]]
        _shard_fully(model, over, mixed_precision, reshard_after_forward)


def _cut_matrices(model: nn.Module, mesh: Mesh, devices: Any, styles: Mapping[str, str]) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    colwise: Any = ColwiseParallel
    rowwise: Any = RowwiseParallel
    make: dict[str, Callable[[], Any]] = {
        "colwise": colwise,
        "rowwise": rowwise,
        "colwise_gathered": lambda: colwise(output_layouts=Replicate()),
        "rowwise_embedding": lambda: rowwise(input_layouts=Replicate()),
    }
    size, found = mesh.size("tensor"), {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in styles.items() if fnmatch.fnmatch(name, pattern)), None)
        if style is None or not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if style not in STYLES:
            raise UnsupportedStep(f"{name}: there is no style {style!r}; the styles are {', '.join(STYLES)}")
        rows, columns = module.weight.shape
        cut = columns if style == "rowwise" else rows
        if cut % size:
            raise UnsupportedStep(
                f"{name}: its weight of {rows} x {columns} is cut {style}, and {cut} does not divide by tensor={size}"
            )
        found[name] = make[style]()
    if not found:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise UnsupportedStep(
            f"tensor={size}: no layer of this model has a name that a style is known for; its linear layers are "
            f"{', '.join(sorted({_pattern(name) for name in linear})[:8])}. Name their styles, such as "
            '{"*.query": "colwise", "*.dense": "rowwise"}'
        )
    parallelize_module(model, devices, found)


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _shard_fully(model: nn.Module, over: Any, mixed_precision: str | None, reshard_after_forward: bool | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if mixed_precision is not None:
        policy = MixedPrecisionPolicy(dtype_named(mixed_precision), torch.float32)
    given: dict[str, Any] = {"mesh": over, "mp_policy": policy, "shard_placement_fn": _along(over["fsdp"].size())}
    if reshard_after_forward is not None:
        given["reshard_after_forward"] = reshard_after_forward
    for unit in _units(model):
        fully_shard(unit, **given)
    fully_shard(model, mesh=over, mp_policy=policy, shard_placement_fn=given["shard_placement_fn"])


def _along(ranks: int) -> Callable[[nn.Parameter], Any]:
    """Along which axis a parameter is sharded: the first that divides, where axis 0 has fewer entries than ranks.

    The experts of a mixture in one parameter are such: ``fully_shard`` would pad eight of them to as many as ranks.
    """
    from torch.distributed.tensor import DTensor, Shard

    def choose(parameter: nn.Parameter) -> Any:
        if isinstance(parameter, DTensor) or parameter.dim() < 2 or parameter.shape[0] >= ranks:
            return None
        return next((Shard(axis) for axis in range(1, parameter.dim()) if parameter.shape[axis] % ranks == 0), None)

    return choose


def _units(model: nn.Module) -> Iterator[nn.Module]:
    name, blocks = blocks_of(model)
    if blocks is not None:
        yield from blocks
    shared = _shared_weights(model)
    inside = f"{name}." if name else ""
    for other, module in model.named_modules():
        outside = blocks is None or not other.startswith(inside)
        if outside and isinstance(module, nn.Linear | nn.Embedding) and module.weight not in shared and other:
            yield module


def _shared_weights(model: nn.Module) -> set[nn.Parameter]:
    """Weights that two modules have in common, which belong to the unit of the whole model."""
    seen: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                seen[parameter] = seen.get(parameter, 0) + 1
    return {parameter for parameter, times in seen.items() if times > 1}


def dtype_named(name: str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        UnsupportedStep: if PyTorch has none of this name that holds fractions.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UnsupportedStep(f"mixed precision {name!r}: this is no floating-point dtype; such as bfloat16")
    return found
