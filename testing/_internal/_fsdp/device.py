"""The device under test, as test files may have redefined it.

``DEVICE_TYPE``, ``DEVICE_COUNT`` and ``DISTRIBUTED_BACKEND`` are attributes of the front door ``common_fsdp``. They are
read there each time they are needed, so that a value patched by a test file counts from that moment on.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from torch_ext import accelerator

FRONT_DOOR = "torch_ext.testing._internal.common_fsdp"

# What each name is worth while nobody has assigned it.
DEFAULTS = {
    "DEVICE_TYPE": accelerator.device_type,
    "DEVICE_COUNT": accelerator.device_count,
    "DISTRIBUTED_BACKEND": accelerator.backend,
}


def _front_door() -> ModuleType:
    return importlib.import_module(FRONT_DOOR)


def device_type() -> str:
    """Return ``DEVICE_TYPE``, which may carry an index (``"hpu:0"``)."""
    return str(_front_door().DEVICE_TYPE)


def device_count() -> int:
    """Return ``DEVICE_COUNT``."""
    return int(_front_door().DEVICE_COUNT)


def distributed_backend() -> str:
    """Return ``DISTRIBUTED_BACKEND``."""
    return str(_front_door().DISTRIBUTED_BACKEND)


def get_devtype() -> torch.device:
    """Return the device under test as a :class:`torch.device` without an index of its own."""
    return torch.device(device_type())


def is_accelerator() -> bool:
    """Whether the device under test is an accelerator rather than the plain host."""
    return get_devtype().type != accelerator.HOST


def rank_device(rank: int) -> torch.device:
    """Return the device that ``rank`` works on: ranks take the ``DEVICE_COUNT`` devices in turn."""
    device = get_devtype()
    return torch.device(device.type, rank % device_count()) if is_accelerator() else device


def default_world_size() -> int:
    """Return the number of ranks of a test that names none: ``DEVICE_COUNT`` where a test file has assigned it."""
    assigned = vars(_front_door()).get("DEVICE_COUNT")
    return accelerator.default_world_size() if assigned is None else int(assigned)


def with_compute_device(fsdp_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``fsdp_kwargs`` with the ``device_id`` that FSDP1 insists on where no accelerator is in use.

    An accelerator is left for FSDP to find: naming it would move parameters that a test keeps on the host.
    """
    return fsdp_kwargs if is_accelerator() else {"device_id": get_devtype(), **fsdp_kwargs}
