"""Which zygote starts the ranks of a program: one that ``torch_ext serve`` keeps warm, or one of this command's own.
Runs in the process that the user has started, which loads no torch.

Note [A zygote for its user alone]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Whoever can talk to a zygote has it run anything as its user, and whoever poses as one reads what it is sent. So the
socket lies in a folder that nobody else may enter, and both ends ask the kernel whose process the other one is. The
folder is opened once and looked at as what was opened, and the socket is found through its descriptor: nobody can put
another folder in its place, and its path may be as long as it likes (a socket's may not).

Note [What a zygote fits]
~~~~~~~~~~~~~~~~~~~~~~~~~
A rank must be what it would be if the command had loaded torch itself. What decides about that, but for the contents
of files, is the *key* below: the interpreter and its flags, the search path, whether the simulator is loaded, and the
variables that Python, torch and the libraries below it may read once, when they are loaded. The socket's name is made
of it, so a command with another key finds no zygote and loads torch itself. Files are the server's to watch; see
Note [A stale zygote].
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torch_ext.world import files, wording
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.follow import ZygoteLostError
from torch_ext.world.protocol import HiddenFrames, Preparation
from torch_ext.world.tree import ZygoteClient, ZygoteDiedError, start_root
from torch_ext.world.zygote import read_when_loaded

__all__ = [
    "Key",
    "Welcome",
    "connect",
    "folder",
    "is_own",
    "key_of",
    "listen",
    "preparation",
    "search_path",
    "socket_name",
    "zygote_for",
]

Key = Mapping[str, object]

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_ABOUT = ".json"  # beside the socket: the key, in a file that its server holds locked
# Variables that a process reads when it starts or loads torch, besides those that stop any zygote from forking.
_READ_AT_START = ("LANG", "LC_", "PYTHON", "PYTORCH_", "TORCH_")
# Of these, some are not: the search path says what came of the first, and the world reads the others on use.
_READ_LATER = frozenset(
    {
        "PYTHONPATH", "TORCH_EXT_ADDRESS", "TORCH_EXT_CACHE", "TORCH_EXT_DEVICE", "TORCH_EXT_HANG_AFTER",
        "TORCH_EXT_HOST", "TORCH_EXT_HOST_ADDRESS", "TORCH_EXT_OPTIONS", "TORCH_EXT_OWNER",
        "TORCH_EXT_SCHEDULE", "TORCH_EXT_SHOW_OUTPUT", "TORCH_EXT_SIM_BLOCKING_WAIT", "TORCH_EXT_SIM_DEVICES",
        "TORCH_EXT_SIM_REDUCE", "TORCH_EXT_SIM_TRANSPORT", "TORCH_EXT_SPARES", "TORCH_EXT_START_METHOD",
        "TORCH_EXT_TEARDOWN", "TORCH_EXT_THREADS", "TORCH_EXT_TIMEOUT",
        "TORCH_EXT_TOLD_VERSION", "TORCH_EXT_TRIAL_FORK", "TORCH_EXT_WAIT_PAGE",
    }
)  # fmt: skip
_PACKAGE = Path(__file__).resolve().parents[1]
_CONNECT_S = 5.0
# What may come of a message of another version of this package.
_MISREAD = (pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError)

# Of these torch._dynamo is what every optimizer loads at its first step, in each rank anew unless its zygote has it.
_ALWAYS = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch_ext.world.rank",
    "torch_ext.program.rank",
)
_SIMULATED = ("torch_ext.sim",)


def preparation(simulated: bool, path: tuple[str, ...]) -> Preparation:
    """Return what a warm zygote loads."""
    return Preparation(path, (*_ALWAYS, *(_SIMULATED if simulated else ())))


@contextlib.contextmanager
def zygote_for(simulated: bool, path: tuple[str, ...], environment: Mapping[str, str]) -> Iterator[ZygoteClient]:
    """A zygote that has loaded torch, and the simulator if it is wanted, until the block is left.

    Raises:
        LoadError: one of the two cannot be loaded.
        ZygoteDiedError: the process ended meanwhile.
    """
    with contextlib.ExitStack() as held:
        found = connect(key_of(simulated, path, environment), held)
        if found is None:
            root = start_root(preparation(simulated, path), files.folder(), environment)
            held.callback(root.close)
            root.wait_ready()
            yield ZygoteClient(root.channel, root.process.pid)
            return
        try:
            yield found
        except (ZygoteDiedError, ZygoteLostError) as error:
            raise ZygoteDiedError("`torch_ext serve`, which had started the ranks, has ended") from error


@dataclass(frozen=True)
class Welcome:
    """What a server sends to a command, along with a command channel to its zygote.

    Attributes:
        hidden_frames: what the layers that the zygote has loaded leave out of reports.
        zygote_pid: the zygote, which is looked at if it does not answer.
    """

    hidden_frames: tuple[HiddenFrames, ...]
    zygote_pid: int


def search_path() -> tuple[str, ...]:
    """Return ``sys.path`` without the entry that belongs to this command; this package is found behind all others."""
    entries = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
    # What names no file is for a path hook, as an editable installation has it, and means the same in every folder.
    path = [os.path.abspath(entry) if os.path.exists(entry) else entry for entry in entries if entry]
    root = str(_PACKAGE.parent)
    return tuple(path if root in path else [*path, root])


def connect(key: Key, held: contextlib.ExitStack) -> ZygoteClient | None:
    """Return a warm zygote that fits, with a line that ``held`` keeps open; None if nobody serves one."""
    with contextlib.suppress(OSError, ChannelClosedError, *_MISREAD):
        connected = socket.socket(socket.AF_UNIX)
        line = Channel(connected)
        held.callback(line.close)
        with folder() as place:
            connected.settimeout(_CONNECT_S)
            try:
                connected.connect(str(place / socket_name(key)))
            except (FileNotFoundError, ConnectionRefusedError):
                if other := why_none_fits(key):
                    wording.announce(f"the zygote of `torch_ext serve` is not used: it differs in {other}")
                return None
        if not is_own(connected):
            return None
        connected.settimeout(None)
        if not line.poll(_CONNECT_S):
            return None
        welcome, descriptors = line.receive()
        if isinstance(welcome, Welcome) and descriptors:
            wording.add(welcome.hidden_frames)
            channel = Channel.from_descriptor(descriptors[0])
            held.callback(channel.close)
            return ZygoteClient(channel, welcome.zygote_pid)
    return None


def key_of(simulated: bool, path: tuple[str, ...], environment: Mapping[str, str]) -> Key:
    """Return what a zygote must have in common with the command that it starts ranks for. See the Note above."""
    at_start = {
        name: value
        for name, value in environment.items()
        if name not in _READ_LATER and (name.startswith(_READ_AT_START) or read_when_loaded(name))
    }
    return {
        "the interpreter": [sys.executable, sys.prefix, sys.version],
        "the interpreter's flags": subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
        "the search path": list(path),
        "the device": simulated,
        **{name: at_start[name] for name in sorted(at_start)},
    }


def socket_name(key: Key) -> str:
    """Return the name of the socket in the folder."""
    return f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.socket"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """The folder of sockets, which is made if it does not exist, under a path that is good within the block.

    Raises:
        OSError: the folder cannot be made, or is not this user's alone.
    """
    above = os.environ.get("XDG_RUNTIME_DIR", "")
    wanted = Path(above, "torch_ext") if above else Path(tempfile.gettempdir(), f"torch_ext-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        wanted.mkdir(mode=0o700)
    try:
        opened = os.open(wanted, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:  # or a link
        raise PermissionError(f"{wanted} is not a folder of yours alone: remove it") from None
    try:
        found = os.fstat(opened)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{wanted} is not a folder of yours alone: remove it, or chmod 700 it")
        yield Path(f"/proc/self/fd/{opened}")
    finally:
        os.close(opened)


@contextlib.contextmanager
def listen(key: Key) -> Iterator[socket.socket]:
    """A socket that commands with this key find, until the block is left.

    Raises:
        OSError: there is no place for it, or another process serves there.
    """
    with folder() as place, socket.socket(socket.AF_UNIX) as listening:
        address = place / socket_name(key)
        with open(_lock(address.with_suffix(_ABOUT)), "r+", encoding="utf-8") as about:
            about.truncate()
            json.dump(key, about)
            about.flush()
            address.unlink(missing_ok=True)  # of one that was killed
            listening.bind(str(address))
            try:
                listening.listen()
                yield listening
            finally:
                address.unlink(missing_ok=True)
                address.with_suffix(_ABOUT).unlink(missing_ok=True)


def _lock(path: Path) -> int:
    """Return a descriptor of the file ``path``, made if it does not exist and locked by this process alone."""
    while True:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(opened), os.stat(path)):
                    return opened
            os.close(opened)  # whoever had it has ended meanwhile, and removed it
        except BlockingIOError:
            os.close(opened)
            raise FileExistsError("another process serves these runs already") from None


def is_own(connected: socket.socket) -> bool:
    """Whether the process at the other end is this user's, as the kernel says."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(told)[1]
    return uid == os.geteuid()


def why_none_fits(key: Key) -> str:
    """Return in what the zygote that is served differs from ``key``; empty if none is served, or none for its device.

    Raises:
        OSError: the folder cannot be looked at.
    """
    with folder() as place:
        for file in sorted(place.glob(f"*{_ABOUT}")):
            with contextlib.suppress(OSError, ValueError), open(file, encoding="utf-8") as about:
                if _is_locked(about):
                    other = json.load(about)
                    differ = [name for name in {**key, **other} if key.get(name) != other.get(name)]
                    if differ and "the device" not in differ:
                        return ", ".join(differ)
    return ""


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
