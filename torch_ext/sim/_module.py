"""``torch.sim``: devices, streams and events, random numbers and memory of the simulated accelerator.

Everything here goes through torch's own accelerator layer, so ``torch.sim`` and ``torch.accelerator`` cannot disagree.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from torch_ext.sim import _amp as amp
from torch_ext.sim import _devices, _native, clock, races
from torch_ext.sim import _generators as random
from torch_ext.sim import _memory as memory
from torch_ext.sim import _streams as streams
from torch_ext.sim._absent import refuse

AcceleratorError = torch.AcceleratorError
OutOfMemoryError = torch.OutOfMemoryError
has_half = True
__all__ = ["AcceleratorError", "OutOfMemoryError", "amp", "clock", "has_half", "memory", "races", "random", "streams"]
# Public functions and classes of the parts that torch lacks, or names with an underscore: see below.
_HELPERS = {"Properties", "checked_index", "exchange_device", "generator_of", "index_of", "sleep"}
for _part in (_devices, random, memory, streams):
    for _name, _value in vars(_part).items():
        if not _name.startswith("_") and _name not in _HELPERS and getattr(_value, "__module__", "") == _part.__name__:
            globals()[_name] = _value
            __all__.append(_name)

for _name in (
    "device_count", "get_sync_debug_mode", "init", "is_current_stream_capturing", "is_initialized",
    "request_devices",
):  # fmt: skip
    globals()[_name] = getattr(_native, _name)
    __all__.append(_name)

# Private names by which torch and its tests look for these.
DeviceGuard = _DeviceGuard = _devices.device
exchange_device = _exchange_device = _maybe_exchange_device = _devices.exchange_device
generator_of = _get_generator = random.generator_of
is_in_bad_fork = _is_in_bad_fork = _native.is_in_bad_fork
_lazy_init = _native.init
sleep = _sleep = streams.sleep

# Classes that Inductor looks up on a PrivateUse1 device; imported on use, because our module loads Inductor.
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
        return tuple(random.generator_of(index) for index in range(_native.device_count()))
    if name in _INDUCTOR:
        return getattr(importlib.import_module("torch_ext.sim._inductor"), _INDUCTOR[name])
    raise refuse(name)
