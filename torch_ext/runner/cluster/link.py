"""A connection between the supervisors of two machines that run ranks of the same class. Standard library and own layer
only.

Messages are pickled, so the machine that listens takes none before the other has sent the token of this class, which
both got from the driver. What passes is as open as what the ranks themselves send: a cluster is a network of friends.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

from torch_ext.runner.loop import Pause, Task

__all__ = ["Link", "LinkLostError", "Listener", "connect"]

# How long the other side may take to connect, to take what is sent, and to finish what it has begun to say, in seconds.
_CONNECT_S, _SEND_S, _REST_S = 60.0, 60, 10
# A machine without power says nothing: after so many seconds without a word the kernel asks, and gives up after a few
# more questions.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class LinkLostError(ConnectionError):
    """The other machine, or its supervisor, is gone."""


class Link:
    """One end. Sending blocks while the other side does not read."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        for option, limit_s in ((socket.SO_RCVTIMEO, _REST_S), (socket.SO_SNDTIMEO, _SEND_S)):
            connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", limit_s, 0))
        self._connection = Connection(connected.detach())

    def introduce(self, token: str) -> None:
        """Say who this machine is, and wait for no answer: the other may be about to connect to this one."""
        self._connection.send_bytes(token.encode())

    def is_introduced(self, token: str) -> bool:
        """Whether the other machine says that it is the one with ``token``. Call it once, before anything else."""
        with contextlib.suppress(OSError, EOFError):
            return hmac.compare_digest(self._connection.recv_bytes(len(token)), token.encode())
        return False

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            LinkLostError: the other side is gone.
        """
        try:
            self._connection.send(message)
        except OSError as error:
            raise LinkLostError(str(error)) from error

    def receive(self) -> Any:
        """Return the next message, waiting for the rest of it. Call it when :meth:`fileno` is readable.

        Raises:
            LinkLostError: the other side is gone.
        """
        try:
            return self._connection.recv()
        except (OSError, EOFError) as error:
            raise LinkLostError(str(error) or "the connection was closed") from error

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._connection.close()


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
        self._socket.settimeout(0.0)
        self.port: int = self._socket.getsockname()[1]

    def accept(self, token: str) -> Task[Link]:
        """A task that returns the link to the machine that knows the token, and turns others away.

        Raises:
            LinkLostError: nobody has come in time.
        """
        end_s = time.monotonic() + _CONNECT_S
        while time.monotonic() < end_s:
            yield Pause((self._socket,), end_s)
            with contextlib.suppress(OSError):
                link = Link(self._socket.accept()[0])
                if link.is_introduced(token):
                    return link
                link.close()
        raise LinkLostError(f"the machine that runs the class has not come within {_CONNECT_S:g} s")

    def close(self) -> None:
        self._socket.close()


def connect(address: str, port: int, token: str) -> Link:
    """Connect to the machine that listens there.

    Raises:
        LinkLostError: it cannot be reached.
    """
    try:
        link = Link(socket.create_connection((address, port), _REST_S))
        link.introduce(token)
    except OSError as error:
        raise LinkLostError(str(error)) from error
    return link
