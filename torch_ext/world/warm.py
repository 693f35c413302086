"""Zygotes that ``torch_ext serve`` keeps warm, as a command finds them. Standard library and own layer only.

Note [A zygote for its user alone]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A process that connects to a zygote can run any code as the zygote's user, and a process that poses as a zygote can read
a program's arguments and environment. So the socket lies in a folder that no other user may enter, and both ends ask
the kernel for the other's user. The check of the folder and the socket use one descriptor of it, so no process can
replace the folder in between, and its path may be longer than a socket's address.

Note [What a zygote fits]
~~~~~~~~~~~~~~~~~~~~~~~~~
A rank must behave as if its command had loaded torch itself. That depends on the contents of files and on the *key*:
the interpreter and its flags, the search path, whether the simulator is loaded, and the variables that Python, torch
and native libraries may read only when they load. The socket's name is a hash of the key, so a command with another key
finds no zygote and loads torch itself. So does one that follows a change of a file that the zygote has loaded; when all
runs are over, the server then starts a new zygote.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch_ext.world import wording
from torch_ext.world.channel import Channel
from torch_ext.world.child import PACKAGE_ROOT
from torch_ext.world.tree import ZygoteClient
from torch_ext.world.zygote import read_when_loaded

# Variables that a process reads when it starts or loads torch, in addition to those of ``zygote.read_when_loaded``. The
# search path is part of the key, and the world reads most of our own on use.
_READ_AT_START = ("LANG", "LC_", "PYTHON", "PYTORCH_", "TORCH_")
_OURS_AT_START = (
    "TORCH_EXT_SIM", "TORCH_EXT_SIM_MACHINE_MEMORY", "TORCH_EXT_SIM_MEMORY", "TORCH_EXT_SIM_SANITIZE"
)  # fmt: skip
_CONNECT_S = 5.0


def search_path() -> tuple[str, ...]:
    """Return ``sys.path`` without this command's own entry, and with this package's folder at the end."""
    entries = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
    # Entries that are no files belong to a path hook, such as an editable installation's: keep them unchanged.
    path = [os.path.abspath(entry) if os.path.exists(entry) else entry for entry in entries if entry]
    return tuple(path if PACKAGE_ROOT in path else [*path, PACKAGE_ROOT])


def connect(name: str, held: contextlib.ExitStack) -> ZygoteClient | None:
    """Return the warm zygote of socket ``name``; None if there is none. ``held`` keeps the connection open."""
    with contextlib.suppress(OSError, IndexError, TypeError, ValueError):  # or another version's
        with folder() as place:
            connected = connected_to(place / name)
            for other in filter(None, map(connected_to, place.glob(f"{name[:4]}*") if connected is None else ())):
                other.close()
                differs = "its interpreter, search path or environment differs from this command's"
                wording.announce(f"`torch_ext serve` is not used: {differs}. Start it where you start programs")
        if connected is None or not is_own(connected):
            return None
        line = Channel(connected)
        held.callback(line.close)
        if not line.poll(_CONNECT_S):
            return None
        zygote_pid, descriptors = line.receive()
        channel = Channel.from_descriptor(descriptors[0])
        held.callback(channel.close)
        return ZygoteClient(channel, zygote_pid)
    return None


def connected_to(address: Path) -> socket.socket | None:
    """Return a socket connected to the server at ``address``; None if there is no server."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        found.connect(str(address))
    except (FileNotFoundError, ConnectionRefusedError):
        found.close()
        return None
    return found


def socket_name(simulated: bool, path: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """Return the name of the socket for a key; see Note [What a zygote fits]. Its first letters say the device."""
    at_start = sorted((name, value) for name, value in environment.items() if is_read_at_start(name))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    key = [sys.executable, sys.prefix, sys.version, flags, path, simulated, at_start]
    return f"{'sim-' if simulated else 'host'}{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.socket"


def is_read_at_start(name: str) -> bool:
    """Whether a process reads variable ``name`` when it starts or loads torch."""
    if name == "PYTHONPATH" or name.startswith("TORCH_EXT_"):
        return name in _OURS_AT_START
    return name.startswith(_READ_AT_START) or read_when_loaded(name)


@contextlib.contextmanager
def folder(makes: bool = False) -> Iterator[Path]:
    """Context: a path of the folder of sockets, valid inside the block. Raises OSError if there is none
    and ``makes`` is false, if it cannot be made, or if other users have access to it.
    """
    above = os.environ.get("XDG_RUNTIME_DIR", "")
    wanted = Path(above, "torch_ext") if above else Path(tempfile.gettempdir(), f"torch_ext-{os.geteuid()}")
    if makes:
        with contextlib.suppress(FileExistsError):
            wanted.mkdir(mode=0o700)
    try:
        opened = os.open(wanted, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:  # a file or a link
        raise PermissionError(f"{wanted} is not private to you: remove it") from None
    try:
        found = os.fstat(opened)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{wanted} is not private to you: remove it, or chmod 700 it")
        yield Path(f"/proc/self/fd/{opened}")
    finally:
        os.close(opened)


def is_own(connected: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user, according to the kernel."""
    _pid, uid, _gid = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())
