"""The devices of the simulated accelerator: their number, the current one, and their properties."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import torch

from torch_ext.sim import _native
from torch_ext.sim._name import NAME

Device = torch.device | str | int | None


def index_of(which: Device) -> int:
    """Return the device index of ``which``; the current device for ``None`` and for a device without an index."""
    if which is None:
        return _native.current_device()
    if isinstance(which, bool):
        raise TypeError(f"Expected a sim device, an index or None, got {which!r}.")
    if isinstance(which, int):
        return which
    named = torch.device(which)
    if named.type != NAME:
        raise ValueError(f"Expected a {NAME} device, but got: {named.type}")
    return _native.current_device() if named.index is None else named.index


def is_available() -> bool:
    """Whether there is a device. Does not initialise anything."""
    return _native.device_count() > 0


def set_device(device: Device) -> None:
    """Make ``device`` current in this thread.

    Raises:
        RuntimeError: there is no such device.
    """
    exchange_device(index_of(device))


class device:
    """Context manager that makes a device current and puts the previous one back. ``None`` changes nothing."""

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None else index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = exchange_device(self.idx)

    def __exit__(self, *exc_info: object) -> None:
        _native.set_device(self.prev_idx)


def exchange_device(index: int) -> int:
    """Make the device ``index`` current and return the one before; a negative index changes nothing."""
    previous = _native.current_device()
    if index >= 0:
        _native.set_device(index)
    return previous


class device_of(device):
    """Context manager that makes the device of a tensor current; changes nothing for tensors elsewhere."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == NAME else None)


def synchronize(device: Device = None) -> None:
    """Wait until every stream of ``device`` is idle. The first use of a device, as on CUDA."""
    _native.init()
    torch.accelerator.synchronize(index_of(device))


def checked_index(index: int) -> int:
    """Return ``index``; raise AssertionError, as ``torch.cuda`` does, for no device. Initialises nothing, as test files
    call this on import; raises RuntimeError where that would.
    """
    if _native.is_in_bad_fork() or not _native.device_count():
        _native.init()
    if not 0 <= index < (count := _native.device_count()):
        raise AssertionError(f"Invalid device id {index}: expected one of 0 to {count - 1}.")
    return index


def current_device() -> int:
    """Return the index of the current device of this thread."""
    return checked_index(_native.current_device())


@dataclass(frozen=True)
class Properties:
    """The properties of a device: its name, memory and capability, and the sizes of a GPU of capability 8.0."""

    name: str
    index: int
    major: int
    minor: int
    multi_processor_count: int = 1
    warp_size: int = 32
    max_threads_per_block: int = 1024
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 163 << 10
    shared_memory_per_multiprocessor: int = 164 << 10
    L2_cache_size: int = 40 << 20
    clock_rate: int = 1_000_000  # kHz; sleep() counts in nanoseconds
    memory_clock_rate: int = 1_000_000
    memory_bus_width: int = 64
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_bus_id: int = 0
    pci_domain_id: int = 0
    gcnArchName: str = ""

    # Lazy: these initialize the device, after which no process can fork. Torch's helpers read the fields on import.

    @property
    def total_memory(self) -> int:
        """In bytes."""
        return _native.memory_limit(self.index)

    @property
    def pci_device_id(self) -> int:
        """The number of the device among all, those that the program hides included."""
        return _native.index_among_all(self.index)

    @property
    def uuid(self) -> uuid.UUID:
        """A UUID made of ``pci_device_id``."""
        return uuid.UUID(int=self.pci_device_id)


def get_device_properties(device: Device = None) -> Properties:
    """Return the properties of ``device``, such as its name and its memory in bytes."""
    index = index_of(device)
    return Properties(get_device_name(index), index, *get_device_capability(index))


def get_device_name(device: Device = None) -> str:
    """Return the name of ``device``, the same for all."""
    checked_index(index_of(device))
    return "Simulated accelerator"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Return (0, 0): the device has no generations whose features differ."""
    checked_index(index_of(device))
    return (0, 0)


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Whether one device can read another's memory: True for two different devices, since all memory is the host's."""
    return checked_index(index_of(device)) != checked_index(index_of(peer_device))


_SYNC_DEBUG_MODES = {"default": 0, "warn": 1, "error": 2}


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Set the reaction to operations that block the host: ``"default"`` (0) none, ``"warn"`` (1), ``"error"`` (2).

    These operations are host reads such as ``item()`` and ``nonzero()``, copies between host and device without
    ``non_blocking=True``, and ``Stream.synchronize()``. Applies to all threads.

    Raises:
        ValueError: there is no such mode.
    """
    mode = _SYNC_DEBUG_MODES.get(debug_mode, -1) if isinstance(debug_mode, str) else debug_mode
    if mode not in _SYNC_DEBUG_MODES.values():
        raise ValueError(f"Expected one of 0, 1, 2, 'default', 'warn', 'error' for debug_mode, got {debug_mode!r}.")
    _native.set_sync_debug(mode)


def is_tf32_supported() -> bool:
    """Return False: float32 kernels use full precision."""
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast may use. Autocast to float32 only casts lower-precision inputs, as on CUDA."""
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: bfloat16 tensors work."""
    return True
