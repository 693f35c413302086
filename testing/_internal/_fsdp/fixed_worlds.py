"""Bases for suites that state what holds at two or at four ranks, whatever the number of devices; meshes in common."""

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

__all__ = ["FourRankTest", "TwoRankTest", "mesh_of", "mesh_of_first"]


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


class TwoRankTest(FSDPTest):
    """An ``FSDPTest`` with two ranks on every device."""

    @property
    def world_size(self) -> int:
        return 2

    @property
    def device(self) -> torch.device:
        """This rank's own, where there are enough."""
        return device.rank_device(self.rank)


class FourRankTest(TwoRankTest):
    """With four ranks there may be two shards of two replicas, and shards that stay empty."""

    @property
    def world_size(self) -> int:
        return 4

    def check_equal(self, what: str, found: Any, expected: Any, **tolerance: float) -> None:
        """As ``assertEqual``, with ``what`` in front of the message."""
        self.assertEqual(found, expected, msg=lambda text: f"{what}: {text}", **tolerance)

    def shared_folder(self) -> str:
        """Return an empty folder, the same on all ranks, which call this together. Removed with the run's scratch."""
        folder = [tempfile.mkdtemp(dir=os.path.dirname(self.file_name)) if self.rank == 0 else ""]
        dist.broadcast_object_list(folder)
        return folder[0]
