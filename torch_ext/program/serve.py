"""``torch_ext serve``: keeps a zygote warm for the programs that follow. Loads no torch itself.

It stays in the foreground, serves its user alone (see Note [A zygote for its user alone]) and ends by itself when
nothing has run for a while. Ranks that it starts have the environment, folder and umask of their own command, but the
limits, the control group and the priority of this one.

Note [A stale zygote]
~~~~~~~~~~~~~~~~~~~~~
Before each run the files that the zygote has loaded are looked at. If one has changed, the command is turned away and
loads torch itself; the server waits until what it has started is over, and then replaces itself by what it would be if
it were started now.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch_ext.program import autoload
from torch_ext.program.options import HOST
from torch_ext.program.zygote import Welcome, is_own, key_of, listen, preparation, search_path
from torch_ext.world import files, wording
from torch_ext.world.channel import Channel, ChannelClosedError, channel_pair, close_all
from torch_ext.world.tree import LoadError, RootZygote, ZygoteClient, ZygoteDiedError, start_root

__all__ = ["main", "tell_loaded"]

_IDLE_S = 900.0
_PACKAGE = Path(__file__).resolve().parents[1]
# The simulator is built of the native ones; the others are loaded by ranks, or by commands that talk to the zygote.
_SOURCES = (".py", ".cpp", ".h")
_ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _EndError(BaseException):
    """The user wants it to end."""


def main(arguments: Sequence[str]) -> int:
    """Serve until nothing has run for a while, or until SIGINT or SIGTERM; return the exit code."""
    parser = argparse.ArgumentParser("torch_ext serve", description="Keep torch loaded for runs of programs.")
    parser.add_argument("--idle", type=_seconds, default=_IDLE_S, metavar="S", help="end after S idle seconds (900)")
    parser.add_argument("--host", action="store_true", help="for runs with --device cpu or cuda, without the simulator")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        for number in _ENDED_BY:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background
                signal.signal(number, _end)
        is_stale = _serve_one(not options.host, options.idle)
    except (OSError, LoadError, ZygoteDiedError, ChannelClosedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except _EndError:
        return 0
    if is_stale:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of seconds")
    return seconds


def _end(number: int, frame: FrameType | None) -> NoReturn:
    for each in _ENDED_BY:
        signal.signal(each, signal.SIG_IGN)
    raise _EndError


def _serve_one(simulated: bool, idle_s: float) -> bool:
    """Serve with one zygote; return whether it has become stale."""
    autoload.hide()
    path = search_path()
    with contextlib.ExitStack() as held:
        listening = held.enter_context(listen(key_of(simulated, path, os.environ)))
        root = start_root(preparation(simulated, path), files.folder(), os.environ)
        held.callback(root.close)
        root.wait_ready()
        server = _Server(root, listening, held)
        until = "until it is ended" if idle_s == float("inf") else f"until {idle_s:g} s without any"
        print(
            f"{wording.PREFIX}serving runs on {'the simulated accelerator' if simulated else HOST}, {until}", flush=True
        )
        return server.serve(idle_s)


class _Server:
    def __init__(self, root: RootZygote, listening: socket.socket, held: contextlib.ExitStack) -> None:
        self._root = root
        self._zygote = ZygoteClient(root.channel, root.process.pid)
        self._files = _Files(self._zygote)
        self._listening = listening
        self._stale = False
        self._lines: set[Channel] = set()  # one for each run
        self._ready = held.enter_context(selectors.DefaultSelector())
        self._ready.register(listening, selectors.EVENT_READ)
        self._ready.register(root.channel, selectors.EVENT_READ)

    def serve(self, idle_s: float) -> bool:
        """Serve until nothing has run for ``idle_s``, or the zygote is stale and not in use; return which.

        Raises:
            ZygoteDiedError: the zygote ended.
        """
        idle_since_s = time.monotonic()
        while self._lines or not self._stale:
            left_s = None if self._lines else idle_since_s + idle_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            for key, _ in self._ready.select(None if left_s == float("inf") else left_s):
                if key.fileobj is self._root.channel:
                    raise ZygoteDiedError("the zygote has ended, and with it the runs that it has started")
                if key.fileobj is self._listening:
                    self._accept()
                elif isinstance(key.fileobj, Channel):  # nothing is sent on it: this is its end
                    self._ready.unregister(key.fileobj)
                    self._lines.remove(key.fileobj)
                    key.fileobj.close()
                    idle_since_s = time.monotonic()
        return True

    def _accept(self) -> None:
        """Give whoever has connected a channel to the zygote, and keep the line whose end is that of the run."""
        connected, _ = self._listening.accept()
        line = Channel(connected)
        if not is_own(connected) or self._is_stale():
            line.close()
            return
        descriptor = self._zygote.add_client()
        try:
            line.send(Welcome(wording.hidden(), self._root.process.pid), [descriptor])
        except (ChannelClosedError, OSError):
            line.close()
            return
        finally:
            close_all([descriptor])
        self._lines.add(line)
        self._ready.register(line, selectors.EVENT_READ)

    def _is_stale(self) -> bool:
        """See Note [A stale zygote]."""
        if not self._stale and (changed := self._files.changed()):
            self._stale = True
            print(f"{wording.PREFIX}{changed} has changed: loading anew", flush=True)
        return self._stale


class _Files:
    """The files that ``zygote`` has loaded, and those of this package, as they are now.

    Raises:
        ZygoteDiedError, ChannelClosedError: the zygote is gone.
    """

    def __init__(self, zygote: ZygoteClient) -> None:
        ours, theirs = channel_pair()
        try:
            child = zygote.start("torch_ext.program.serve:tell_loaded", None, [theirs.fileno()], os.environ)
        finally:
            theirs.close()
        try:
            paths, _ = ours.receive()
        finally:
            ours.close()
            child.close()
        own = (str(file) for file in _PACKAGE.rglob("*") if file.suffix in _SOURCES)
        self._states = {path: _state(path) for path in (*paths, *own)}

    def changed(self) -> str:
        """Return the path of a file that has changed, or an empty string. Takes milliseconds."""
        return next((path for path, state in self._states.items() if _state(path) != state), "")


def tell_loaded(payload: None, descriptors: Sequence[int]) -> None:
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
