"""The process group backend ``simccl``: how groups are made. What it does lies in csrc/simccl.cpp."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_ext.sim import _native

BACKEND = "simccl"
_DEVICE = "sim"


def register() -> None:
    """Make ``simccl`` the default backend of ``sim`` tensors, and let torch's threaded group serve them too."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[_DEVICE])
    # Torch's threaded group registers itself for "cpu" and "cuda" when its module is imported, which overwrites any
    # entry made before; the registration is wrapped so that `sim` joins whenever that happens.
    registered = dist.Backend.register_backend

    def register_backend(
        name: str, func: Any, extended_api: bool = False, devices: str | list[str] | None = None
    ) -> None:
        if name == "threaded" and isinstance(devices, list):
            devices = [*devices, _DEVICE]
        registered(name, func, extended_api, devices)

    setattr(dist.Backend, "register_backend", staticmethod(register_backend))  # noqa: B010 - mypy refuses to assign a method
    threaded = dist.Backend.backend_capability.get("threaded")
    if threaded is not None and _DEVICE not in threaded:
        threaded.append(_DEVICE)


def _create(options: Any, backend_options: Any) -> _native.ProcessGroupSimCCL:
    """Make the group's transport, a gloo backend with a store prefix of its own, and wrap it."""
    timeout = options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    store = dist.PrefixStore(f"{BACKEND}/", options.store)
    transport = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=timeout)
    settings = getattr(transport, "options", None)
    if settings is not None:
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
    transport._set_sequence_number_for_group()
    return _native.ProcessGroupSimCCL(transport)
