"""The page of waits that ``simccl`` writes, read as ``csrc/transport/shared_memory.cpp`` lays it out."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from typing import NamedTuple

__all__ = ["Entry", "Page"]

_LIMIT_S = 60.0


class Entry(NamedTuple):
    """Who is waited for in what, since the call at ``site``, by which thread and until when (``time.monotonic``)."""

    peer: int
    number: int
    group: str
    operation: str
    site: str
    until_s: float
    thread: int


class Page:
    """A page that this process's waits are written to from now on."""

    def __init__(self) -> None:
        file = os.memfd_create("torch_ext waits")
        os.ftruncate(file, 4096)
        os.environ["TORCH_EXT_WAIT_PAGE"] = str(file)
        self._page = mmap.mmap(file, 4096)

    @property
    def version(self) -> int:
        number: int = struct.unpack_from("=Q", self._page, 0)[0]
        return number

    def entries(self) -> list[Entry]:
        """Return what is being waited for now."""
        found = []
        for start in range(64, 64 + 8 * 504, 504):
            changes, peer, since, number = struct.unpack_from("=IiqQ", self._page, start)
            texts = [
                self._page[start + at : start + at + size].split(b"\0")[0].decode()
                for at, size in ((24, 64), (88, 40), (128, 200))
            ]
            until_ns, thread = struct.unpack_from("=qi", self._page, start + 328)
            if since and changes % 2 == 0:
                found.append(Entry(peer, number, *texts, until_ns / 1e9, thread))
        return found

    def only_entry(self, waiting: threading.Thread) -> Entry:
        """Return what ``waiting`` waits for, and nobody else, as soon as it does."""
        deadline = time.monotonic() + _LIMIT_S
        while not (found := self.entries()):
            assert waiting.is_alive() and time.monotonic() < deadline
            time.sleep(0.001)
        (entry,) = found
        return entry
