"""Every symbol of PyTorch that simulating many processes in one takes, and that is not documented as public.

A process group of PyTorch's backend "fake" has as many ranks as it is told, of which this process is the first, and
sends nothing. Modules are sharded over it by PyTorch's own code. The symbols are where PyTorch 2.9 to 2.15 have them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from remat.core.errors import UnsupportedStep
from remat.running.network import Mesh
from remat.torch import _private

_own_shapes: Any = ShardingPropagator._propagate_tensor_meta_non_cached


@contextmanager
def simulated(mesh: Mesh) -> Iterator[Any]:
    """Inside, this process is rank 0 of as many as a mesh has devices; the mesh as PyTorch's ``DeviceMesh``.

    Raises:
        UnsupportedStep: where the process is one of several already.
    """
    if dist.is_initialized():
        raise UnsupportedStep(
            "a mesh is simulated in a process of its own, and this one belongs to a process group; call "
            "torch.distributed.destroy_process_group() before, or plan in another process"
        )
    _forget_groups()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.devices)
    try:
        # Results of collectives are plain tensors, as under torch.compile: nothing is sent that could be waited for.
        with (
            mock.patch.object(functional, "_are_we_tracing", return_value=True),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", _shapes),
        ):
            sizes, names = tuple(size for _, size in mesh.axes), tuple(name for name, _ in mesh.axes)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
                yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
        _forget_groups()


def _forget_groups() -> None:
    """DTensor keeps how operators run on a mesh, and PyTorch 2.9 finds it again on a later mesh of the same shape."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


def _shapes(propagator: Any, *args: Any, **kwargs: Any) -> Any:
    """The shapes of a distributed operator's results, which DTensor finds by running it: no operator of the step."""
    with _private.no_modes():
        return _own_shapes(propagator, *args, **kwargs)
