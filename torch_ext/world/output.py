"""Where a rank's stdout and stderr go: a file without a name, or a pipe that is passed on as it fills.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO

from torch_ext.world import _os
from torch_ext.world.phrases import printable

__all__ = ["Capture", "open_capture"]

_TAIL_BYTES = 16 << 10


class Capture:
    """What a rank printed. Its stdout and stderr share one file, so that their lines keep their order."""

    def __init__(self, rank: int, file: IO[bytes], live: int | None) -> None:
        self.live = live
        self._prefix = f"[rank {rank}] "
        self._file = file
        self._line = b""

    def pass_through(self) -> bool:
        """Print what has arrived, whole lines with the rank in front; return False at the end of the output."""
        if self.live is None:
            return False
        while True:
            try:
                part = os.read(self.live, 1 << 16)
            except BlockingIOError:
                return True
            self._file.write(part)
            *lines, self._line = (self._line + part).split(b"\n")
            if not part and self._line:
                lines, self._line = [self._line], b""
            for line in lines:
                print(self._prefix + printable(line.decode(errors="backslashreplace")), file=sys.stdout, flush=True)
            if not part:
                return False

    def tail(self) -> str:
        """Return the last 16 KiB."""
        if self._file.closed:
            return ""
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, end - _TAIL_BYTES))
        return self._file.read().decode(errors="replace")

    def close(self) -> None:
        self._file.close()
        if self.live is not None:
            with contextlib.suppress(OSError):
                os.close(self.live)
            self.live = None


def open_capture(rank: int, show: bool) -> tuple[Capture, int]:
    """Return a capture and the descriptor that the rank writes to, which the caller owns."""
    file = _os.unnamed_file()
    if not show:
        return Capture(rank, file, None), os.dup(file.fileno())
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return Capture(rank, file, reader), writer
