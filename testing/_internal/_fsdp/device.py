"""The device under test, each rank's own device, meshes over the world, delays, and
skips of subtests that need an accelerator.

``DEVICE_TYPE``, ``DEVICE_COUNT`` and ``DISTRIBUTED_BACKEND`` are read from
``common_fsdp`` on each use, because test files may assign them there.
"""

from __future__ import annotations

import functools
import importlib
import time
import unittest
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload

from torch_ext import accelerator

__all__ = [
    "compute_device",
    "first_ranks_mesh",
    "get_devtype",
    "rank_device",
    "skip_known_defect",
    "skip_parameter_offload",
    "skip_without_accelerator",
    "subtest_name",
    "world_mesh",
]

# The value of each name until a test file assigns it.
DEFAULTS = {
    "DEVICE_TYPE": accelerator.device_type,
    "DEVICE_COUNT": accelerator.device_count,
    "DISTRIBUTED_BACKEND": accelerator.backend,
}


def _front_door() -> ModuleType:
    return importlib.import_module("torch_ext.testing._internal.common_fsdp")


def device_type() -> str:
    return str(_front_door().DEVICE_TYPE)


def device_count() -> int:
    return int(_front_door().DEVICE_COUNT)


def distributed_backend() -> str:
    return str(_front_door().DISTRIBUTED_BACKEND)


def get_devtype() -> torch.device:
    """Return ``DEVICE_TYPE`` as a device, with the index that it may have."""
    return torch.device(device_type())


def is_accelerator() -> bool:
    return get_devtype().type != accelerator.HOST


def rank_device(rank: int) -> torch.device:
    """Return the device of ``rank``; ranks take the devices in turn."""
    if not is_accelerator():
        return get_devtype()
    return torch.device(get_devtype().type, rank % device_count())


def compute_device() -> torch.device:
    """Return the device of the calling rank of the default group."""
    return rank_device(dist.get_rank())


def default_world_size() -> int:
    """Return the world size of tests that set none."""
    assigned = vars(_front_door()).get("DEVICE_COUNT")
    return accelerator.default_world_size() if assigned is None else int(assigned)


def with_compute_device(fsdp_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``fsdp_kwargs`` with the ``device_id`` that FSDP1 requires on the host. On
    an accelerator it would move parameters that a test keeps on the host.
    """
    own = {} if is_accelerator() else {"device_id": get_devtype()}
    return own | fsdp_kwargs


def skip_without_accelerator(reason: str) -> None:
    """Skip the running subtest, or the test if it has none, on the host."""
    if not is_accelerator():
        raise unittest.SkipTest(reason)


def skip_known_defect(page: str) -> None:
    """Likewise, for a defect that ``page`` of docs/findings describes."""
    skip_without_accelerator(f"a known defect: see docs/findings/{page}.md")


def skip_parameter_offload(cpu_offload: CPUOffload | None) -> None:
    """Likewise, if ``cpu_offload`` offloads parameters."""
    if cpu_offload is not None and cpu_offload.offload_params:
        why = "CPUOffload(offload_params=True) needs an accelerator to offload from"
        skip_without_accelerator(why)


def subtest_name(test_name_mapping: Mapping[str, str], *args: Any) -> str:
    """Join the names that ``test_name_mapping`` gives to ``str`` of each argument.

    >>> subtest_name({"True": "offload", "False": "on_device"}, True, None)
    'offload_none'
    """
    return "_".join(
        "none" if arg is None else test_name_mapping[str(arg)] for arg in args
    )


@functools.cache
def world_mesh(*sizes: int) -> DeviceMesh:
    """Return the mesh of shape ``sizes``, 1D or 2D, over the world, with dimensions
    ``replicate`` and ``shard``. The rank's first call for each shape is collective.
    """
    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh(get_devtype().type, sizes, mesh_dim_names=names)


@functools.cache
def first_ranks_mesh(size: int) -> DeviceMesh:
    """Return the 1D mesh of the first ``size`` ranks. Collective."""
    return DeviceMesh(get_devtype().type, list(range(size)))


def delay(milliseconds: float) -> None:
    """Delay the work that follows by about ``milliseconds``, if more than 0.

    A device that can sleep does so on its current stream, which makes it likelier that
    a missing wait shows. Otherwise the host sleeps, which only shifts the ranks'
    operations against each other.
    """
    if milliseconds <= 0:
        return
    kind = get_devtype().type
    if kind == accelerator.device_type() and accelerator.can_sleep():
        from torch_ext.testing._internal.common_utils import get_cycles_per_ms

        cycles = int(milliseconds * get_cycles_per_ms())
        torch.get_device_module(kind)._sleep(cycles)
    else:
        time.sleep(milliseconds / 1000)
