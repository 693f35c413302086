"""A page of shared memory in which a rank's device backend says what it waits for. Standard library only.

Note [The page of waits]
~~~~~~~~~~~~~~~~~~~~~~~~
Each rank inherits the descriptor of 4096 bytes, whose number it finds in ``TORCH_EXT_WAIT_PAGE``. Whatever waits for a
peer keeps an entry there, so that the parent half can read what a rank is in without its help: also if it holds the
GIL, has been stopped by a signal, or is dead. Neither side imports the other; this is the layout.

======  ====================================================================  ======
offset  what                                                                  type
======  ====================================================================  ======
0       1, the version of this layout; 0: nothing has been written            uint64
64      entry 0 of 8; they are 504 bytes apart                                \
+0      changes before and after each change: odd while the entry is changed  uint32
+4      global rank that is waited for; -1: any                               int32
+8      since when, nanoseconds of ``CLOCK_MONOTONIC``; 0: not in use         int64
+16     number of the collective in its group; 0: a transfer                  uint64
+24     name of the group, zero-terminated                                    64
+88     operation, zero-terminated                                            40
+128    file and line of the call, zero-terminated                            200
======  ====================================================================  ======
"""

from __future__ import annotations

import mmap
import os
import struct

from torch_ext.world.protocol import Wait

__all__ = ["VARIABLE", "WaitPage"]

VARIABLE = "TORCH_EXT_WAIT_PAGE"

_BYTES, _VERSION = 4096, 1
_FIRST, _STRIDE, _ENTRIES = 64, 504, 8
_ENTRY = struct.Struct("=IiqQ64s40s200s")


class WaitPage:
    """One rank's page, as its parent half reads it. There is none where the system has no anonymous files.

    Attributes:
        descriptor: what the rank inherits; -1 without a page. Closed by :meth:`close`.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._memory: mmap.mmap | None = None
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("torch_ext waits")
            os.ftruncate(self.descriptor, _BYTES)
            self._memory = mmap.mmap(self.descriptor, _BYTES)

    def waits(self) -> tuple[Wait, ...]:
        """Return what the rank waits for now, the longest wait first."""
        if self._memory is None or struct.unpack_from("=Q", self._memory)[0] != _VERSION:
            return ()
        entries = [self._entry(_FIRST + number * _STRIDE) for number in range(_ENTRIES)]
        return tuple(wait for _, wait in sorted((entry for entry in entries if entry), key=lambda entry: entry[0]))

    def _entry(self, offset: int) -> tuple[int, Wait] | None:
        """Return since when it stands and what it says; None for one that is not in use, or is being changed."""
        if self._memory is None:
            return None
        before, peer, since_ns, number, group, operation, site = _ENTRY.unpack_from(self._memory, offset)
        (after,) = struct.unpack_from("=I", self._memory, offset)
        if before % 2 or before != after or not since_ns:
            return None
        which = f"#{number} {_text(operation)}" if number else _text(operation)
        place = f", called at {_text(site)}" if _text(site) else ""
        words = f"{which} in group {_text(group)}{place}"
        return since_ns, Wait(words, (peer,) if peer >= 0 else (), transport=True)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")
