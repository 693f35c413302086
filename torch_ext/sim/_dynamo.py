"""Dynamo's view of the device, so that ``torch.compile`` with ``eager`` and ``aot_eager`` traces ``sim`` programs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from torch_ext.sim._imports import when_imported
from torch_ext.sim._name import NAME

_INTERFACES = "torch._dynamo.device_interface"
_WORKER_FUNCTIONS = ("current_device", "get_device_properties", "set_device")
# Functions of the device's module that the interface has under the same name.
_SHARED_FUNCTIONS = (
    *_WORKER_FUNCTIONS, "current_stream", "device_count", "is_available", "is_bf16_supported", "memory_allocated",
    "set_stream", "stream", "synchronize",
)  # fmt: skip


def register() -> None:
    """Register the interface now if Dynamo is loaded, else when it is: importing it costs half a second."""
    when_imported(_INTERFACES, _register_interface)
    when_imported("torch._dynamo.trace_rules", _skip_own_frames)


def _skip_own_frames(rules: ModuleType) -> None:
    """Keep Dynamo from compiling a function of ours that a graph break calls, as it compiles none of ``torch.cuda``."""
    rules.add(__package__)
    rules.BUILTIN_INLINE_WHEN_CALLED.add(rules.SKIP_DIRS[-1])  # the folder that `add` has added


def _register_interface(interfaces: ModuleType) -> None:
    base: Any = interfaces.DeviceInterface
    from torch_ext.sim import _module

    sim: Any = _module

    class SimInterface(base):
        class Worker:
            """The part that compile workers use; they never touch a device."""

        device = sim.device
        Event = sim.Event
        Stream = sim.Stream
        exchange_device = maybe_exchange_device = staticmethod(sim._exchange_device)

        @staticmethod
        def get_compute_capability(device: torch.types.Device = None) -> int:
            return 0

        @staticmethod
        def get_raw_stream(device_index: int) -> int:
            return int(sim.current_stream(device_index).stream_id)

        @staticmethod
        def is_dtype_supported(dtype: torch.dtype, including_emulation: bool = False) -> bool:
            return True

        @staticmethod
        def is_triton_capable(device: torch.types.Device = None) -> bool:
            return False

    for name in _SHARED_FUNCTIONS:
        setattr(SimInterface, name, staticmethod(getattr(sim, name)))
    for name in _WORKER_FUNCTIONS:
        setattr(SimInterface.Worker, name, staticmethod(getattr(sim, name)))
    interfaces.register_interface_for_device(NAME, SimInterface)
    for index in range(sim.device_count()):
        interfaces.register_interface_for_device(f"{NAME}:{index}", SimInterface)
