"""Messages with descriptors between the processes of a world, over a Unix stream socket.

A frame is an 8-byte header (payload length in bytes, then the number of descriptors, both unsigned 32-bit integers in
network order) followed by the pickled payload. The descriptors travel with the header in groups, since the kernel
accepts at most 253 per message. Messages are pickled, so both ends must be ours; no channel ever leaves the machine.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["Channel", "ChannelClosedError", "channel_pair", "close_all", "readable"]

_HEADER = struct.Struct("!II")
_GROUP = 200


# Tests may replace it.
_dumps = pickle.dumps


class ChannelClosedError(ConnectionError):
    """The process at the other end of a channel is gone, or has closed it."""


class Channel:
    """One end of a connection. Owns its socket; not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        """Adopt an inherited or received descriptor, which the channel then owns."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        self._socket.close()

    def shut(self) -> None:
        """End the connection for both ends, also for a thread that waits in :meth:`receive`."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether :meth:`receive` would return or raise at once, as far as the first byte is concerned, or would within
        ``timeout_s`` seconds.
        """
        return readable(self._socket.fileno(), timeout_s)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send one message. Blocks while the peer's buffer is full.

        Raises:
            ChannelClosedError: the peer is gone.
        """
        payload = _dumps(message)
        header = _HEADER.pack(len(payload), len(descriptors))
        try:
            first, rest = descriptors[:_GROUP], descriptors[_GROUP:]
            if first:
                socket.send_fds(self._socket, [header], list(first))
            else:
                self._socket.sendall(header)
            while rest:
                group, rest = rest[:_GROUP], rest[_GROUP:]
                socket.send_fds(self._socket, [b"+"], list(group))
            self._socket.sendall(payload)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError("the process at the other end is gone") from error

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors, which the caller owns. Blocks until it is complete.

        Raises:
            ChannelClosedError: the peer closed the channel or is gone.
        """
        descriptors: list[int] = []
        try:
            header = self._read_with_descriptors(_HEADER.size, descriptors)
            length, count = _HEADER.unpack(header)
            while len(descriptors) < count:
                self._read_with_descriptors(1, descriptors)
            return pickle.loads(self._read(length)), descriptors
        except ConnectionResetError as error:
            close_all(descriptors)
            raise ChannelClosedError("the process at the other end is gone") from error
        except BaseException:
            close_all(descriptors)
            raise

    def _read_with_descriptors(self, size: int, descriptors: list[int]) -> bytes:
        """Read ``size`` bytes. Add received descriptors to ``descriptors`` at once, since a later read may fail."""
        data, received, _, _ = socket.recv_fds(self._socket, size, _GROUP + 1)
        descriptors += received
        # An interpreter that a zygote starts must not keep the channels of others open: nobody would see them close.
        for descriptor in received:
            os.set_inheritable(descriptor, False)
        if not data:
            raise ChannelClosedError("the process at the other end is gone")
        return data + self._read(size - len(data))

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise ChannelClosedError("the process at the other end is gone")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def channel_pair() -> tuple[Channel, Channel]:
    """Return two connected channels; descriptors of both are closed on exec."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(one), Channel(other)


def readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    """Whether ``descriptor`` can be read from, or comes to an end, within ``timeout_s`` seconds."""
    if not hasattr(select, "poll"):
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    ready = select.poll()  # unlike select(), it takes descriptors above 1023
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(timeout_s * 1000))


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors, ignoring those that are closed already."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
