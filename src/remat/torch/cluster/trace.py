"""A step on a mesh to the graph of one of its devices.

Blocks that repeat are traced with a few of them, see ``remat.transform.repeat``: the list of blocks is cut short, the
step is traced, and the graph is grown to the number of blocks that the model has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.running.cost_model import DeviceProfile
from remat.running.network import Mesh, Network, Traffic, with_overlap
from remat.torch import _private
from remat.torch.cluster.shard import blocks_of, shard
from remat.torch.trace.fake_step import record_step
from remat.torch.trace.trace import gpu_of, traced_step
from remat.torch.used_modules import used_modules
from remat.transform.repeat import TRACES, NotRepeated, repeated

Build: TypeAlias = Callable[[int], Sequence[Any]]
"""For a number of samples: a loss function and its arguments, anew with each call, the model on the meta device."""

_SHORTEST: Final = 3
"""Blocks of the shortest trace: what ``fully_shard`` holds and prefetches differs at the first two and at the last one.
With fewer, the traces do not repeat, and every block is traced."""


@dataclass(frozen=True)
class MeshOptions:
    """How a step runs on a mesh.

    Attributes:
        network: the mesh and its links.
        profile: of each device.
        optimizer: name of a class of ``torch.optim``; None leaves the update out.
        styles: see ``shard``.
        mixed_precision: see ``shard``.
        reshard_after_forward: see ``shard``.
        whole: trace every block, also where they repeat.
    """

    network: Network
    profile: DeviceProfile
    optimizer: str | None = None
    styles: dict[str, str] | None = None
    mixed_precision: str | None = None
    reshard_after_forward: bool | None = None
    whole: bool = False


@dataclass(frozen=True)
class MeshTrace:
    """The step of one device.

    Attributes:
        graph: in which a collective takes only as long as computation waits for it.
        traffic: what collectives take.
        parameters: of the whole model.
        blocks: how many blocks repeat.
        traced_blocks: the blocks of each trace that the graph was made of.
    """

    graph: Graph
    traffic: Traffic
    parameters: int
    blocks: int
    traced_blocks: tuple[int, ...]


def trace_on_mesh(build: Build, samples: int, options: MeshOptions) -> MeshTrace:
    """Trace a step as one device of a mesh runs it.

    Args:
        build: the step.
        samples: that one device computes; those of a group along ``tensor`` are the same.
        options: how it runs.

    Raises:
        UnsupportedStep: where the step cannot be traced or distributed.
    """
    model = model_of(build(samples))
    _, blocks = blocks_of(model)
    count = 0 if blocks is None else len(blocks)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    note, period = "", 0 if blocks is None or options.whole else _period(list(blocks))
    lengths: tuple[int, ...] = ()
    if period:
        first = count % period + _SHORTEST * period
        lengths = tuple(first + more * period for more in range(TRACES))
    graph = None
    if lengths and lengths[-1] < count:
        try:
            graphs = [_traced(build, samples, options, length) for length in lengths]
            graph = repeated(graphs, (count - lengths[0]) // period)
            note = (
                f"{count} blocks were made of traces with {', '.join(map(str, lengths))}; what is counted above is "
                f"counted in a step with {lengths[-1]}"
            )
        except (NotRepeated, IndexError) as error:
            note = f"all {count} blocks were traced, since they do not repeat evenly ({error})"
    if graph is None:
        lengths = (count,)
        graph = _traced(build, samples, options, None)
    notes = (*graph.notes, *options.network.notes(), *((note,) if note else ()))
    graph, traffic = with_overlap(dataclasses.replace(graph, notes=notes))
    return MeshTrace(graph, traffic, parameters, count, lengths)


def model_of(made: Sequence[Any]) -> nn.Module:
    """The model of a loss function and its arguments.

    Raises:
        UnsupportedStep: if there is none or several, or its parameters have memory.
    """
    function, *args = made
    # One without parameters is a loss.
    found = [one for one in used_modules(function, args) if next(one.parameters(), None) is not None]
    if len(found) != 1:
        raise UnsupportedStep(
            f"{len(found) or 'no'} modules were found in the loss function; to distribute the model, remat takes a "
            "function that refers to one module, or is given it as an argument"
        )
    if real := [name for name, parameter in found[0].named_parameters() if parameter.device.type != "meta"]:
        raise UnsupportedStep(
            f"the parameter {real[0]} has memory: make the model on the meta device, inside of "
            "`with torch.device('meta'):`"
        )
    return found[0]


def _traced(build: Build, samples: int, options: MeshOptions, length: int | None) -> Graph:
    """The step with so many blocks; with all if None."""
    function, *args = build(samples)
    model = model_of((function, *args))
    _, blocks = blocks_of(model)
    if length is not None:
        assert blocks is not None
        del blocks[length:]
    with _on_mesh(model, options) as axes:
        optimizer = None if options.optimizer is None else _optimizer(model, options.optimizer)
        gpu = gpu_of(options.profile, args, ("meta",))
        buckets = _bucket_bytes(model) if options.network.mesh.is_replicated else 0
        recording = record_step(function, args, optimizer, gpu=gpu, axes=axes, resident_bytes=buckets)
        return traced_step(recording, options.profile, options.network).graph


@contextmanager
def _on_mesh(model: nn.Module, options: MeshOptions) -> Iterator[dict[str, str]]:
    """Inside, a model is distributed; the axis for the name of each group of processes."""
    from remat.torch import _simulated

    mesh: Mesh = options.network.mesh
    with _simulated.simulated(mesh) as devices:
        shard(
            model,
            mesh,
            devices,
            styles=options.styles,
            mixed_precision=options.mixed_precision,
            reshard_after_forward=options.reshard_after_forward,
        )
        yield {devices.get_group(axis).group_name: axis for axis, _ in mesh.axes}


def _bucket_bytes(model: nn.Module) -> int:
    """What ``DistributedDataParallel`` copies gradients into to reduce them."""
    parts = (_private.local(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return sum(part.numel() * part.element_size() for part in parts)


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    found = next((kind for known, kind in vars(torch.optim).items() if known.lower() == name.lower()), None)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise UnsupportedStep(f"optimizer {name!r}: torch.optim has none of this name; such as AdamW or SGD")
    make: Any = found
    optimizer: torch.optim.Optimizer = make(list(model.parameters()), lr=1e-3)
    return optimizer


def _period(blocks: Sequence[nn.Module]) -> int:
    """After how many blocks the same kinds of blocks come again; 0 where they do not."""
    kinds = [_kind(number, block) for number, block in enumerate(blocks)]
    most = len(kinds) // 2
    return next((p for p in range(1, most + 1) if all(a == b for a, b in zip(kinds, kinds[p:], strict=False))), 0)


def _kind(number: int, block: nn.Module) -> Any:
    """What two blocks have in common that compute the same; their number is left out."""
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in (*block.named_parameters(), *block.named_buffers()))
    plain = tuple(
        (path, name, value)
        for path, module in block.named_modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str)
        and not (value == number and name.endswith(("idx", "index", "id")))
    )
    return repr(block), shapes, plain
