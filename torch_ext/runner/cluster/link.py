"""A connection between the supervisors of two machines that run ranks of the same class. Standard library and own layer
only.

Messages are pickled, so the machine that listens takes none before the other has sent the token of this class, which
both got from the driver. What passes is as open as what the ranks themselves send: a cluster is a network of friends.

:class:`RankEnds` is what either machine holds of a rank: its ends of the rank's channel and pipes.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torch_ext.runner.cluster.messages import RankStream
from torch_ext.runner.loop import Pause, Task
from torch_ext.world.channel import Callbacks, Channel, ChannelClosedError, close_all, readable
from torch_ext.world.protocol import Progress, Receipt

__all__ = ["Link", "LinkLostError", "Listener", "RankEnds", "connect", "on_our_clock"]

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
        """Send the token, and wait for no answer: the other machine may wait for this one at the same time."""
        self._connection.send_bytes(token.encode())

    def is_introduced(self, token: str) -> bool:
        """Whether the other machine sends ``token``. Call it once, before any message is read."""
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


_PART_BYTES = 1 << 16


class RankEnds:
    """A channel, and pipes by their stream.

    Args:
        channel: this end of the channel.
        pipes: descriptors of this end of the pipes.
        callbacks: watches those that are read here.
        told: called with a stream and what can be read there: a message, bytes, or None at its end.
    """

    def __init__(
        self,
        channel: Channel,
        pipes: dict[RankStream | int, int],
        callbacks: Callbacks,
        told: Callable[[RankStream | int, Any], None],
    ) -> None:
        self._channel, self._pipes, self._callbacks, self._told = channel, pipes, callbacks, told

    def watch(self, *streams: RankStream | int) -> None:
        """Read the channel and ``streams`` from now on."""
        for stream in (RankStream.CHANNEL, *streams):
            self._callbacks.watch(self._file(stream), partial(self._pass_on, stream))

    def _file(self, stream: RankStream | int) -> Channel | int:
        return self._channel if stream is RankStream.CHANNEL else self._pipes[stream]

    def _pass_on(self, stream: RankStream | int) -> bool:
        """Report what can be read to ``told``; return whether more may come."""
        payload = self._read(stream)
        if payload is None:
            self._callbacks.unwatch(self._file(stream))
        self._told(stream, payload)
        return payload is not None

    def _read(self, stream: RankStream | int) -> Any:
        with contextlib.suppress(ChannelClosedError, OSError):
            if stream is RankStream.CHANNEL:
                return self._channel.receive()[0]
            return os.read(self._pipes[stream], _PART_BYTES) or None
        return None

    def drain(self) -> None:
        """Report what the rank, which has ended, sent before its end."""
        for stream in (RankStream.CHANNEL, *self._pipes):
            while self._has_more(stream) and self._pass_on(stream):
                pass

    def _has_more(self, stream: RankStream | int) -> bool:
        file = self._file(stream)
        if not self._callbacks.watches(file):
            return False
        return file.poll() if isinstance(file, Channel) else readable(file)

    def write(self, stream: RankStream | int, payload: Any) -> None:
        """Write what the other machine has read. Blocks while a pipe is full."""
        with contextlib.suppress(ChannelClosedError, OSError, KeyError):  # nobody reads there any more
            if stream is RankStream.CHANNEL and payload is None:
                self._channel.shut()
            elif stream is RankStream.CHANNEL:
                self._channel.send(payload)
            elif payload is None:
                self._callbacks.unwatch(self._pipes[stream])
                os.close(self._pipes.pop(stream))
            while isinstance(payload, bytes) and payload:
                payload = payload[os.write(self._pipes[stream], payload) :]

    def close(self) -> None:
        for file in (self._channel, *self._pipes.values()):
            self._callbacks.unwatch(file)
        self._channel.close()
        close_all(list(self._pipes.values()))
        self._pipes = {}


def on_our_clock(message: Any, shift_s: float) -> Any:
    """Return a message of a rank with its times by this machine's clock."""
    if isinstance(message, Receipt):
        met_s = (message.met_s[0] + shift_s, message.met_s[1] + shift_s) if message.met_s[1] else (0.0, 0.0)
        began_s = message.began_s + shift_s if message.began_s else 0.0
        return replace(message, time_s=message.time_s + shift_s, began_s=began_s, met_s=met_s)
    if isinstance(message, Progress):
        return replace(message, until_s=message.until_s + shift_s, raises_s=message.raises_s + shift_s)
    return message
