"""How a command gets a channel to the zygote that ``torch_ext serve`` keeps warm. Runs in the process that the user has
started, which loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from torch_ext.warm import address
from torch_ext.world import frames, notices
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.protocol import HiddenFrames
from torch_ext.world.tree import ZygoteClient

__all__ = ["Welcome", "connect", "search_path"]

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


def search_path() -> tuple[str, ...]:
    """Return ``sys.path`` without the entry that belongs to this command; this package is found behind all others."""
    entries = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
    # What names no file is for a path hook, as an editable installation has it, and means the same in every folder.
    path = [os.path.abspath(entry) if os.path.exists(entry) else entry for entry in entries if entry]
    root = str(_PACKAGE.parent)
    return tuple(path if root in path else [*path, root])


def connect(key: address.Key, held: contextlib.ExitStack) -> ZygoteClient | None:
    """Return a warm zygote that fits, with a line that ``held`` keeps open; None if nobody serves one."""
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
