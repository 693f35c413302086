"""``DistributedTestBase``: ranks with a process group for the device under test."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as c10d

from torch_ext.compat.c10d import _get_default_group
from torch_ext.testing._internal._distributed.hosts import meeting_point
from torch_ext.testing._internal._distributed.multi_process import MultiProcessTestCase

__unittest = True

__all__ = ["DistributedTestBase"]


class DistributedTestBase(MultiProcessTestCase):
    """A :class:`MultiProcessTestCase` that starts its ranks in ``setUp`` and makes process groups by device type."""

    def setUp(self) -> None:
        super().setUp()
        os.environ["WORLD_SIZE"] = str(self.world_size)
        self._spawn_processes()

    def tearDown(self) -> None:
        if c10d.is_initialized():
            c10d.destroy_process_group()
        super().tearDown()

    def backend(self, device: str) -> str:
        """Return the c10d backend that torch uses for ``device`` (a type or ``"type:index"``)."""
        return c10d.get_default_backend_for_device(torch.device(device).type)

    def create_pg(self, device: str, world_size: int | None = None) -> c10d.ProcessGroup:
        """Initialize the default group, give each rank its own device, and return the group. Collective."""
        size = self.world_size if world_size is None else world_size
        where = meeting_point(self.file_name, size)
        c10d.init_process_group(backend=self.backend(device), world_size=size, rank=self.rank, **where)
        current = torch.accelerator.current_accelerator()
        if current is not None and current.type == torch.device(device).type:
            own = torch.device(current.type, self.rank % torch.accelerator.device_count())
            torch.set_default_device(own)
            torch.accelerator.set_device_index(own)
        return _get_default_group()

    def rank_to_device(self, device: str) -> dict[int, list[Any]]:
        """Return a list with one device index for each rank; ranks take the devices in turn."""
        count = torch.get_device_module(device).device_count()
        return {rank: [rank % count] for rank in range(self.world_size)}
