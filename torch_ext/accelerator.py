"""A rank's view of the device under test.

Note [Device choice]
~~~~~~~~~~~~~~~~~~~~
A process has one device type. ``TORCH_EXT_DEVICE`` names it. If the variable is unset, the first call into this module
decides: a real accelerator if torch sees one, otherwise the simulated one, compiled now if necessary. If compiling
fails, tests run on plain ``cpu`` and a message on stderr gives the reason. A run decides in its first zygote, before
any test has a time limit.

Call the functions here on use, never at import, since a device may be registered later. Only this file, ``compat``,
``cuda_as_sim`` and ``sim`` compare a device type to a name.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Protocol

import torch
import torch.distributed as dist

from torch_ext.compat.testing import around_threaded_collectives

DEVICE_VARIABLE = "TORCH_EXT_DEVICE"

# The device type that is not an accelerator.
HOST = "cpu"

# Default world size on the host, and its maximum on real devices: beyond it, more ranks only cost time.
_HOST_RANKS, _MAX_RANKS = 4, 8
# How many devices a simulated accelerator can have.
MAX_DEVICES = 64

# Packages that register a device on import. Torch's own backend autoload is an entry-point group (``torch.backends``)
# without device types, so this table lists them.
SIMULATED = "sim"
_PROVIDERS = {SIMULATED: "torch_ext.sim", "npu": "torch_npu", "hpu": "habana_frameworks.torch"}

# Device type -> the variable that restricts the visible devices of a process.
_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_DEVICES",
}

_chosen: str | None = None


class UnknownDeviceError(RuntimeError):
    """``TORCH_EXT_DEVICE`` names a device type that this torch does not know or this machine lacks."""


def device_type() -> str:
    """Return the device type of this process, such as ``"cpu"`` or ``"cuda"``; see Note [Device choice]. Raises
    UnknownDeviceError if torch does not know the requested type, its package cannot be imported, or this machine has no
    such device.
    """
    global _chosen
    if _chosen is None:
        _chosen = _choose()
    return _chosen


def assume(device: str) -> None:
    """Make ``device`` the type of this process without a look at the machine, which could keep it from forking. Does
    nothing for a type that a package registers.
    """
    global _chosen
    _chosen = None if device in _PROVIDERS else device


def _choose() -> str:
    requested = os.environ.get(DEVICE_VARIABLE)
    if not requested:
        return _detect()
    got = f"got the device {requested} (--device or {DEVICE_VARIABLE}): torch {torch.__version__}"
    remedy = "Ask for no device to let the machine decide"
    try:
        if requested in _PROVIDERS:
            importlib.import_module(_PROVIDERS[requested])
        torch.device(requested)
        available = requested == HOST or torch.get_device_module(requested).is_available()
    except (ImportError, RuntimeError) as error:
        text = f"{got} cannot provide this device ({error}). {remedy}, or install the device's package."
        raise UnknownDeviceError(text) from error
    if not available:
        raise UnknownDeviceError(f"{got} knows this device type but finds no such device on this machine. {remedy}.")
    return requested


def _detect() -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        return found.type
    try:
        importlib.import_module(_PROVIDERS[SIMULATED])
    except (ImportError, OSError, RuntimeError) as error:
        print(
            f"torch_ext: no accelerator here, and no simulated one either; tests run on plain {HOST}: "
            f"{str(error).rstrip('.')}. Until then, tests that need an accelerator are skipped; the summary of a run "
            "counts them.",
            file=sys.stderr,
            flush=True,
        )
        return HOST
    return SIMULATED


def is_accelerator() -> bool:
    """Whether the device under test is an accelerator, real or simulated, rather than plain ``cpu``."""
    return device_type() != "cpu"


def device_module() -> ModuleType:
    """Return ``torch.<device type>``, the module with ``device_count``, ``current_device`` and so on."""
    return torch.get_device_module(device_type())


def provider() -> str:
    """Return the package that registers the device type; empty if torch itself does."""
    if not is_accelerator():
        return ""
    package = device_module().__name__.partition(".")[0]
    return _PROVIDERS.get(device_type(), "" if package == torch.__name__ else package)


def device_count() -> int:
    """Return the number of devices for a test: the accelerator's device count, or 1 on plain ``cpu``."""
    return int(device_module().device_count()) if is_accelerator() else 1


def is_simulated() -> bool:
    """Whether the device under test is a simulated accelerator."""
    return _of_device("request_devices") is not None


def request_devices(count: int) -> None:
    """Make at least ``count`` simulated devices available, as ``torch.sim.request_devices`` does; nothing on other
    types.
    """
    if request := _of_device("request_devices"):
        request(count)


class RaceCheckOfThreads(Protocol):
    """The race check of one test whose ranks are threads of this process."""

    def rank(self, rank: int) -> AbstractContextManager[None]:
        """Return a context for the whole work of a rank's thread."""

    def raise_races(self) -> None:
        """Raise an error if the rank has races. Called in the rank's thread at the end of its body."""

    def end(self) -> BaseException | None:
        """End the check after the threads have ended. Return an error for races that no rank has raised, else None."""


def race_check(test: str, report: Callable[[str], None]) -> AbstractContextManager[None]:
    """Return a context that checks the body of a test for races, if the device supports it and ``TORCH_EXT_RACES`` does
    not turn the check off. Arguments and errors as in ``torch.sim.races.check_body``.
    """
    races = _races()
    return nullcontext() if races is None else races.check_body(test, report)


def virtual_time() -> AbstractContextManager[None]:
    """Return a context that runs the body of a test in virtual time, if the device has it and ``TORCH_EXT_CLOCK`` names
    a model: see ``torch.sim.clock``.
    """
    clock = sys.modules.get(f"{_PROVIDERS[SIMULATED]}.clock")
    return nullcontext() if clock is None else clock.run_body()


def race_check_of_threads(report: Callable[[str], None]) -> RaceCheckOfThreads | None:
    """Begin a race check of ranks that are threads of this process; None if the device does not support it. See
    ``torch.sim.races.ThreadsCheck``.
    """
    races = _races()
    return None if races is None else races.ThreadsCheck(report, around_threaded_collectives)


def blame_races(error: BaseException, *, is_skip: bool) -> BaseException:
    """Return the error to report for a body that ``error`` has ended, as ``torch.sim.races.attach_races`` does."""
    races = _races()
    return error if races is None else races.attach_races(error, is_skip=is_skip)


def _races() -> ModuleType | None:
    return sys.modules.get(f"{_PROVIDERS[SIMULATED]}.races")


def _of_device(name: str) -> Callable[..., None] | None:
    return getattr(device_module(), name, None) if is_accelerator() else None


def visible_devices_variable() -> str:
    """Return the environment variable that restricts the visible devices of a process; empty on ``cpu``, if none is
    known, and on simulated devices, which are private to each process.
    """
    return _VISIBLE.get(device_type(), "")


def default_world_size() -> int:
    """Return the world size of a test that does not set one: 4 on plain ``cpu``; otherwise one rank per device, at most
    8 on real devices and at most 4 on simulated ones.
    """
    if not is_accelerator():
        return _HOST_RANKS
    return min(device_count(), _HOST_RANKS if _of_device("request_devices") else _MAX_RANKS)


def backend() -> str:
    """Return torch's default c10d backend for the device, such as ``"gloo"`` or ``"nccl"``."""
    return dist.get_default_backend_for_device(device_type())


def current_device(rank: int) -> torch.device:
    """Return the device of ``rank``: ``rank`` modulo the device count, or the host on plain ``cpu``."""
    if not is_accelerator():
        return torch.device("cpu")
    return torch.device(device_type(), rank % device_count())


def set_device_index(rank: int) -> None:
    """Make the device of ``rank`` current in this thread. Does nothing on plain ``cpu``."""
    if is_accelerator():
        torch.accelerator.set_device_index(rank % device_count())


def initialize() -> None:
    """Initialize the device in this process, as its first use would. Does nothing on plain ``cpu``."""
    if start := _of_device("init"):
        start()


def can_sleep() -> bool:
    """Whether ``device_module()._sleep`` delays the device without delaying the host."""
    return _of_device("_sleep") is not None
