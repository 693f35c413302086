"""``torch.sim``: devices, streams and events, random numbers and memory of the simulated accelerator.

Everything here goes through torch's own accelerator layer, so ``torch.sim`` and ``torch.accelerator`` cannot disagree.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from torch_ext.sim import _amp as amp
from torch_ext.sim import _devices, _native, races
from torch_ext.sim import _generators as random
from torch_ext.sim import _memory as memory
from torch_ext.sim import _streams as streams
from torch_ext.sim._absent import refuse

# ruff: noqa: F822 - the loop below the list defines the names
__all__ = [
    "AcceleratorError",
    "Event",
    "OutOfMemoryError",
    "Stream",
    "StreamContext",
    "amp",
    "can_device_access_peer",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_allocator_backend",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "get_sync_debug_mode",
    "has_half",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "is_tf32_supported",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "races",
    "random",
    "request_devices",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_memory_limit",
    "set_per_process_memory_fraction",
    "set_poison",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "set_sync_debug_mode",
    "stream",
    "streams",
    "synchronize",
]

AcceleratorError = torch.AcceleratorError
OutOfMemoryError = torch.OutOfMemoryError
has_half = True
for _part in (_devices, random, memory, streams):
    globals().update({name: value for name, value in vars(_part).items() if name in __all__})

# Private names by which torch and its tests look for these.
DeviceGuard = _DeviceGuard = _devices.DeviceGuard
exchange_device = _exchange_device = _maybe_exchange_device = _devices.exchange_device
generator_of = _get_generator = random.generator_of
is_in_bad_fork = _is_in_bad_fork = _devices.is_in_bad_fork
_lazy_init = _devices.init
sleep = _sleep = streams.sleep

# What Inductor asks a device of PrivateUse1 for; our module loads Inductor, so it waits until then.
_INDUCTOR = {
    "Scheduling": "Scheduling",
    "PythonWrapperCodegen": "SimWrapperCodegen",
    "CppWrapperCodegen": "CppWrapperCodegen",
    "WrapperFxCodegen": "WrapperFxCodegen",
}


def __getattr__(name: str) -> Any:
    if name == "_initialized":
        return _native.is_initialized()
    if name == "default_generators":
        return tuple(random.generator_of(index) for index in range(_devices.device_count()))
    if name in _INDUCTOR:
        return getattr(importlib.import_module("torch_ext.sim._inductor"), _INDUCTOR[name])
    raise refuse(name)
