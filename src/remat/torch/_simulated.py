"""Every symbol of PyTorch that simulating many processes in one takes, and that is not documented as public.

A process group of PyTorch's backend "fake" has as many ranks as it is told, of which this process is the first, and
sends nothing. Modules are sharded over it by PyTorch's own code. The symbols are where PyTorch 2.9 to 2.15 have them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from remat.core.errors import UnsupportedStep
from remat.running.network import Mesh
from remat.torch import _dtensor


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
    _dtensor.forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.devices)
    try:
        with _dtensor.unseen(sends=False):
            sizes, names = tuple(size for _, size in mesh.axes), tuple(name for name, _ in mesh.axes)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
                yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
        _dtensor.forget_meshes()
