"""Dynamo's view of the device, so that ``torch.compile`` with ``eager`` and ``aot_eager`` traces ``sim`` programs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from torch_ext.sim._imports import when_imported
from torch_ext.sim._name import NAME

_INTERFACES = "torch._dynamo.device_interface"


def register() -> None:
    """Register the interface now if Dynamo is loaded, else when it is: importing it costs half a second."""
    when_imported(_INTERFACES, _register_interface)


def _register_interface(interfaces: ModuleType) -> None:
    base: Any = interfaces.DeviceInterface
    sim: Any = torch.get_device_module(NAME)

    class SimInterface(base):
        device = sim.device
        Event = sim.Event
        Stream = sim.Stream

        class Worker:
            """What compile workers ask; they never touch a device."""

            @staticmethod
            def set_device(device: int) -> None:
                sim.set_device(device)

            @staticmethod
            def current_device() -> int:
                return int(sim.current_device())

            @staticmethod
            def get_device_properties(device: torch.types.Device = None) -> Any:
                return sim.get_device_properties(device)

        current_device = staticmethod(sim.current_device)
        set_device = staticmethod(sim.set_device)
        device_count = staticmethod(sim.device_count)
        is_available = staticmethod(sim.is_available)
        stream = staticmethod(sim.stream)
        current_stream = staticmethod(sim.current_stream)
        set_stream = staticmethod(sim.set_stream)
        synchronize = staticmethod(sim.synchronize)
        get_device_properties = staticmethod(sim.get_device_properties)
        memory_allocated = staticmethod(sim.memory_allocated)

        @staticmethod
        def get_compute_capability(device: torch.types.Device = None) -> int:
            return 0

        @staticmethod
        def exchange_device(device: int) -> int:
            previous = int(sim.current_device())
            if device >= 0:
                sim.set_device(device)
            return previous

        @staticmethod
        def maybe_exchange_device(device: int) -> int:
            return SimInterface.exchange_device(device)

        @staticmethod
        def get_raw_stream(device_index: int) -> int:
            return int(sim.current_stream(device_index).stream_id)

        @staticmethod
        def is_bf16_supported(including_emulation: bool = False) -> bool:
            return True

        @staticmethod
        def is_dtype_supported(dtype: torch.dtype, including_emulation: bool = False) -> bool:
            return True

        @staticmethod
        def is_triton_capable(device: torch.types.Device = None) -> bool:
            return False

    interfaces.register_interface_for_device(NAME, SimInterface)
    for index in range(sim.device_count()):
        interfaces.register_interface_for_device(f"{NAME}:{index}", SimInterface)
