"""A connection between the supervisors of two machines that run ranks of the same class. Standard library and own layer
only.

Messages are pickled, so the machine that listens takes none before the other has sent the token of this class, which
both got from the driver. What passes is as open as what the ranks themselves send: a cluster is a network of friends.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from torch_ext.runner.loop import Task, Wait

__all__ = ["Link", "LinkLostError", "Listener", "connect", "read_part", "write_all"]

_LENGTH = struct.Struct("!Q")
_PART_BYTES = 1 << 16
# How long the other side may take to connect, to say who it is, and to take what is sent, in seconds.
_CONNECT_S, _TOKEN_S, _SEND_S = 60.0, 10.0, 60.0
# A machine without power says nothing: after so many seconds without a word the kernel asks, and gives up after a few
# more questions.
_IDLE_S, _ASK_S, _QUESTIONS = 10, 5, 4


class LinkLostError(ConnectionError):
    """The other machine, or its supervisor, is gone."""


class Link:
    """One end. Sending blocks while the other side does not read, receiving never."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = bytearray()
        connected.settimeout(_SEND_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _ASK_S), ("TCP_KEEPCNT", _QUESTIONS)):
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            LinkLostError: the other side is gone.
        """
        payload = pickle.dumps(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise LinkLostError(str(error)) from error

    def receive(self) -> Iterator[Any]:
        """Yield the messages that have arrived whole. Call it when :meth:`fileno` is readable.

        Raises:
            LinkLostError: the other side is gone.
        """
        try:
            part = self._socket.recv(1 << 20)
        except OSError as error:
            raise LinkLostError(str(error)) from error
        self._received += part
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            payload = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            yield pickle.loads(payload)
        if not part:
            raise LinkLostError("the connection was closed")

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._socket.close()


class Listener:
    """Waits for the machine that runs a class.

    Args:
        address: where it will connect to.

    Attributes:
        port: likewise.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            self._socket.bind((address, 0))
        except OSError:  # the machine is known to others by an address that it does not have itself
            self._socket.bind(("", 0))
        self._socket.listen()
        self.port: int = self._socket.getsockname()[1]

    def accept(self, token: str) -> Task[Link]:
        """A task that returns the link. Whoever does not know the token is turned away.

        Raises:
            LinkLostError: nobody has come in time.
        """
        end_s = time.monotonic() + _CONNECT_S
        while (now_s := time.monotonic()) < end_s:
            yield Wait((self._socket,), end_s)
            self._socket.settimeout(0.0)
            with contextlib.suppress(OSError):
                connected, _ = self._socket.accept()
                connected.settimeout(0.0)
                if (yield from _says(connected, token.encode(), min(end_s, now_s + _TOKEN_S))):
                    return Link(connected)
                connected.close()
        raise LinkLostError(f"the machine that runs the class has not come within {_CONNECT_S:g} s")

    def close(self) -> None:
        self._socket.close()


def _says(connected: socket.socket, token: bytes, end_s: float) -> Task[bool]:
    """A task that returns whether the first bytes of a connection are ``token``."""
    said = b""
    while len(said) < len(token) and time.monotonic() < end_s:
        yield Wait((connected,), end_s)
        with contextlib.suppress(BlockingIOError):
            part = connected.recv(len(token) - len(said))
            if not part:
                return False
            said += part
    return hmac.compare_digest(said, token)


def connect(address: str, port: int, token: str) -> Link:
    """Connect to the machine that listens there.

    Raises:
        LinkLostError: it cannot be reached.
    """
    try:
        connected = socket.create_connection((address, port), _TOKEN_S)
        connected.sendall(token.encode())
    except OSError as error:
        raise LinkLostError(str(error)) from error
    return Link(connected)


def read_part(descriptor: int) -> bytes:
    """Read what a pipe holds, or the first of it. Empty at its end, also where that is an error."""
    try:
        return os.read(descriptor, _PART_BYTES)
    except OSError:
        return b""


def write_all(descriptor: int, data: bytes) -> None:
    """Write ``data`` to a pipe. Blocks while that is full."""
    while data:
        data = data[os.write(descriptor, data) :]
