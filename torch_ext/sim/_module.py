"""``torch.sim``: devices, streams and events, random numbers and memory of the simulated accelerator.

Everything here goes through torch's own accelerator layer, so ``torch.sim`` and ``torch.accelerator`` cannot disagree.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from torch_ext.sim import _amp as amp
from torch_ext.sim import _generators as random
from torch_ext.sim import _memory as memory
from torch_ext.sim import _native, races
from torch_ext.sim import _streams as streams
from torch_ext.sim._absent import refuse
from torch_ext.sim._devices import (
    DeviceGuard,
    can_device_access_peer,
    current_device,
    device,
    device_count,
    device_of,
    exchange_device,
    get_amp_supported_dtype,
    get_device_capability,
    get_device_name,
    get_device_properties,
    get_sync_debug_mode,
    init,
    is_available,
    is_bf16_supported,
    is_current_stream_capturing,
    is_in_bad_fork,
    is_initialized,
    is_tf32_supported,
    request_devices,
    set_device,
    set_sync_debug_mode,
    synchronize,
)
from torch_ext.sim._generators import (
    generator_of,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torch_ext.sim._memory import (
    empty_cache,
    get_allocator_backend,
    get_per_process_memory_fraction,
    host_memory_stats,
    host_memory_stats_as_nested_dict,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_host_memory_stats,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_host_memory_stats,
    reset_peak_memory_stats,
    set_memory_limit,
    set_per_process_memory_fraction,
    set_poison,
)
from torch_ext.sim._memory_history import memory_snapshot
from torch_ext.sim._streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    sleep,
    stream,
)

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

# Private names by which torch and its tests look for these.
_DeviceGuard = DeviceGuard
_exchange_device = _maybe_exchange_device = exchange_device
_get_generator = generator_of
_is_in_bad_fork = is_in_bad_fork
_lazy_init = init
_sleep = sleep

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
        return tuple(generator_of(index) for index in range(device_count()))
    if name in _INDUCTOR:
        return getattr(importlib.import_module("torch_ext.sim._inductor"), _INDUCTOR[name])
    raise refuse(name)
