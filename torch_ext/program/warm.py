"""Which zygote starts the ranks of a program: one that ``torch_ext serve`` keeps warm, or one of this command's own.
Runs in the process that the user has started, which loads no torch.

Note [A zygote for its user alone]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Whoever can talk to a zygote has it run anything as its user, and whoever poses as one reads what it is sent. So the
socket lies in a folder that nobody else may enter, and both ends ask the kernel whose process the other one is. The
socket's name is made of what the zygote has loaded: the interpreter, the search path, the device and the sources of
this package. A command that would load something else finds no such socket, and starts a zygote of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch_ext.world import frames, scratch
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.protocol import Loaded, Preparation
from torch_ext.world.tree import RootZygote, ZygoteClient

__all__ = ["address_of", "is_own", "preparation", "search_path", "zygote_for"]

# Of these torch._dynamo is what every optimizer loads at its first step, in each rank anew unless its zygote has it.
_ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "torch_ext.world.rank", "torch_ext.program.rank")
_SIMULATED = ("torch_ext.sim",)
_PACKAGE = Path(__file__).resolve().parents[1]
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_CONNECT_S = 5.0


def preparation(simulated: bool, path: tuple[str, ...]) -> Preparation:
    """Return what a zygote of programs loads."""
    return Preparation(path, (*_ALWAYS, *(_SIMULATED if simulated else ())))


def search_path() -> tuple[str, ...]:
    """Return ``sys.path`` without the entry that belongs to this command; this package is found behind all others."""
    entries = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
    path = [os.path.abspath(entry) for entry in entries]
    root = str(_PACKAGE.parent)
    return tuple(path if root in path else [*path, root])


def address_of(simulated: bool, path: tuple[str, ...]) -> Path:
    """Return where the zygote that fits listens; its folder is made if it does not exist. See the Note above.

    Raises:
        OSError: the folder cannot be made, or is not this user's alone.
    """
    above = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(above, "torch_ext") if above else Path(tempfile.gettempdir(), f"torch_ext-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of yours alone: remove it, or chmod 700 it")
    digest = hashlib.sha256(repr((sys.executable, sys.prefix, path, simulated)).encode())
    for file in sorted(_PACKAGE.rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            found = file.stat()
            digest.update(f"{file}{found.st_size}{found.st_mtime_ns}".encode())
    return folder / f"{digest.hexdigest()[:16]}.socket"


def is_own(connected: socket.socket) -> bool:
    """Whether the process at the other end is this user's, as the kernel says."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(told)[1]
    return uid == os.geteuid()


@contextlib.contextmanager
def zygote_for(simulated: bool, path: tuple[str, ...], environment: Mapping[str, str]) -> Iterator[ZygoteClient]:
    """A zygote that has loaded torch, and the simulator if it is wanted, until the block is left.

    Raises:
        LoadError: one of the two cannot be loaded.
        ZygoteDiedError: the process ended meanwhile.
    """
    with contextlib.ExitStack() as held:
        found = _connect(simulated, path, held)
        if found is None:
            root = RootZygote(preparation(simulated, path), scratch.folder(), environment)
            held.callback(root.close)
            root.wait_ready()
            found = ZygoteClient(root.channel, root.process.pid)
        yield found


def _connect(simulated: bool, path: tuple[str, ...], held: contextlib.ExitStack) -> ZygoteClient | None:
    """Return a warm zygote that fits; None if nobody serves one."""
    with contextlib.suppress(OSError, ChannelClosedError):
        address = address_of(simulated, path)
        if not address.exists():
            return None
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(_CONNECT_S)
        line = Channel(connected)
        held.callback(line.close)
        connected.connect(str(address))
        if not is_own(connected):
            return None
        connected.settimeout(None)
        if not line.poll(_CONNECT_S):
            return None
        loaded, descriptors = line.receive()
        if isinstance(loaded, Loaded) and descriptors:
            frames.add(loaded.hidden_frames)
            channel = Channel.from_descriptor(descriptors[0])
            held.callback(channel.close)
            return ZygoteClient(channel)
    return None
