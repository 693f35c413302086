"""The device under test, as a rank sees it.

Note [Device choice]
~~~~~~~~~~~~~~~~~~~~
One process knows one device type. It is chosen outside the rank and travels to it in ``TORCH_EXT_DEVICE``; where that
variable is unset the first question asked here decides: a real accelerator if torch sees one, else the simulated one
(compiled on the spot where that was not done before), else, where it cannot be compiled, plain ``cpu`` with a message
on stderr that says why. A run asks in its first zygote, before any test has a time limit. The four questions are
:func:`device_type`, :func:`device_module`, :func:`device_count` and :func:`backend`; :func:`capabilities` tells what
the device can do. Callers ask them on use, never at import, so that a device registered later is seen; and nobody
outside this file, ``compat`` and ``sim`` compares a device type to a name.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

__all__ = [
    "DEVICE_VARIABLE",
    "HOST",
    "Capabilities",
    "UnknownDeviceError",
    "backend",
    "capabilities",
    "current_device",
    "default_world_size",
    "device_count",
    "device_module",
    "device_type",
    "is_accelerator",
    "request_devices",
    "set_device_index",
]

DEVICE_VARIABLE = "TORCH_EXT_DEVICE"

# The device type that is no accelerator.
HOST = "cpu"

# Ranks of a test that names no world size: what the host carries, and where more devices only cost time.
_HOST_RANKS, _MOST_RANKS = 4, 8

# Packages that register an out-of-tree device when they are imported: torch's own backend autoload list is an
# entry-point group (``torch.backends``) that names no device type, so the types are spelt out here.
_SIMULATED = "sim"
_PROVIDERS = {_SIMULATED: "torch_ext.sim", "npu": "torch_npu", "hpu": "habana_frameworks.torch"}

_chosen: str | None = None


class UnknownDeviceError(RuntimeError):
    """``TORCH_EXT_DEVICE`` names a device type that this torch cannot provide."""


@dataclass(frozen=True)
class Capabilities:
    """What the device under test can do beyond computing.

    Attributes:
        device_sleep: ``device_module()._sleep`` delays the device without delaying the host.
    """

    device_sleep: bool


def device_type() -> str:
    """Return the device type of this process, such as ``"cpu"`` or ``"cuda"``. See Note [Device choice].

    Raises:
        UnknownDeviceError: the requested type is unknown to torch, or its provider cannot be imported.
    """
    global _chosen
    if _chosen is None:
        _chosen = _choose()
    return _chosen


def _choose() -> str:
    requested = os.environ.get(DEVICE_VARIABLE)
    if not requested:
        return _what_the_machine_has()
    try:
        if requested in _PROVIDERS:
            importlib.import_module(_PROVIDERS[requested])
        torch.device(requested)
        available = requested == "cpu" or torch.get_device_module(requested).is_available()
    except (ImportError, RuntimeError) as error:
        raise UnknownDeviceError(
            f"{DEVICE_VARIABLE}={requested}: torch {torch.__version__} cannot provide this device ({error}). "
            "Unset the variable to let the machine decide, or install the package that registers the device."
        ) from error
    if not available:
        raise UnknownDeviceError(
            f"{DEVICE_VARIABLE}={requested}: torch {torch.__version__} knows this device type but finds no such device "
            "on this machine. Unset the variable to let the machine decide."
        )
    return requested


def _what_the_machine_has() -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        return found.type
    try:
        importlib.import_module(_PROVIDERS[_SIMULATED])
    except (ImportError, OSError, RuntimeError) as error:
        print(
            f"torch_ext: no accelerator here, nor can the simulated one be had; tests run on plain {HOST}: {error}",
            file=sys.stderr,
            flush=True,
        )
        return HOST
    return _SIMULATED


def is_accelerator() -> bool:
    """Whether the device under test is an accelerator (simulated ones included), not the plain host."""
    return device_type() != "cpu"


def device_module() -> ModuleType:
    """Return ``torch.<device type>``, the module with ``device_count``, ``current_device`` and the like."""
    return torch.get_device_module(device_type())


def device_count() -> int:
    """Return how many devices a test may use: the accelerator's count, and 1 on plain ``cpu``."""
    return int(device_module().device_count()) if is_accelerator() else 1


def request_devices(count: int) -> None:
    """Have at least ``count`` devices, where devices can be had for the asking: on simulated ones. See
    ``torch.sim.request_devices``. Does nothing on others.
    """
    ask = _ask_for_devices()
    if ask is not None:
        ask(count)


def _ask_for_devices() -> Callable[[int], None] | None:
    return getattr(device_module(), "request_devices", None) if is_accelerator() else None


def default_world_size() -> int:
    """Return how many ranks a test gets that names no world size: one a device, at most 8; at most 4 where the host
    carries them all, as on plain ``cpu`` and on simulated devices.
    """
    if not is_accelerator():
        return _HOST_RANKS
    return min(device_count(), _MOST_RANKS if _ask_for_devices() is None else _HOST_RANKS)


def backend() -> str:
    """Return the c10d backend that serves the device, such as ``"gloo"`` or ``"nccl"``, from torch's own table."""
    return dist.get_default_backend_for_device(device_type())


def current_device(rank: int) -> torch.device:
    """Return the device that ``rank`` works on: ranks take devices in turn, and share the host on plain ``cpu``."""
    if not is_accelerator():
        return torch.device("cpu")
    return torch.device(device_type(), rank % device_count())


def set_device_index(rank: int) -> None:
    """Make :func:`current_device` of ``rank`` current in this thread; does nothing on plain ``cpu``."""
    if is_accelerator():
        torch.accelerator.set_device_index(rank % device_count())


def capabilities() -> Capabilities:
    """Return the device's :class:`Capabilities`, read off its module rather than off its name."""
    return Capabilities(device_sleep=is_accelerator() and hasattr(device_module(), "_sleep"))
