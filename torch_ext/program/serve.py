"""``torch_ext serve``: keeps a zygote warm for the runs that follow. Loads no torch itself.

It stays in the foreground, serves its user alone (see Note [A zygote for its user alone]) and ends by itself when
nothing has run for a while. Ranks that it starts have the environment, folder and umask of their own command, but the
limits, the control group and the priority of this one.
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

from torch_ext.program import variables
from torch_ext.program.options import HOST
from torch_ext.program.warm import address_of, is_own, preparation, search_path
from torch_ext.world import frames, scratch
from torch_ext.world.channel import Channel, ChannelClosedError, close_all
from torch_ext.world.protocol import Loaded
from torch_ext.world.tree import LoadError, RootZygote, ZygoteClient, ZygoteDiedError

__all__ = ["main"]

_IDLE_S = 900.0


class _EndError(BaseException):
    """The user wants it to end."""


def main(arguments: Sequence[str]) -> int:
    """Serve until nothing has run for a while, or until SIGINT or SIGTERM; return the exit code."""
    parser = argparse.ArgumentParser("torch_ext serve", description="Keep torch loaded for `torch_ext run`.")
    parser.add_argument("--idle", type=float, default=_IDLE_S, metavar="S", help="end after S idle seconds (900)")
    parser.add_argument("--host", action="store_true", help="for runs with --device cpu or cuda, without the simulator")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    variables.hide()
    path = search_path()
    try:
        address = address_of(not options.host, path)
        with contextlib.ExitStack() as held:
            listening = _listen(address, held)
            root = RootZygote(preparation(not options.host, path), scratch.folder(), os.environ)
            held.callback(root.close)
            root.wait_ready()
            kind = HOST if options.host else "the simulated accelerator"
            print(f"torch_ext: serving runs on {kind}, until {options.idle:g} s without any", flush=True)
            _serve(listening, root, options.idle)
        return 0
    except (OSError, LoadError, ZygoteDiedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except _EndError:
        return 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise _EndError


def _listen(address: Path, held: contextlib.ExitStack) -> socket.socket:
    """Return a socket that listens at ``address``, in whose folder nobody else may be.

    Raises:
        OSError: another process serves there.
    """
    listening = held.enter_context(socket.socket(socket.AF_UNIX))
    with socket.socket(socket.AF_UNIX) as trial, contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        trial.connect(str(address))
        raise OSError(f"another process serves at {address} already")
    address.unlink(missing_ok=True)  # of one that was killed
    listening.bind(str(address))
    held.callback(address.unlink, missing_ok=True)
    listening.listen()
    return listening


def _serve(listening: socket.socket, root: RootZygote, idle_s: float) -> None:
    zygote = ZygoteClient(root.channel, root.process.pid)
    idle_since_s = time.monotonic()
    with selectors.DefaultSelector() as ready:
        ready.register(listening, selectors.EVENT_READ)
        ready.register(root.channel, selectors.EVENT_READ)
        while True:
            runs = len(ready.get_map()) - 2
            left_s = None if runs else idle_since_s + idle_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            for key, _ in ready.select(left_s):
                if key.fileobj is root.channel:
                    raise ZygoteDiedError("the zygote ended")
                if key.fileobj is listening:
                    line = _accept(listening, zygote)
                    if line is not None:
                        ready.register(line, selectors.EVENT_READ)
                elif isinstance(key.fileobj, Channel):  # nothing is sent on it: this is its end
                    ready.unregister(key.fileobj)
                    key.fileobj.close()
                    idle_since_s = time.monotonic()


def _accept(listening: socket.socket, zygote: ZygoteClient) -> Channel | None:
    """Give whoever has connected a channel to the zygote; return the line whose end is that of the run."""
    connected, _ = listening.accept()
    if not is_own(connected):
        connected.close()
        return None
    line, descriptor = Channel(connected), zygote.add_client()
    try:
        line.send(Loaded(hidden_frames=frames.hidden()), [descriptor])
    except (ChannelClosedError, OSError):
        line.close()
        return None
    finally:
        close_all([descriptor])
    return line
