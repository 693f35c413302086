"""Which files a zygote has loaded, and whether they have changed since: ranks of a stale one would be made of old code,
and of new code that they load themselves.

``tell`` runs in a child of the zygote, all else in the process of ``torch_ext serve``. The standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_ext.world.channel import Channel, channel_pair
from torch_ext.world.tree import ZygoteClient

__all__ = ["Files", "tell"]

_PACKAGE = Path(__file__).resolve().parents[1]
# The simulator is built of the native ones; the others are loaded by ranks, or by commands that talk to the zygote.
_SOURCES = (".py", ".cpp", ".h")


class Files:
    """The files that ``zygote`` has loaded, and those of this package, as they are now.

    Raises:
        ZygoteDiedError, ChannelClosedError: the zygote is gone.
    """

    def __init__(self, zygote: ZygoteClient) -> None:
        ours, theirs = channel_pair()
        try:
            child = zygote.start("torch_ext.warm.loaded:tell", None, [theirs.fileno()], os.environ)
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


def tell(payload: None, descriptors: Sequence[int]) -> None:
    """Send the paths of all files that this process has loaded. Descriptor: a channel."""
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
