"""The process group backend ``simccl``: how groups are made. What it does lies in csrc/simccl.cpp."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_ext.sim import _native

BACKEND = "simccl"
_DEVICE = "sim"


def register() -> None:
    """Make ``simccl`` the default backend of ``sim`` tensors, and let torch's threaded group serve them too."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[_DEVICE])
    _native.set_transport_factory(_make_transport)
    _join_threaded_group()
    _pair_with_gloo()


def _pair_with_gloo() -> None:
    """A group made without naming a backend serves host tensors too: ``cpu:gloo,sim:simccl``.

    Torch would pick the accelerator's backend alone. Groups that name ``simccl`` stay device-only.
    """
    config = c10d.BackendConfig
    original = config.__init__

    def __init__(self: Any, backend: Any) -> None:
        original(self, backend)
        if str(backend) == dist.Backend.UNDEFINED and set(self.device_backend_map) == {_DEVICE}:
            self.device_backend_map = {"cpu": dist.Backend(dist.Backend.GLOO), **self.device_backend_map}

    setattr(config, "__init__", __init__)  # noqa: B010 - mypy refuses to assign a method


def _join_threaded_group() -> None:
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
    """Make a group's backend: called by torch for every group that is not split off another one."""
    timeout = options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    transport = _make_transport(options.store, options.group_rank, options.group_size, timeout)
    settings = getattr(transport, "options", None)
    if settings is not None:
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
    return _native.ProcessGroupSimCCL(transport, timeout)


def _make_transport(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> c10d.ProcessGroupGloo:
    """Make the gloo backend that carries a group's bytes, under a store prefix of its own."""
    transport = c10d.ProcessGroupGloo(c10d.PrefixStore(f"{BACKEND}/", store), rank, size, timeout=timeout)
    transport._set_sequence_number_for_group()
    return transport
