"""``torch_ext serve`` keeps a zygote warm; runs of programs and of tests find it, or start their own.

The server stays in the foreground, serves only its user and ends after a while without runs. Its ranks have the
environment, folder and umask of their command, but the limits, the control group and the priority of the server.
Neither the server nor the command loads torch itself.

A server and its commands agree on a key: see Note [What a zygote fits] in :mod:`torch_ext.world.warm`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
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
from torch_ext.world.warm import connect, connected_to, folder, is_own, search_path, socket_name

_PACKAGE = Path(__file__).resolve().parents[1]

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


@contextlib.contextmanager
def _listen(name: str) -> Iterator[socket.socket]:
    """Context: a listening socket. Raises OSError if it cannot be made, or another process listens there."""
    with folder(makes=True) as place, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        address = place / name
        if connected_to(address):
            raise FileExistsError("another process already serves these runs")
        address.unlink(missing_ok=True)  # left by a server that was killed
        listening.bind(str(address))
        try:
            listening.listen()
            yield listening
        finally:
            address.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    """Serve until a while has passed without runs, or until SIGINT or SIGTERM; return the exit code."""
    parser = argparse.ArgumentParser("torch_ext serve", description="Keep torch loaded for runs of programs and tests.")
    idle = "end after S idle seconds (900)"
    parser.add_argument("--idle", type=typed(seconds), default=900.0, metavar="S", help=idle)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--host", action="store_true", help="serve --device cpu and cuda, without the simulator")
    which.add_argument("--cuda-as-sim", action="store_true", help="serve --cuda-as-sim")
    options = parser.parse_args(arguments)
    Interrupts(once=True, signals=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        is_stale = _serve_one(options)
    except KeyboardInterrupt:
        return 0
    except (OSError, LoadError, ZygoteDiedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if is_stale:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return 0


def _serve_one(options: argparse.Namespace) -> bool:
    """Serve with one zygote; return whether it has become stale."""
    autoload.hide()
    path, environment = search_path(), dict(os.environ)
    if options.cuda_as_sim:
        environment[VARIABLE] = AS_CUDA
    with contextlib.ExitStack() as held:
        listening = held.enter_context(_listen(socket_name(not options.host, path, environment)))
        zygote = _load(not options.host, path, environment, held)
        what = "cpu" if options.host else "the simulated accelerator"
        print(f"{wording.PREFIX}serving runs on {what}, until {options.idle:g} s without any", flush=True)
        return _serve(zygote, listening, options.idle)


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
