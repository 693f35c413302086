"""``torch.sim``: devices, streams and events, random numbers and memory of the simulated accelerator.

Everything here goes through torch's own accelerator layer, so ``torch.sim`` and ``torch.accelerator`` cannot disagree.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_ext.sim import _native

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "request_devices",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_memory_limit",
    "set_poison",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

_NAME = "sim"
_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)
_NANOSECONDS_PER_CYCLE = 1

_Device = torch.device | str | int | None


def _index(which: _Device) -> int:
    """Return the device index of ``which``; the current device for ``None`` and for a device without an index."""
    if which is None:
        return _native.current_device()
    if isinstance(which, bool):
        raise TypeError(f"Expected a sim device, an index or None, got {which!r}.")
    if isinstance(which, int):
        return which
    named = torch.device(which)
    if named.type != _NAME:
        raise ValueError(f"Expected a {_NAME} device, but got: {named.type}")
    return _native.current_device() if named.index is None else named.index


def is_available() -> bool:
    """Whether there is a device. Does not initialise anything."""
    return _native.device_count() > 0


def device_count() -> int:
    """Return the number of devices: ``TORCH_EXT_SIM_DEVICES``, else 4 or as many as were requested. The first use of a
    device fixes it; asking does not.
    """
    return _native.device_count()


def request_devices(count: int) -> None:
    """Have at least ``count`` devices from now on; ``TORCH_EXT_SIM_DEVICES``, where it is set, goes before. Initialises
    nothing, and is without effect in a process that has used a device.

    Raises:
        ValueError: ``count`` is not from 1 to 64.
    """
    _native.request_devices(count)


def init() -> None:
    """Initialise the device, as its first use would."""
    _native.init()


def is_initialized() -> bool:
    """Whether this process has used a device."""
    return _native.is_initialized()


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had used a device, and so may not use one itself."""
    return _native.is_in_bad_fork()


def _lazy_init() -> None:
    _native.init()


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
        return tuple(_native.default_generator(index) for index in range(device_count()))
    if name in _INDUCTOR:
        return getattr(importlib.import_module("torch_ext.sim._inductor"), _INDUCTOR[name])
    raise AttributeError(f"module 'torch.{_NAME}' has no attribute {name!r}")


def current_device() -> int:
    """Return the index of the current device of this thread."""
    return _native.current_device()


def set_device(device: _Device) -> None:
    """Make ``device`` current in this thread.

    Raises:
        RuntimeError: there is no such device.
    """
    index = _index(device)
    if index >= 0:
        _native.set_device(index)


class device:
    """Context manager that makes a device current and puts the previous one back. ``None`` changes nothing."""

    def __init__(self, device: _Device) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        if self.idx >= 0:
            _native.set_device(self.idx)

    def __exit__(self, *exc_info: object) -> None:
        _native.set_device(self.prev_idx)


class device_of(device):
    """Context manager that makes the device of a tensor current; changes nothing for tensors elsewhere."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == _NAME else None)


def synchronize(device: _Device = None) -> None:
    """Wait until every stream of ``device`` is idle."""
    torch.accelerator.synchronize(_index(device))


# --- streams and events: see Note [Streams of an eager device] in csrc/stream.h ---


class Stream(torch.Stream):
    """A stream of a sim device. A negative ``priority`` asks for one of the high-priority streams."""

    def __new__(cls, device: _Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            made: Stream = super().__new__(cls, **kwargs)
            return made
        fresh: Stream = super().__new__(cls, torch.device(_NAME, _index(device)), priority=priority)
        return fresh

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority; lower numbers come first."""
        return (0, -1)

    def __repr__(self) -> str:
        return f"torch.{_NAME}.Stream(device={_NAME}:{self.device_index}, stream_id={self.stream_id})"


class _EventKind(type(torch.Event)):  # type: ignore[misc]  # torch gives the metaclass no stable name
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == _NAME


class Event(torch.Event, metaclass=_EventKind):
    """An event on a stream of a sim device; ``elapsed_time`` needs ``enable_timing=True`` on both ends.

    Instances are plain ``torch.Event`` objects, because ``torch.Event.elapsed_time`` refuses subclasses as its
    argument (torch 2.13; ``test_streams.py`` has the test). ``isinstance(event, torch.sim.Event)`` holds.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # type: ignore[misc]
        return torch.Event(
            torch.device(_NAME), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def _as_own(plain: torch.Stream) -> Stream:
    return Stream(stream_id=plain.stream_id, device_index=plain.device_index, device_type=plain.device_type)


def current_stream(device: _Device = None) -> Stream:
    """Return the current stream of ``device`` in this thread."""
    return _as_own(torch.accelerator.current_stream(_index(device)))


def default_stream(device: _Device = None) -> Stream:
    """Return the default stream of ``device``."""
    return Stream(stream_id=0, device_index=_index(device), device_type=_DEVICE_TYPE)


def set_stream(stream: torch.Stream | None) -> None:
    """Make ``stream`` and its device current in this thread; ``None`` changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Run the body with ``stream`` current, then put the previous stream and device back. ``None`` changes nothing."""
    if stream is None:
        yield
        return
    previous_device = current_device()
    previous = torch.accelerator.current_stream(stream.device_index)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous)
        _native.set_device(previous_device)


def _sleep(cycles: int) -> None:
    """Keep the current stream busy for ``cycles`` nanoseconds. Returns at once, as on a GPU of one gigahertz."""
    _native.sleep(int(cycles) * _NANOSECONDS_PER_CYCLE)


# --- properties ---


@dataclass(frozen=True)
class _Properties:
    name: str
    total_memory: int  # bytes
    multi_processor_count: int
    major: int
    minor: int


def get_device_properties(device: _Device = None) -> _Properties:
    """Return name, memory in bytes and the like of ``device``."""
    index = _index(device)
    _native.check_index(index)
    return _Properties(get_device_name(index), _native.memory_limit(index), 1, *get_device_capability(index))


def get_device_name(device: _Device = None) -> str:
    """Return the name of ``device``, the same for all."""
    _native.check_index(_index(device))
    return "Simulated accelerator"


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    """Return (0, 0): the device has no generations whose features differ."""
    _native.check_index(_index(device))
    return (0, 0)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast may use."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether bfloat16 tensors work: they do."""
    return True


# --- random numbers: see Note [Random numbers] in csrc/generator.h ---


def _get_generator(device: torch.device) -> torch.Generator:
    return _native.default_generator(_index(device))


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _native.default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        _native.default_generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seed the generator of the current device with a number that differs from run to run."""
    _native.default_generator(current_device()).seed()


def seed_all() -> None:
    """Seed the generators of all devices with one number that differs from run to run."""
    manual_seed_all(_native.default_generator(current_device()).seed())


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return _native.default_generator(current_device()).initial_seed()


def get_rng_state(device: _Device = _NAME) -> torch.Tensor:
    """Return the state of ``device``'s generator: 16 bytes, seed and offset."""
    return _native.default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = _NAME) -> None:
    """Set the state of ``device``'s generator from what :func:`get_rng_state` returned."""
    _native.default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of every device's generator."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the state of every device's generator."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# --- memory: all numbers in bytes ---


def empty_cache() -> None:
    """Return idle memory of all devices to the host."""
    if is_initialized():
        torch.accelerator.empty_cache()


def memory_stats(device: _Device = None) -> dict[str, Any]:
    """Return the allocator's statistics of ``device``, named as those of CUDA."""
    return dict(torch.accelerator.memory_stats(_index(device)))


def memory_allocated(device: _Device = None) -> int:
    """Return the bytes that tensors hold on ``device``."""
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: _Device = None) -> int:
    """Return the most bytes that tensors have held on ``device``."""
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: _Device = None) -> int:
    """Return the bytes that tensors hold on ``device`` and those kept for later ones."""
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: _Device = None) -> int:
    """Return the most bytes ever reserved on ``device``."""
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Make the current numbers of ``device`` its peaks."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: _Device = None) -> None:
    """Forget what ``device`` has allocated and freed so far, and how often it ran out."""
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Return the free and the total bytes of ``device``."""
    index = _index(device)
    limit = _native.memory_limit(index)
    return max(limit - memory_reserved(index), 0), limit


def set_memory_limit(nbytes: int, device: _Device = None) -> None:
    """Set how many bytes ``device`` has. An allocation past that raises ``torch.OutOfMemoryError``.

    Raises:
        ValueError: ``nbytes`` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"Expected a number of bytes, got {nbytes}.")
    _native.set_memory_limit(_index(device), nbytes)


def set_poison(enabled: bool) -> None:
    """Fill fresh and freed memory with NaN (-1 in integers), so that reads of unset values show. Off by default."""
    _native.set_poison(enabled)


def memory_summary(device: _Device = None, abbreviated: bool = False) -> str:
    """Return a few lines about the memory of ``device`` for people to read."""
    index = _index(device)
    stats = memory_stats(index)
    lines = [f"{_NAME}:{index} of {_native.memory_limit(index)} bytes"]
    for name in ("allocated_bytes", "reserved_bytes", "requested_bytes"):
        current, peak = (stats.get(f"{name}.all.{kind}", 0) for kind in ("current", "peak"))
        lines.append(f"  {name:<16} current {current:>15} peak {peak:>15}")
    if not abbreviated:
        lines.append(f"  out of memory    {stats.get('num_ooms', 0)} times")
    return "\n".join(lines)
