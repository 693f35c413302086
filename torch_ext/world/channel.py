"""Messages with descriptors between the processes of a world, over a Unix socket that keeps packets apart.

A packet is a magic number, a byte that marks the last packet of a message, and a part of the pickled payload, with at
most 200 of the message's descriptors; the kernel accepts 253. The unpickler accepts plain data and instances of our own
classes.

Note [Broken channels]
~~~~~~~~~~~~~~~~~~~~~~
A test can write into any descriptor of its process, and so into its end of a channel, where each write is a packet. One
without the magic number, or with an impossible payload, breaks the channel: no further message passes. The reader sends
its peer the reason, so that the writing process can report it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import selectors
import signal
import socket
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from os import fstat  # bound at import: a test may replace it
from typing import Any

from torch_ext.world import _os
from torch_ext.world._os import monotonic

_MAGIC = b"\xf5~T\xc4"
_LAST, _AHEAD = _MAGIC + b".", _MAGIC + b"+"
# Far above any message of ours: an order carries a test's arguments, a result the output of ranks.
_MAX_BYTES, _MAX_DESCRIPTORS = 1 << 30, 1 << 16
# In one packet.
_PART_BYTES, _GROUP = 64 << 10, 200
_ANCILLARY_BYTES = socket.CMSG_LEN((_GROUP + 1) * array("i").itemsize)
_NEVER = float("inf")
_GONE = "the process at the other end is gone"
# The end of a message about a broken channel.
WRITE_TO_OWN = "Write only to descriptors that you have opened."

_PACKAGE = __name__.partition(".")[0]
# Classes of the standard library that our messages hold.
_STANDARD = {
    "builtins": ("bytearray", "complex", "frozenset", "range", "set"),
    "datetime": ("timedelta",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # Python 3.13
    "signal": ("Signals", *signal.Signals.__members__),  # Python 3.10 to 3.11.3 pickles a signal by its own name
}

# A test may replace pickle.dumps.
_dumps = pickle.dumps


class ChannelClosedError(ConnectionError):
    """The process at the other end of a channel is gone, has closed the channel, or has broken it."""


class ChannelBrokenError(ChannelClosedError):
    """A process has written junk into a channel; the message describes the junk and lacks a subject. ``own``: this
    process wrote the junk, and its peer refused it.
    """

    def __init__(self, what: str, own: bool = False) -> None:
        super().__init__(what)
        self.own = own


def _member(kind: Any, name: str) -> Enum:
    """Return a member of an Enum, which Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickles as a call of getattr."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"getattr of {kind!r} is not allowed in a message")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name in _STANDARD.get(module, ()):
            return super().find_class(module, name)
        if module.partition(".")[0] == _PACKAGE:
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a message")


@dataclass(frozen=True)
class _Refused:
    what: str


class Channel:
    """One end of a connection. Owns its socket. One thread may send while another receives. ``peer`` is the inode of
    the socket at the other end, to name its descriptor in errors; 0 if unknown.
    """

    def __init__(self, sock: socket.socket, peer: int = 0) -> None:
        sock.settimeout(None)  # a test may have called socket.setdefaulttimeout()
        self._socket = sock
        self._peer = peer
        self._inode = fstat(sock.fileno()).st_ino
        self._ended: ChannelClosedError | None = None
        self._begin()

    def _begin(self) -> None:
        self._payload, self._is_complete = bytearray(), False  # of the next message
        self._descriptors: list[int] = []

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        """Return a channel that owns ``descriptor``, which was inherited or received."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        close_all(self._descriptors)
        self._begin()
        if self._owns_descriptor():
            self._socket.close()
        else:
            self._socket.detach()

    def detach(self) -> int:
        """Return the descriptor, which the caller owns now; the channel is closed."""
        return self._socket.detach()

    def shut(self) -> None:
        """End the connection for both ends, and wake a thread that waits in :meth:`receive`."""
        self._socket.shutdown(socket.SHUT_RDWR)

    # Sending

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send one message. Blocks while the peer's buffer is full.

        Raises:
            ChannelClosedError: the peer is gone, or this process has closed the descriptor.
            ValueError: the message is too long.
        """
        left, payload = list(descriptors), memoryview(_dumps(message))
        if len(payload) > _MAX_BYTES or len(left) > _MAX_DESCRIPTORS:
            raise ValueError(
                f"a message of {len(payload):,} bytes and {len(left):,} descriptors is too long: at most "
                f"{_MAX_BYTES:,} bytes and {_MAX_DESCRIPTORS:,} descriptors can be sent to another process"
            )
        self._check_descriptor()
        try:
            while len(payload) > _PART_BYTES or len(left) > _GROUP:
                socket.send_fds(self._socket, [_AHEAD, payload[:_PART_BYTES]], left[:_GROUP])
                left, payload = left[_GROUP:], payload[_PART_BYTES:]
            socket.send_fds(self._socket, [_LAST, payload], left)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError(_GONE) from error

    def try_send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send one message; no error if the process at the other end is gone."""
        with contextlib.suppress(OSError):
            self.send(message, descriptors)

    def connect(self, message: Any, descriptors: Sequence[int] = ()) -> Channel:
        """Send ``message`` with one end of a new channel, in front of ``descriptors``; return the other end."""
        local, remote = channel_pair()
        try:
            self.send(message, [remote.fileno(), *descriptors])
        except BaseException:
            local.close()
            raise
        finally:
            remote.close()
        return local

    def _owns_descriptor(self) -> bool:
        """Whether the descriptor is still this channel's: a test may close it and reuse its number."""
        try:
            return fstat(self._socket.fileno()).st_ino == self._inode
        except OSError:
            return False

    def _check_descriptor(self) -> None:
        if not self._owns_descriptor():
            raise ChannelClosedError("this process has closed the descriptor of a connection with the harness")

    # Receiving

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether :meth:`receive` returns or raises without waiting, at once or within ``timeout_s`` seconds."""
        end_s = monotonic() + timeout_s
        while not self._is_ready():
            left_s = end_s - monotonic()
            if left_s <= 0:
                return False
            readable(self._socket.fileno(), left_s)
        return True

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors, which the caller owns. Blocks until it is complete.

        Raises:
            ChannelClosedError: the peer closed the channel, is gone, or has broken it: see Note [Broken channels].
        """
        self.poll(_NEVER)
        if self._ended is not None:
            raise self._ended
        descriptors, payload = self._descriptors, self._payload
        self._begin()
        try:
            message = _Unpickler(io.BytesIO(payload)).load()
        except Exception as error:  # a payload that is not ours may raise anything
            close_all(descriptors)
            what = f"a packet of {len(payload)} bytes that is not a message ({type(error).__name__}: {error})"
            raise self.refuse(what) from None
        if isinstance(message, _Refused):
            raise self._end(ChannelBrokenError(message.what, own=True))
        return message, descriptors

    def refuse(self, what: str) -> ChannelBrokenError:
        """Break the channel, because its peer has sent ``what``; return the error."""
        descriptor = _descriptor_of(self._peer)
        where = f", descriptor {descriptor}" if descriptor else ""
        why = f"wrote {what} into its connection with the harness{where}"
        with contextlib.suppress(OSError, ValueError):
            self._socket.send(_LAST + _dumps(_Refused(why)), socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self.shut()
        error = ChannelBrokenError(why)
        self._end(error)
        return error

    def _is_ready(self) -> bool:
        """Read pending packets of the next message only. Return whether it is complete or the channel has ended."""
        while self._ended is None and not self._is_complete:
            try:
                self._read_packet()
            except BlockingIOError:
                return False
            except ConnectionResetError:  # said once if the peer leaves messages unread; its own may still be pending
                continue
            except ChannelClosedError as error:
                self._end(error)
            except OSError:
                self._end(ChannelClosedError(_GONE))
        return True

    def _read_packet(self) -> None:
        """Read one packet. Raises BlockingIOError if none has arrived yet."""
        self._check_descriptor()
        # socket.recv_fds() would drop the flags. An interpreter that a zygote starts must not keep other processes'
        # channels open.
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        packet, ancillary, found, _ = self._socket.recvmsg(len(_LAST) + _PART_BYTES, _ANCILLARY_BYTES, flags)
        for level, type_, data in ancillary:
            if (level, type_) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors += array("i", data[: len(data) - len(data) % array("i").itemsize])
        # Without POLLRDHUP, a test has written no bytes, which is a packet too.
        if not packet and readable(self._socket.fileno(), event=select.POLLRDHUP):
            raise ChannelClosedError(_GONE)
        if found & socket.MSG_CTRUNC:
            self.refuse("a message with descriptors that this process cannot open")
        elif packet.startswith((_LAST, _AHEAD)):
            self._payload += packet[len(_LAST) :]
            self._is_complete = packet.startswith(_LAST)
        else:
            more = " or more" if found & socket.MSG_TRUNC else ""
            self.refuse(f"{len(packet)}{more} bytes that are not a message (they begin with {packet[:16]!r})")

    def _end(self, why: ChannelClosedError) -> ChannelClosedError:
        close_all(self._descriptors)
        self._begin()
        self._ended = why
        return why


def channel_pair() -> tuple[Channel, Channel]:
    """Return two connected channels; descriptors of both are closed on exec."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inodes = [fstat(each.fileno()).st_ino for each in (one, other)]
    return Channel(one, inodes[1]), Channel(other, inodes[0])


def readable(descriptor: int, timeout_s: float = 0.0, event: int = select.POLLIN) -> bool:
    """Whether ``descriptor`` becomes readable (has ``event``) or ends within ``timeout_s`` seconds, maybe infinite."""
    ready = select.poll()  # select() refuses descriptors above 1023
    ready.register(descriptor, event)
    return bool(ready.poll(None if timeout_s == _NEVER else timeout_s * 1000))


def close_all(files: Iterable[int | Channel]) -> None:
    """Close descriptors and channels, ignoring those that are closed already."""
    for file in files:
        with contextlib.suppress(OSError):
            if isinstance(file, Channel):
                file.close()
            else:
                os.close(file)


def _descriptor_of(inode: int) -> int:
    """Return the descriptor of another process for the socket ``inode``; 0 if none is found."""
    with contextlib.suppress(OSError):
        for process in os.listdir("/proc"):
            if process.isdigit() and int(process) != _os.getpid():
                with contextlib.suppress(OSError):
                    for number in os.listdir(f"/proc/{process}/fd"):
                        if os.readlink(f"/proc/{process}/fd/{number}") == f"socket:[{inode}]":
                            return int(number)
    return 0


class Callbacks:
    """Calls back when a file (a descriptor, or an object with ``fileno()``) is readable."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """A descriptor that is readable whenever one of the files is."""
        return self._selector.fileno()

    @property
    def files(self) -> list[Any]:
        """The watched files; empty after :meth:`close`."""
        return [key.fileobj for key in (self._selector.get_map() or {}).values()]

    def is_open(self) -> bool:
        """Whether :meth:`close` has not been called."""
        return self._selector.get_map() is not None

    def watch(self, file: Any, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever ``file`` is readable."""
        self._selector.register(file, selectors.EVENT_READ, callback)

    def unwatch(self, file: Any) -> None:
        """Stop watching ``file``, which may be closed or not watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def call(self, timeout_s: float = _NEVER) -> None:
        """Call back for the readable files, after waiting at most ``timeout_s`` seconds if there are none. A callback
        may unwatch and close files, and call :meth:`close`.
        """
        for key, _ in self._selector.select(None if timeout_s == _NEVER else max(0.0, timeout_s)):
            # An earlier callback of this round may have unwatched the file.
            if (self._selector.get_map() or {}).get(key.fd) == key:
                key.data()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._selector.close()
