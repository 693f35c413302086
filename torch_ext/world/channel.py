"""Messages with descriptors between the processes of a world, over a Unix stream socket.

A frame is a 12-byte header (a magic number, the length of the payload in bytes and the number of descriptors, each an
unsigned 32-bit integer in network order) and the pickled payload. The descriptors travel with the header in groups,
since the kernel accepts at most 253 per message. The unpickler accepts plain data and instances of our own classes.

Note [Broken channels]
~~~~~~~~~~~~~~~~~~~~~~
A test can write into any descriptor of its process, and so into its end of a channel. Reading therefore never blocks on
half a frame: :meth:`Channel.poll` is true when :meth:`Channel.receive` has a whole frame or an end. A wrong magic
number, an impossible length or payload, or a frame that stalls for 30 seconds breaks the channel: no further message
passes. The reader sends its peer the reason, so that the writing process can report it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import selectors
import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import fstat  # bound at import: a test may replace it
from typing import Any

from torch_ext.world import _os
from torch_ext.world._os import monotonic

_HEADER = struct.Struct("!III")
_MAGIC = 0xF57E54C4
_MAGIC_BYTES = _MAGIC.to_bytes(4, "big")
# Far above any message of ours: an order carries a test's arguments, a result the output of ranks.
_MAX_BYTES, _MAX_DESCRIPTORS = 1 << 30, 1 << 16
_GROUP, _PART_BYTES = 200, 1 << 20
_INT_BYTES = array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_LEN((_GROUP + 1) * _INT_BYTES)
# Seconds for which a frame may stall. A sender writes a frame at once, unless the process is stopped or starved.
_FRAME_S = 30.0
_NEVER = float("inf")
_GONE = "the process at the other end is gone"
# The end of a message about a broken channel.
WRITE_TO_OWN = "Write only to descriptors that you have opened."
# Bytes of junk to read and count.
_JUNK_BYTES = 1 << 20

_PACKAGE = __name__.partition(".")[0]
# Classes of the standard library that our messages hold.
_STANDARD = {
    "builtins": ("bytearray", "complex", "frozenset", "range", "set"),
    "datetime": ("timedelta",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # Python 3.13
    "signal": ("Signals",),
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
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
        self._header, self._payload = bytearray(), bytearray()
        self._descriptors: list[int] = []
        self._groups = 0  # missing bytes that carry groups of descriptors
        self.deadline_s = float("inf")

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
        payload = _dumps(message)
        if len(payload) > _MAX_BYTES or len(descriptors) > _MAX_DESCRIPTORS:
            raise ValueError(
                f"a message of {len(payload):,} bytes and {len(descriptors):,} descriptors is too long: at most "
                f"{_MAX_BYTES:,} bytes and {_MAX_DESCRIPTORS:,} descriptors can be sent to another process"
            )
        self._check_descriptor()
        header = _HEADER.pack(_MAGIC, len(payload), len(descriptors))
        try:
            if not descriptors:
                self._socket.sendall(header)
            for start in range(0, len(descriptors), _GROUP):
                socket.send_fds(self._socket, [b"+" if start else header], list(descriptors[start : start + _GROUP]))
            self._socket.sendall(payload)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError(_GONE) from error

    def try_send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send one message; no error if the process at the other end is gone."""
        with contextlib.suppress(ChannelClosedError, OSError):
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
        """Whether :meth:`receive` returns or raises without waiting, at once or within ``timeout_s`` seconds.

        While a frame is incomplete, call this again at ``deadline_s`` (``time.monotonic``) even if nothing arrives.
        """
        end_s = monotonic() + timeout_s
        while not self._is_ready():
            left_s = min(end_s, self.deadline_s) - monotonic()
            if end_s <= monotonic():
                return False
            readable(self._socket.fileno(), max(0.0, left_s))
        return True

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors, which the caller owns. Blocks until it is complete.

        Raises:
            ChannelClosedError: the peer closed the channel, is gone, or has broken it: see Note [Broken channels].
        """
        self.poll(_NEVER)
        if self._ended is not None:
            raise self._ended
        descriptors, payload, count = self._descriptors, self._payload, _HEADER.unpack(self._header)[2]
        self._begin()
        try:
            if len(descriptors) != count:
                raise ValueError(f"it came with {len(descriptors)} descriptors instead of {count}")
            message = _Unpickler(io.BytesIO(payload)).load()
        except Exception as error:  # a payload that is not ours may raise anything
            close_all(descriptors)
            what = f"a frame of {len(payload)} bytes that is not a message ({type(error).__name__}: {error})"
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
            payload = _dumps(_Refused(why))
            self._socket.send(_HEADER.pack(_MAGIC, len(payload), 0) + payload, socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self.shut()
        error = ChannelBrokenError(why)
        self._end(error)
        return error

    def _is_ready(self) -> bool:
        """Read pending bytes of the next frame only. Return whether it is complete or the channel has ended."""
        try:
            while self._ended is None and (missing := self._missing()):
                self._read_part(missing)
        except BlockingIOError:
            if monotonic() < self.deadline_s:
                return False
            self.refuse(f"{len(self._header) + len(self._payload)} bytes of an incomplete message")
        except ChannelClosedError as error:
            self._end(error)
        except OSError:
            self._end(ChannelClosedError(_GONE))
        return True

    def _missing(self) -> int:
        """Return the number of missing bytes: of the header, else of the groups of descriptors, else of the payload; 0
        after bytes that are no frame.
        """
        wanted = _HEADER.size - len(self._header)
        known = min(len(self._header), len(_MAGIC_BYTES))
        if self._header[:known] != _MAGIC_BYTES[:known]:
            self.refuse(self._junk())
            return 0
        if wanted:
            return wanted
        _, length, count = _HEADER.unpack(self._header)
        if length > _MAX_BYTES or count > _MAX_DESCRIPTORS:
            self.refuse(f"a frame of {length:,} bytes with {count:,} descriptors, more than a message has")
            return 0
        return self._groups or length - len(self._payload)

    def _read_part(self, missing: int) -> None:
        """Read up to ``missing`` bytes of the next part of a frame. Raises BlockingIOError if none has arrived yet."""
        self._check_descriptor()
        if len(self._header) == _HEADER.size and not self._groups:
            part = self._socket.recv(min(missing, _PART_BYTES), socket.MSG_DONTWAIT)
            self._payload += part
        else:
            # socket.recv_fds() would drop the flags.
            part, ancillary, _, _ = self._socket.recvmsg(missing, _ANCILLARY_BYTES, socket.MSG_DONTWAIT)
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    received = array("i", data[: len(data) // _INT_BYTES * _INT_BYTES])
                    self._descriptors += received
                    # An interpreter that a zygote starts must not keep other processes' channels open.
                    for descriptor in received:
                        os.set_inheritable(descriptor, False)
            if self._groups:
                self._groups -= len(part)
            else:
                self._header += part
                if len(self._header) == _HEADER.size:
                    count = _HEADER.unpack(self._header)[2]
                    self._groups = max(0, -(-count // _GROUP) - 1)
        if not part:
            raise ChannelClosedError(_GONE)
        self.deadline_s = monotonic() + _FRAME_S

    def _junk(self) -> str:
        """Read the pending bytes and describe them."""
        found = bytes(self._header)
        with contextlib.suppress(OSError):
            while len(found) < _JUNK_BYTES and (part := self._socket.recv(_PART_BYTES, socket.MSG_DONTWAIT)):
                found += part
        more = " or more" if len(found) >= _JUNK_BYTES else ""
        return f"{len(found)}{more} bytes that are not a message (they begin with {found[:16]!r})"

    def _end(self, why: ChannelClosedError) -> ChannelClosedError:
        close_all(self._descriptors)
        self._begin()
        self._ended = why
        return why


def channel_pair() -> tuple[Channel, Channel]:
    """Return two connected channels; descriptors of both are closed on exec."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    inodes = [fstat(each.fileno()).st_ino for each in (one, other)]
    return Channel(one, inodes[1]), Channel(other, inodes[0])


def readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    """Whether ``descriptor`` becomes readable or ends within ``timeout_s`` seconds, which may be infinite."""
    ready = select.poll()  # select() refuses descriptors above 1023
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(None if timeout_s == _NEVER else timeout_s * 1000))


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors, ignoring those that are closed already."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


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
    """Calls back when a file (a descriptor, or an object with ``fileno()``) is readable or past its ``deadline_s``."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def __len__(self) -> int:
        """The number of watched files; 0 after :meth:`close`."""
        return len(self._selector.get_map() or ())

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

    def watches(self, file: Any) -> bool:
        """Whether ``file`` is watched."""
        with contextlib.suppress(KeyError, ValueError):
            return self._selector.get_key(file) is not None
        return False

    def call(self, timeout_s: float = _NEVER) -> None:
        """Call back for the readable files, after waiting at most ``timeout_s`` seconds if there are none. A callback
        may unwatch and close files, and call :meth:`close`.
        """
        left_s = min(timeout_s, *(getattr(file, "deadline_s", _NEVER) - monotonic() for file in self.files), _NEVER)
        ready = [key for key, _ in self._selector.select(None if left_s == _NEVER else max(0.0, left_s))]
        watched = self._selector.get_map().values()
        ready += [key for key in watched if getattr(key.fileobj, "deadline_s", _NEVER) <= monotonic()]
        for key in dict.fromkeys(ready):
            # An earlier callback of this round may have unwatched the file.
            if (self._selector.get_map() or {}).get(key.fd) == key:
                key.data()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._selector.close()
