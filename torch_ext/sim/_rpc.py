"""RPC's device maps: TensorPipe workers exchange ``sim`` tensors, as CUDA's workers exchange theirs.

``TensorPipeRpcBackendOptions.set_device_map("worker1", {"sim:0": "sim:1"})``, ``devices``, ``RemoteModule`` and
distributed autograd take ``sim`` devices. Workers that a map concerns get the agent of csrc/rpc_agent.cpp, which
carries device tensors through host memory; all others get torch's own. A group that workers may join later, made
without a world size, cannot have such maps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import _jit_internal

from torch_ext.sim import _native
from torch_ext.sim._imports import when_imported
from torch_ext.sim._name import NAME
from torch_ext.sim._patches import wrap

__all__ = ["register"]

_RPC = "torch.distributed.rpc"


def register() -> None:
    """Serve futures now, and RPC when it is loaded."""

    # The value of a future may hold events, which cannot be pickled: torch itself skips only CUDA's.
    @wrap(_jit_internal._TensorExtractor, "persistent_id")
    def persistent_id(original: Callable[..., Any], self: Any, value: object) -> Any:
        return "" if isinstance(value, torch.Event) else original(self, value)

    if hasattr(_native, "define_rpc_agent"):
        when_imported(f"{_RPC}.options", _take_devices)
        when_imported(f"{_RPC}.backend_registry", _serve)


def _take_devices(options: ModuleType) -> None:
    @wrap(options, "_to_device")
    def to_device(original: Callable[..., torch.device], device: Any) -> torch.device:
        found = torch.device(device)
        return found if found.type == NAME else original(device)


def _serve(registry: ModuleType) -> None:
    @wrap(registry, "_tensorpipe_validate_devices")
    def validate_devices(validate: Callable[..., bool], devices: Iterable[torch.device], count: int) -> bool:
        own: list[torch.device] = []
        others: list[torch.device] = []
        for device in devices:
            (own if device.type == NAME else others).append(device)
        return all(0 <= (device.index or 0) < count for device in own) and bool(validate(others, count))

    @wrap(registry, "_tensorpipe_exchange_and_check_all_device_maps")
    def exchange_maps(exchange: Callable[..., Any], name: str, count: int, *args: Any) -> Any:
        return exchange(name, count or _native.device_count(), *args)

    @wrap(registry, "init_backend")
    def init_backend(start: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("rpc_backend_options")
        if not kwargs.get("world_size") and (_names_sim(getattr(options, "device_maps", {})) or _has_sim(options)):
            raise ValueError(f"device maps for {NAME!r} need a group of fixed size: pass world_size to init_rpc")
        from torch.distributed import rpc

        package: Any = rpc  # where the backend looks up the agent's class
        original = package.TensorPipeAgent
        package.TensorPipeAgent = functools.partial(_agent, original)
        try:
            return start(backend, *args, **kwargs)
        finally:
            package.TensorPipeAgent = original


def _agent(
    original: Any,
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    options: Any,
    reverse_maps: dict[str, dict[torch.device, torch.device]],
    devices: list[torch.device],
) -> Any:
    if not (_names_sim(options.device_maps) or _names_sim(reverse_maps) or any(each.type == NAME for each in devices)):
        return original(store, name, rank, world_size, options, reverse_maps, devices)
    _native.init()
    return _agent_class()(store, name, rank, world_size, options, reverse_maps, devices)


def _names_sim(maps: dict[str, dict[torch.device, torch.device]]) -> bool:
    return any(device.type == NAME for map_ in maps.values() for pair in map_.items() for device in pair)


def _has_sim(options: Any) -> bool:
    return any(device.type == NAME for device in getattr(options, "devices", ()))


@functools.cache
def _agent_class() -> Any:
    _native.define_rpc_agent()
    return _native.RpcAgent
