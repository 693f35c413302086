"""Streams and events of the simulated accelerator: see Note [Streams of an eager device] in csrc/stream.h."""

from __future__ import annotations

from typing import Any

import torch

from torch_ext.sim import _native
from torch_ext.sim._devices import Device, index_of
from torch_ext.sim._name import KEY, NAME

_DEVICE_TYPE = int(getattr(torch._C._autograd.DeviceType, KEY).value)
_NANOSECONDS_PER_CYCLE = 1


class Stream(torch.Stream):
    """A stream of a sim device. Lower numbers have a higher ``priority``; nothing runs earlier for that."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            made: Stream = super().__new__(cls, **kwargs)
            return made
        fresh: Stream = super().__new__(cls, torch.device(NAME, index_of(device)), priority=priority)
        return fresh

    @property
    def priority(self) -> int:
        """A number of :meth:`priority_range`."""
        return _native.stream_priority(self.stream_id)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority, those that torch has for GPUs."""
        return (0, -3)

    def wait_event(self, event: torch.Event) -> None:
        """Order later work on this stream after ``event``. Raises AttributeError for ``None``, as for ``torch.cuda``;
        ``torch.Stream`` reads any object as if it were an event.
        """
        event.wait(self)

    def __repr__(self) -> str:
        return f"torch.{NAME}.Stream(device={NAME}:{self.device_index}, stream_id={self.stream_id})"


class ExternalStream(Stream):
    """The stream of ``device`` with a handle that a program passed to a library (``native_handle``), or 0."""

    def __new__(cls, stream_ptr: int, device: Device = None) -> ExternalStream:
        index = index_of(device)
        stream_id = _native.stream_with_handle(index, stream_ptr)
        if stream_id is None:
            raise ValueError(f"{stream_ptr:#x} is the handle of no stream of {NAME}:{index}.")
        made: ExternalStream = super().__new__(cls, stream_id=stream_id, device_index=index, device_type=_DEVICE_TYPE)  # type: ignore[assignment]
        return made


def get_stream_from_external(data_ptr: int, device: Device = None) -> Stream:
    """Return the stream of ``device`` with the handle ``data_ptr``."""
    return ExternalStream(data_ptr, device)


class _EventKind(type(torch.Event)):  # type: ignore[misc]  # torch gives the metaclass no stable name
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == NAME


class Event(torch.Event, metaclass=_EventKind):
    """An event on a stream of a sim device; ``elapsed_time`` needs ``enable_timing=True`` on both ends.

    Instances are plain ``torch.Event`` objects, because ``torch.Event.elapsed_time`` refuses subclasses as its
    argument (torch 2.13; ``one_process/test_streams.py`` has the test). ``isinstance(event, torch.sim.Event)`` holds.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # type: ignore[misc]
        return torch.Event(
            torch.device(NAME), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    @classmethod
    def from_ipc_handle(cls, device: Device, handle: bytes) -> torch.Event:
        """Refuse: see :func:`refuse_to_share`."""
        return refuse_to_share()


def refuse_to_share(event: torch.Event | None = None) -> Any:
    """Refuse to share an event with another process, whose streams could not wait for this process's."""
    raise NotImplementedError(
        f"Events of {NAME} cannot be shared between processes. Synchronize the event, and tell the other process "
        "by other means, such as torch.multiprocessing.Event."
    )


def _as_sim_stream(plain: torch.Stream) -> Stream:
    return Stream(stream_id=plain.stream_id, device_index=plain.device_index, device_type=plain.device_type)


def current_stream(device: Device = None) -> Stream:
    """Return the current stream of ``device`` in this thread."""
    return _as_sim_stream(torch.accelerator.current_stream(index_of(device)))


def default_stream(device: Device = None) -> Stream:
    """Return the default stream of ``device``."""
    return Stream(stream_id=0, device_index=index_of(device), device_type=_DEVICE_TYPE)


def set_stream(stream: torch.Stream | None) -> None:
    """Make ``stream`` and its device current in this thread; ``None`` changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager that makes a stream and its device current and puts both back. ``None`` changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        # For each open entry: the previous device, and the previous stream of `stream`'s device.
        self._before: list[tuple[int, torch.Stream]] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before.append((_native.current_device(), torch.accelerator.current_stream(self.stream.device_index)))
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *exc_info: object) -> None:
        if self.stream is not None:
            device, stream = self._before.pop()
            torch.accelerator.set_stream(stream)
            _native.set_device(device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Return a context manager whose body runs with ``stream`` current. ``None`` changes nothing."""
    return StreamContext(stream)


def sleep(cycles: int) -> None:
    """Keep the current stream busy for ``cycles`` nanoseconds. Returns at once, as on a GPU of one gigahertz."""
    torch.accelerator.current_stream()  # a use of the device, before which torch's synchronize() does nothing
    _native.sleep(int(cycles) * _NANOSECONDS_PER_CYCLE)
