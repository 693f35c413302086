"""Files of a run: its folder for short-lived ones, and those that take a rank's stdout and stderr (or a pipe, which is
passed on as it fills). Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO

from torch_ext.world import _os
from torch_ext.world.wording import printable

__all__ = ["Capture", "Live", "folder", "give_up", "open_capture", "restore", "use"]

_TAIL_BYTES = 16 << 10
# What is read of one rank before the others are looked at again; more than a pipe holds, so that once is enough at its
# end. A line that is longer than the second is printed in pieces. Of what was shown, a tail is kept past the third.
_TURN_BYTES, _LINE_BYTES, _KEPT_BYTES = 4 << 20, 1 << 20, 32 << 20
_PART_BYTES = 1 << 16


@dataclass(frozen=True)
class Live:
    """Which output is passed on as it comes, and how.

    Attributes:
        ranks: those of these ranks; None: of all.
        prefix: whole lines, with the rank in front. Otherwise bytes, as they are.
        verbatim: lines keep the control characters that a terminal obeys, such as colours.
    """

    ranks: Collection[int] | None = None
    prefix: bool = True
    verbatim: bool = False

    def shows(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks


_LINES = Live()


class Capture:
    """What a rank printed. Its stdout and stderr share one file, so that their lines keep their order."""

    def __init__(self, rank: int, file: IO[bytes], live: int | None, how: Live = _LINES) -> None:
        self.live = live
        self._how = how
        self._prefix = f"[rank {rank}] "
        self._file = file
        self._line = bytearray()

    def pass_through(self) -> bool:
        """Print what has arrived, as :class:`Live` says; return False at the end of the output."""
        if self.live is None:
            return False
        for _ in range(_TURN_BYTES // _PART_BYTES):
            try:
                part = os.read(self.live, _PART_BYTES)
            except BlockingIOError:
                return True
            self._keep(part)
            if self._how.prefix:
                self._print_lines(part)
            else:
                sys.stdout.buffer.write(part)
                sys.stdout.buffer.flush()
            if not part:
                return False
        return True

    def _keep(self, part: bytes) -> None:
        if self._file.tell() > _KEPT_BYTES:
            tail = self._tail_bytes()
            self._file.seek(0)
            self._file.truncate()
            self._file.write(tail)
        self._file.write(part)

    def _print_lines(self, part: bytes) -> None:
        last, *lines = part.split(b"\n")
        for line in lines:
            self._line += last
            self._print_line()
            last = line
        self._line += last
        if len(self._line) > _LINE_BYTES or (not part and self._line):
            self._print_line()

    def _print_line(self) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._how.verbatim:
            line = line.removesuffix(b"\r").rpartition(b"\r")[2]  # of a bar that redraws itself, the last state
            sys.stdout.flush()
            sys.stdout.buffer.write(self._prefix.encode() + line + b"\n")
            sys.stdout.buffer.flush()
        else:
            print(self._prefix + printable(line.decode(errors="backslashreplace")), file=sys.stdout, flush=True)

    def tail(self) -> str:
        """Return the last 16 KiB."""
        return "" if self._file.closed else self._tail_bytes().decode(errors="replace")

    def _tail_bytes(self) -> bytes:
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, end - _TAIL_BYTES))
        return self._file.read()

    def close(self) -> None:
        self._file.close()
        if self.live is not None:
            with contextlib.suppress(OSError):
                os.close(self.live)
            self.live = None


def open_capture(rank: int, show: bool | Live) -> tuple[Capture, int]:
    """Return a capture and the descriptor that the rank writes to, which the caller owns."""
    file = _os.unnamed_file()
    how = show if isinstance(show, Live) else _LINES
    if not show or not how.shows(rank):
        return Capture(rank, file, None), os.dup(file.fileno())
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return Capture(rank, file, reader, how), writer


class _Scratch:
    """The folder of this process. A forked child does not own its parent's."""

    def __init__(self) -> None:
        self.owner = _os.getpid()
        self.path = ""
        self.made_here = False
        self.temporary = ""  # the folder for everybody's short-lived files


_scratch = _Scratch()


def _mine() -> _Scratch:
    global _scratch
    if _scratch.owner != _os.getpid():
        _scratch = _Scratch()
    return _scratch


def use(path: str) -> None:
    """Use the folder ``path``, which another process made and removes."""
    scratch = _mine()
    scratch.path, scratch.temporary = path, tempfile.gettempdir()


def restore() -> None:
    """Make the folders for short-lived files anew that a test has removed."""
    scratch = _mine()
    for path in (scratch.temporary, scratch.path):
        if path and not os.path.isdir(path):
            with contextlib.suppress(OSError):  # who needs the folder says so
                os.makedirs(path, 0o700)


def folder() -> str:
    """Return the folder. It is made on first use and removed when the process is gone, however that ends."""
    scratch = _mine()
    restore()  # a zygote that has ended removes it, and the next one does so again
    if not scratch.path:
        scratch.path = tempfile.mkdtemp(prefix="torch_ext-")
        scratch.made_here = True
        atexit.register(_remove, scratch)
    return scratch.path


def give_up() -> None:
    """Remove the folder if it was made here; the next use makes another. A zygote that ends removes its folder too."""
    scratch = _mine()
    _remove(scratch)
    if scratch.made_here:
        scratch.path, scratch.made_here = "", False


def _remove(scratch: _Scratch) -> None:
    if scratch.owner == _os.getpid() and scratch.made_here:
        shutil.rmtree(scratch.path, ignore_errors=True)
