"""``torch_ext serve`` keeps a zygote warm for later programs; ``torch_ext run`` finds it, or starts its own.

The server stays in the foreground, serves only its user and ends after a while without runs. Its ranks have the
environment, folder and umask of their command, but the limits, the control group and the priority of the server.
Neither the server nor the command loads torch itself.

Note [A zygote for its user alone]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A process that connects to a zygote can run any code as the zygote's user, and a process that poses as a zygote can read
a program's arguments and environment. So the socket lies in a folder that no other user may enter, and both ends ask
the kernel for the other's user. The check of the folder and the socket use one descriptor of it, so no process can
replace the folder in between, and its path may be longer than a socket's address.

Note [What a zygote fits]
~~~~~~~~~~~~~~~~~~~~~~~~~
A rank must behave as if the command had loaded torch itself. That depends on the contents of files and on the *key*:
the interpreter and its flags, the search path, whether the simulator is loaded, and the variables that Python, torch
and native libraries may read only when they load. The socket's name is a hash of the key, so a command with another key
finds no zygote and loads torch itself. So does one that follows a change of a file that the zygote has loaded; when all
runs are over, the server then starts a new zygote.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch_ext.personality import AS_CUDA, VARIABLE
from torch_ext.program import autoload
from torch_ext.runner.interrupts import Interrupts
from torch_ext.runner.options import seconds, typed
from torch_ext.world import files, wording
from torch_ext.world.channel import Channel, close_all
from torch_ext.world.protocol import Preparation
from torch_ext.world.start import ZygoteLostError
from torch_ext.world.tree import LoadError, RootZygote, ZygoteClient, ZygoteDiedError
from torch_ext.world.zygote import read_when_loaded

# Variables that a process reads when it starts or loads torch, in addition to those of ``zygote.read_when_loaded``. The
# search path is part of the key, and the world reads most of our own on use.
_READ_AT_START = ("LANG", "LC_", "PYTHON", "PYTORCH_", "TORCH_")
_OURS_AT_START = (
    "TORCH_EXT_SIM", "TORCH_EXT_SIM_MACHINE_MEMORY", "TORCH_EXT_SIM_MEMORY", "TORCH_EXT_SIM_SANITIZE"
)  # fmt: skip
_PACKAGE = Path(__file__).resolve().parents[1]
_CONNECT_S = 5.0

# Modules that a warm zygote loads. Every optimizer loads torch._dynamo at its first step.
_LOADED = ("torch", "torch.distributed", "torch._dynamo", "torch_ext.world.rank", "torch_ext.program.rank")
# The native ones are the simulator's sources; ranks, or commands that talk to the zygote, load the rest.
_SOURCES = (".py", ".cpp", ".h")


def _load(
    simulated: bool, path: tuple[str, ...], environment: Mapping[str, str], held: contextlib.ExitStack
) -> ZygoteClient:
    """Return a new zygote that has loaded torch and, if ``simulated``, the simulator. ``held`` ends it."""
    device = "torch_ext.cuda_as_sim.stand_in" if environment.get(VARIABLE) == AS_CUDA else "torch_ext.sim"
    preparation = Preparation(path, (*_LOADED, *((device,) if simulated else ())))
    root = RootZygote(preparation, files.folder(), environment)
    held.callback(root.close)
    root.wait_ready()
    return root


@contextlib.contextmanager
def zygote_for(simulated: bool, path: tuple[str, ...], environment: Mapping[str, str]) -> Iterator[ZygoteClient]:
    """Context: a zygote that has loaded torch and, if ``simulated``, the simulator. Raises LoadError or
    ZygoteDiedError if that fails.
    """
    with contextlib.ExitStack() as held:
        found = connect(socket_name(simulated, path, environment), held)
        if found is None:
            yield _load(simulated, path, environment, held)
            return
        try:
            yield found
        except (ZygoteDiedError, ZygoteLostError) as error:
            raise ZygoteDiedError("`torch_ext serve`, which had started the ranks, has ended") from error


def search_path() -> tuple[str, ...]:
    """Return ``sys.path`` without this command's own entry, and with this package's folder at the end."""
    entries = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
    # Entries that are no files belong to a path hook, such as an editable installation's: keep them unchanged.
    path = [os.path.abspath(entry) if os.path.exists(entry) else entry for entry in entries if entry]
    root = str(_PACKAGE.parent)
    return tuple(path if root in path else [*path, root])


def connect(name: str, held: contextlib.ExitStack) -> ZygoteClient | None:
    """Return the warm zygote of socket ``name``; None if there is none. ``held`` keeps the connection open."""
    with contextlib.suppress(OSError, IndexError, TypeError, ValueError):  # or another version's
        with folder() as place:
            connected = _connected(place / name)
            for other in filter(None, map(_connected, place.glob(f"{name[:4]}*") if connected is None else ())):
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


def _connected(address: Path) -> socket.socket | None:
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
def folder() -> Iterator[Path]:
    """Context: a path of the folder of sockets, valid inside the block. Raises OSError if the folder cannot be made, or
    other users have access to it.
    """
    above = os.environ.get("XDG_RUNTIME_DIR", "")
    wanted = Path(above, "torch_ext") if above else Path(tempfile.gettempdir(), f"torch_ext-{os.geteuid()}")
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


@contextlib.contextmanager
def _listen(name: str) -> Iterator[socket.socket]:
    """Context: a listening socket. Raises OSError if it cannot be made, or another process listens there."""
    with folder() as place, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        address = place / name
        if _connected(address):
            raise FileExistsError("another process already serves these runs")
        address.unlink(missing_ok=True)  # left by a server that was killed
        listening.bind(str(address))
        try:
            listening.listen()
            yield listening
        finally:
            address.unlink(missing_ok=True)


def is_own(connected: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user, according to the kernel."""
    _pid, uid, _gid = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def main(arguments: Sequence[str]) -> int:
    """Serve until a while has passed without runs, or until SIGINT or SIGTERM; return the exit code."""
    parser = argparse.ArgumentParser("torch_ext serve", description="Keep torch loaded for runs of programs.")
    idle = "end after S idle seconds (900)"
    parser.add_argument("--idle", type=typed(seconds), default=900.0, metavar="S", help=idle)
    parser.add_argument("--host", action="store_true", help="serve --device cpu and cuda, without the simulator")
    options = parser.parse_args(arguments)
    Interrupts(once=True, signals=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        is_stale = _serve_one(not options.host, options.idle)
    except KeyboardInterrupt:
        return 0
    except (OSError, LoadError, ZygoteDiedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if is_stale:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return 0


def _serve_one(simulated: bool, idle_s: float) -> bool:
    """Serve with one zygote; return whether it has become stale."""
    autoload.hide()
    path = search_path()
    with contextlib.ExitStack() as held:
        listening = held.enter_context(_listen(socket_name(simulated, path, os.environ)))
        zygote = _load(simulated, path, os.environ, held)
        what = "the simulated accelerator" if simulated else "cpu"
        print(f"{wording.PREFIX}serving runs on {what}, until {idle_s:g} s without any", flush=True)
        return _serve(zygote, listening, idle_s)


def _serve(zygote: ZygoteClient, listening: socket.socket, idle_s: float) -> bool:
    """Serve until ``idle_s`` seconds pass without runs, or the zygote is stale and unused; return whether it is stale.

    A command that connects gets a channel to the zygote. Its run lasts until its connection to the server ends.
    """
    states, is_stale, idle_since_s = _states(zygote), False, time.monotonic()
    lines: list[Channel] = []  # one for each run
    while lines or not is_stale:
        left_s = None if lines else max(0.0, idle_since_s + idle_s - time.monotonic())
        waits: list[Channel | socket.socket] = [zygote.channel, listening, *lines]
        ready, _, _ = select.select(waits, [], [], left_s)
        if zygote.channel in ready:
            raise ZygoteDiedError("the zygote has ended, and with it the runs that it has started")
        if not ready:
            return False
        for line in [line for line in lines if line in ready]:  # commands send nothing: readable = ended
            lines.remove(line)
            line.close()
            idle_since_s = time.monotonic()
        if listening in ready:
            connected, _ = listening.accept()
            changed = "" if is_stale else next((path for path in states if _state(path) != states[path]), "")
            if changed:
                print(f"{wording.PREFIX}{changed} has changed: loading again", flush=True)
                is_stale = True
            line = Channel(connected)
            if is_stale or not is_own(connected):
                line.close()
                continue
            descriptor = zygote.add_client()
            line.try_send(zygote.pid, [descriptor])  # the command checks by its pid a zygote that does not answer
            close_all([descriptor])
            lines.append(line)
    return True


def _states(zygote: ZygoteClient) -> dict[str, object]:
    """Return the states of the files that ``zygote`` has loaded, and of this package's files, by path."""
    with contextlib.closing(zygote.start("torch_ext.program.serve:send_loaded", None, os.environ)) as child:
        paths, _ = child.channel.receive()
    own = (str(file) for file in _PACKAGE.rglob("*") if file.suffix in _SOURCES)
    return {path: _state(path) for path in (*paths, *own)}


def send_loaded(payload: None, descriptors: Sequence[int]) -> None:
    """Target of a child of the zygote: send the paths of all files that it has loaded. Descriptor: a channel."""
    modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/")}
    found = {path for path in (*modules, *mapped) if isinstance(path, str) and os.path.isabs(path)}
    Channel.from_descriptor(descriptors[0]).send(sorted(path for path in found if os.path.isfile(path)))


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
