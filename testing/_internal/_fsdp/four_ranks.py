"""A base for suites that state what holds at four ranks: their device, a folder and meshes in common, named checks."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_ext.testing._internal._fsdp import device
from torch_ext.testing._internal._fsdp.cases import FSDPTest

__all__ = ["FourRankTest", "mesh_of", "mesh_of_first"]


@functools.cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """Return the mesh of that shape over the world, the last dimension named ``shard`` and one before it ``replicate``.

    All ranks call this together, the first time for each shape; it then lives as long as they do.
    """
    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh(device.get_devtype().type, sizes, mesh_dim_names=names)


@functools.cache
def mesh_of_first(size: int) -> DeviceMesh:
    """Return the mesh of the first ``size`` ranks. All ranks of the world call this together, as :func:`mesh_of`."""
    return DeviceMesh(device.get_devtype().type, list(range(size)))


class FourRankTest(FSDPTest):
    """An ``FSDPTest`` with four ranks on every device: two shards of two replicas, and shards that stay empty."""

    @property
    def world_size(self) -> int:
        return 4

    @property
    def device(self) -> torch.device:
        return device.rank_device(self.rank)

    def check_equal(self, what: str, found: Any, expected: Any, **tolerance: float) -> None:
        """As ``assertEqual``, with ``what`` in front of the message."""
        self.assertEqual(found, expected, msg=lambda text: f"{what}: {text}", **tolerance)

    def shared_folder(self) -> str:
        """Return an empty folder, the same on all ranks, which call this together. Removed with the run's scratch."""
        folder = [tempfile.mkdtemp(dir=os.path.dirname(self.file_name)) if self.rank == 0 else ""]
        dist.broadcast_object_list(folder)
        return folder[0]
