"""``simccl`` over both transports, and gloo, on the suite that every c10d backend is held to."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import torch_ext.sim  # noqa: F401 - registers the device
from torch_ext.testing._internal.common_distributed import DistributedTestBase
from torch_ext.testing._internal.distributed.backend_conformance import BackendConformance

TRANSPORT = "TORCH_EXT_SIM_TRANSPORT"


class _OnSim(BackendConformance):
    device_type = "sim"
    backend_name = "simccl"
    transport: ClassVar[str]

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return 3

    def setUp(self) -> None:
        self.addCleanup(os.environ.pop, TRANSPORT, None)  # type: ignore[attr-defined]  # mixed into a test case
        os.environ[TRANSPORT] = self.transport
        super().setUp()  # type: ignore[misc]


class TestSimcclOverSharedMemory(_OnSim, DistributedTestBase):
    transport = "shared"
    names_disagreement = True


class TestSimcclOverGloo(_OnSim, DistributedTestBase):
    transport = "gloo"
    sizes = (1, 13, 1 << 20)  # gloo reduces no empty tensors
    # Of int16 and the like it is what simccl makes of them that is tested, in test_collectives.py.


class TestGloo(BackendConformance, DistributedTestBase):
    device_type = "cpu"
    backend_name = "gloo"
    sizes = (1, 13, 1 << 20)
    types = (torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int32, torch.int64)
    unequal_lists = False

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return 3

    def reductions(self, dtype: torch.dtype) -> list[Any]:
        return [op for op in super().reductions(dtype) if op != dist.ReduceOp.AVG]
