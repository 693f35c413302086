"""A page of shared memory in which a rank's device backend says what it waits for. Standard library only.

Note [The page of waits]
~~~~~~~~~~~~~~~~~~~~~~~~
Each rank inherits the descriptor of 4096 bytes, whose number it finds in ``TORCH_EXT_WAIT_PAGE``. Whatever waits for a
peer keeps an entry there, so that the parent half can read what a rank is in without its help: also if it holds the
GIL, has been stopped by a signal, or is dead. The rank reads its own page to tell which of its threads can go on: see
Note [Provable hangs]. Neither side imports the other; this is the layout.

======  ====================================================================  ======
offset  what                                                                  type
======  ====================================================================  ======
0       2, the version of this layout; 0: nothing has been written            uint64
64      entry 0 of 8; they are 504 bytes apart                                \
+0      changes before and after each change: odd while the entry is changed  uint32
+4      global rank that is waited for; -1: any                               int32
+8      since when, nanoseconds of ``CLOCK_MONOTONIC``; 0: not in use         int64
+16     number of the collective in its group; 0: a transfer                  uint64
+24     name of the group, zero-terminated                                    64
+88     operation, zero-terminated                                            40
+128    file and line of the call, zero-terminated                            200
+328    when the wait ends by itself, nanoseconds of ``CLOCK_MONOTONIC``      int64
+336    the thread that waits, as the kernel numbers it                       int32
======  ====================================================================  ======
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from typing import NamedTuple

from torch_ext.world.protocol import Wait

__all__ = ["VARIABLE", "ThreadWait", "WaitPage", "waits_of_threads"]

VARIABLE = "TORCH_EXT_WAIT_PAGE"

_NAME = "torch_ext waits"
_BYTES, _VERSION = 4096, 2
_FIRST, _STRIDE, _ENTRIES = 64, 504, 8
_ENTRY = struct.Struct("=IiqQ64s40s200sqi")


class ThreadWait(NamedTuple):
    """An entry of a page: what thread ``tid`` has waited for since ``since_ns``, and until when at most.

    ``until_s`` is by :func:`time.monotonic`.
    """

    since_ns: int
    wait: Wait
    tid: int
    until_s: float


class WaitPage:
    """One rank's page, as its parent half reads it. There is none where the system has no anonymous files.

    Attributes:
        descriptor: what the rank inherits; -1 without a page. Closed by :meth:`close`.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._memory: mmap.mmap | None = None
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(_NAME)
            os.ftruncate(self.descriptor, _BYTES)
            self._memory = mmap.mmap(self.descriptor, _BYTES)

    def waits(self) -> tuple[Wait, ...]:
        """Return what the rank waits for now, the longest wait first."""
        return tuple(entry.wait for entry in _entries(self._memory)) if self._memory is not None else ()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def waits_of_threads() -> dict[int, ThreadWait]:
    """Return what this process's own page says, by thread; nothing if it has none, or has closed it."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = int(os.environ.get(VARIABLE, ""))
        # A program may close what it has inherited, and open something else under the number.
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME} "):
            with mmap.mmap(descriptor, _BYTES, prot=mmap.PROT_READ) as memory:
                return {entry.tid: entry for entry in _entries(memory)}
    return {}


def _entries(memory: mmap.mmap) -> list[ThreadWait]:
    """Return what stands on a page, the longest wait first."""
    if struct.unpack_from("=Q", memory)[0] != _VERSION:
        return []
    entries = (_entry(memory, _FIRST + number * _STRIDE) for number in range(_ENTRIES))
    return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.since_ns)


def _entry(memory: mmap.mmap, offset: int) -> ThreadWait | None:
    """Return what an entry says; None for one that is not in use, or is being changed."""
    before, peer, since_ns, number, group, operation, site, until_ns, tid = _ENTRY.unpack_from(memory, offset)
    (after,) = struct.unpack_from("=I", memory, offset)
    if before % 2 or before != after or not since_ns:
        return None
    which = f"#{number} {_text(operation)}" if number else _text(operation)
    place = f", called at {_text(site)}" if _text(site) else ""
    words = f"{which} in group {_text(group)}{place}"
    return ThreadWait(since_ns, Wait(words, (peer,) if peer >= 0 else (), transport=True), tid, until_ns / 1e9)


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")
