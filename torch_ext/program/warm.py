"""Which zygote starts the ranks of a program: one that ``torch_ext serve`` keeps warm, or one of this command's own.
Runs in the process that the user has started, which loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_ext.program import address
from torch_ext.world import frames, notices, scratch
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.follow import ZygoteLostError
from torch_ext.world.protocol import HiddenFrames, Preparation
from torch_ext.world.tree import RootZygote, ZygoteClient, ZygoteDiedError

__all__ = ["Welcome", "preparation", "search_path", "zygote_for"]

# Of these torch._dynamo is what every optimizer loads at its first step, in each rank anew unless its zygote has it.
_ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "torch_ext.world.rank", "torch_ext.program.rank")
_SIMULATED = ("torch_ext.sim",)
_PACKAGE = Path(__file__).resolve().parents[1]
_CONNECT_S = 5.0
# What may come of a message of another version of this package.
_MISREAD = (pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError)


@dataclass(frozen=True)
class Welcome:
    """What a server sends to a command, along with a command channel to its zygote.

    Attributes:
        hidden_frames: what the layers that the zygote has loaded leave out of reports.
        zygote_pid: the zygote, which is looked at if it does not answer.
    """

    hidden_frames: tuple[HiddenFrames, ...]
    zygote_pid: int


def preparation(simulated: bool, path: tuple[str, ...]) -> Preparation:
    """Return what a zygote of programs loads."""
    return Preparation(path, (*_ALWAYS, *(_SIMULATED if simulated else ())))


def search_path() -> tuple[str, ...]:
    """Return ``sys.path`` without the entry that belongs to this command; this package is found behind all others."""
    entries = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
    # What names no file is for a path hook, as an editable installation has it, and means the same in every folder.
    path = [os.path.abspath(entry) if os.path.exists(entry) else entry for entry in entries if entry]
    root = str(_PACKAGE.parent)
    return tuple(path if root in path else [*path, root])


@contextlib.contextmanager
def zygote_for(simulated: bool, path: tuple[str, ...], environment: Mapping[str, str]) -> Iterator[ZygoteClient]:
    """A zygote that has loaded torch, and the simulator if it is wanted, until the block is left.

    Raises:
        LoadError: one of the two cannot be loaded.
        ZygoteDiedError: the process ended meanwhile.
    """
    with contextlib.ExitStack() as held:
        found = _connect(address.key_of(simulated, path, environment), held)
        if found is None:
            root = RootZygote(preparation(simulated, path), scratch.folder(), environment)
            held.callback(root.close)
            root.wait_ready()
            yield ZygoteClient(root.channel, root.process.pid)
            return
        try:
            yield found
        except (ZygoteDiedError, ZygoteLostError) as error:
            raise ZygoteDiedError("`torch_ext serve`, which had started the ranks, has ended") from error


def _connect(key: address.Key, held: contextlib.ExitStack) -> ZygoteClient | None:
    """Return a warm zygote that fits; None if nobody serves one."""
    with contextlib.suppress(OSError, ChannelClosedError, *_MISREAD):
        connected = socket.socket(socket.AF_UNIX)
        line = Channel(connected)
        held.callback(line.close)
        with address.folder() as place:
            connected.settimeout(_CONNECT_S)
            try:
                connected.connect(str(place / address.socket_name(key)))
            except (FileNotFoundError, ConnectionRefusedError):
                if other := address.why_none_fits(key):
                    notices.announce(f"the zygote of `torch_ext serve` is not used: it differs in {other}")
                return None
        if not address.is_own(connected):
            return None
        connected.settimeout(None)
        if not line.poll(_CONNECT_S):
            return None
        welcome, descriptors = line.receive()
        if isinstance(welcome, Welcome) and descriptors:
            frames.add(welcome.hidden_frames)
            channel = Channel.from_descriptor(descriptors[0])
            held.callback(channel.close)
            return ZygoteClient(channel, welcome.zygote_pid)
    return None
