"""The parent half's ends of a rank (process, channel, output, stacks), and the run's folder for short-lived files.
Standard library and own layer only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import IO, Protocol

from torch_ext.world import _os
from torch_ext.world._os import monotonic
from torch_ext.world.channel import Channel, channel_pair, close_all
from torch_ext.world.operations import WaitPage
from torch_ext.world.settings import ProcessDeadline
from torch_ext.world.wording import FATAL, printable

# The length of an output's tail, and a bound for the stacks that faulthandler writes for a dying process: at most 100
# frames of 100 threads.
_TAIL_BYTES, _STACKS_BYTES = 16 << 10, 2 << 20
# Bytes to read from one rank per turn: more than a pipe holds, so that one turn empties the pipe of a rank that ended.
# Length in bytes above which a line is printed in pieces, and above which only a tail of the output is kept.
_TURN_BYTES, _LINE_BYTES, _KEPT_BYTES = 4 << 20, 1 << 20, 32 << 20
_PART_BYTES = 1 << 16


@dataclass(frozen=True)
class Live:
    """How to pass on output as it arrives. ``ranks``: whose output (None: all). ``prefix``: print whole lines with this
    in front, ``{}`` for the rank; None: print bytes. ``verbatim``: keep the lines' control characters, such as colours.
    """

    ranks: Collection[int] | None = None
    prefix: str | None = "[rank {}] "
    verbatim: bool = False
    numbers: Sequence[int] = ()  # of the ranks, if they are not 0 and on


class Capture:
    """The output of a rank or a class process. Its stdout and stderr share one file: their lines keep their order."""

    def __init__(self, rank: int, file: IO[bytes], live: int | None, how: Live = Live()) -> None:
        self.live = live
        self._how = how
        self._prefix = (how.prefix or "").format(how.numbers[rank] if how.numbers else rank)
        self._file = file
        self._read_to = 0
        self._line = b""

    def pass_through(self) -> bool:
        """Print new output according to :class:`Live`; return False at the end of the output."""
        if self.live is None:
            return False
        for _ in range(_TURN_BYTES // _PART_BYTES):
            try:
                part = os.read(self.live, _PART_BYTES)
            except BlockingIOError:
                return True
            self._keep(part)
            if self._how.prefix is not None:
                self._print_lines(part)
            else:
                sys.stdout.buffer.write(part)
                sys.stdout.buffer.flush()
            if not part:
                self._end_live()
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
        *lines, self._line = (self._line + part).split(b"\n")
        if len(self._line) > _LINE_BYTES or (not part and self._line):
            lines.append(self._line)
            self._line = b""
        for line in lines:
            self._print_line(line)

    def _print_line(self, line: bytes) -> None:
        if self._how.verbatim:
            line = line.removesuffix(b"\r").rpartition(b"\r")[2]  # a progress bar redraws itself: keep the last state
            sys.stdout.flush()
            sys.stdout.buffer.write(self._prefix.encode() + line + b"\n")
            sys.stdout.buffer.flush()
        else:
            print(self._prefix + printable(line.decode(errors="backslashreplace")), file=sys.stdout, flush=True)

    def new(self, to: int | None = None) -> bytes:
        """Return the output since the last call, up to position ``to``."""
        if to is None:
            to = os.fstat(self._file.fileno()).st_size
        # Not read(): writers share this file's position and move it.
        text = os.pread(self._file.fileno(), max(0, to - self._read_to), self._read_to)
        self._read_to += len(text)
        return text

    def tail(self) -> str:
        """Return the last 16 KiB, or more if they begin within faulthandler's stacks: those are complete."""
        return "" if self._file.closed else self._tail_bytes().decode(errors="replace")

    def _tail_bytes(self) -> bytes:
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, end - _STACKS_BYTES))
        text = self._file.read()
        fatal = text.rfind(FATAL.encode())
        return text[fatal if 0 <= fatal < len(text) - _TAIL_BYTES else -_TAIL_BYTES :]

    def close(self) -> None:
        self._file.close()
        self._end_live()

    def _end_live(self) -> None:
        if self.live is not None:
            with contextlib.suppress(OSError):
                os.close(self.live)
            self.live = None
            self._print_lines(b"")  # a process that was left behind may still hold the other end


def open_capture(rank: int, show: bool | Live) -> tuple[Capture, int]:
    """Return a capture and the descriptor that the rank writes to, which the caller owns."""
    file = _os.unnamed_file()
    how = show if isinstance(show, Live) else Live()
    if not show or not (how.ranks is None or rank in how.ranks):
        return Capture(rank, file, None), os.dup(file.fileno())
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return Capture(rank, file, reader, how), writer


@dataclass
class _Scratch:
    """The folder of this process; a forked child has its own."""

    path: str = ""
    made_here: bool = False
    temporary: str = ""  # tempfile's folder


_scratch = _Scratch()


def _start_without_folder() -> None:
    global _scratch
    _scratch = _Scratch()


os.register_at_fork(after_in_child=_start_without_folder)


def use(path: str) -> None:
    """Use the folder ``path``, which another process made and removes."""
    _scratch.path, _scratch.temporary = path, tempfile.gettempdir()


def restore() -> None:
    """Recreate the folders for short-lived files if a test has removed them."""
    for path in (_scratch.temporary, _scratch.path):
        if path and not os.path.isdir(path):
            with contextlib.suppress(OSError):  # the next use of the folder reports the error
                os.makedirs(path, 0o700)


def folder() -> str:
    """Return the folder. The first use makes it; it disappears with the process, however the process ends."""
    restore()  # a zygote removes it at its end, and so does the next one
    if not _scratch.path:
        _scratch.path, _scratch.made_here = tempfile.mkdtemp(prefix="torch_ext-"), True
        atexit.register(remove_own)
    return _scratch.path


def remove_own() -> None:
    """Remove the folder if this process made it; the next use makes another. An ending zygote removes its own, too."""
    if _scratch.made_here:
        shutil.rmtree(_scratch.path, ignore_errors=True)
        _scratch.path, _scratch.made_here = "", False


# Seconds for a rank to write its stacks; seconds of silence after which its pipe counts as done; extra seconds for a
# rank that waits for a core.
_STACKS_S, _QUIET_S, _EXTRA_S = 3.0, 0.2, 10.0


class _World(Protocol):
    def pump(self, timeout_s: float) -> None: ...
    def send_signal(self, rank: int, number: int) -> None: ...


@dataclass(eq=False)
class RankProcess:
    """One rank as its parent half sees it. Behaves like a started ``multiprocessing.Process``."""

    rank: int
    name: str
    _channel: Channel
    _capture: Capture
    _stacks: int
    _page: WaitPage
    pid: int | None = None
    connections: list[Connection] = field(default_factory=list)
    _world: _World | None = None  # set by its world
    _seat: tuple[Channel, int] | None = None  # its child group's channel, and its index there; set likewise
    _exit_code: int | None = None
    host: str = ""  # in words, if the test asked for several
    is_remote: bool = False  # on another machine, so `pid` means nothing here

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        if self._exit_code is None and self._world is not None:
            self._world.pump(0)
        return self._exit_code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most ``timeout`` seconds."""
        end = float("inf") if timeout is None else monotonic() + timeout
        while self._world and self._exit_code is None and (left := end - monotonic()) > 0:
            self._world.pump(left)

    def terminate(self, number: int = signal.SIGTERM) -> None:
        if self._world is not None:
            self._world.send_signal(self.rank, number)

    def kill(self) -> None:
        self.terminate(signal.SIGKILL)

    def close(self) -> None:
        """Do nothing: the world closes all ranks together."""

    def detach(self) -> None:
        """Close every descriptor that connects this process with the rank. Idempotent."""
        self._channel.close()
        self._capture.close()
        self._page.close()
        close_all([self._stacks])
        self._stacks = -1
        for connection in self.connections:
            connection.close()


def written_at_end(pipe: int) -> str:
    """Return the stacks that a rank wrote when its own code ended it; see ``exits.py``."""
    try:
        os.set_blocking(pipe, False)
        return os.read(pipe, 1 << 16).decode(errors="replace")
    except OSError:  # empty while a leftover process holds the other end; or the rank ran elsewhere
        return ""


def read_stacks(
    pipes: Mapping[int, int], max_s: float = _STACKS_S, starved_s: Callable[[int], float] | None = None
) -> dict[int, str]:
    """Read faulthandler's output from each pipe until all are quiet for a moment, at most ``max_s`` seconds.
    ``starved_s`` returns the seconds for which a rank has waited for a core; silent ranks that starve get more time.
    """
    texts = dict.fromkeys(pipes, b"")
    deadline = ProcessDeadline(max_s, monotonic(), _EXTRA_S if starved_s else 0.0)
    with selectors.DefaultSelector() as ready:
        for rank, pipe in pipes.items():
            ready.register(pipe, selectors.EVENT_READ, rank)
        while ready.get_map():
            silent = [rank for rank, text in texts.items() if not text]
            if deadline.is_over(monotonic(), sum(map(starved_s, silent)) if starved_s else 0.0):
                break
            left = max(0.0, deadline.look_s - monotonic())
            events = ready.select(left if silent else min(left, _QUIET_S))
            if not events and not silent:
                break
            for key, _ in events:
                part = os.read(key.fd, 1 << 16)
                texts[key.data] += part
                if not part:
                    ready.unregister(key.fd)
    return {rank: text.decode(errors="replace") for rank, text in texts.items()}


def open_rank(
    rank: int, name: str, show: bool | Live, connections: int, reservation: int = -1
) -> tuple[RankProcess, list[int]]:
    """Return the parent half's side of a rank that is yet to start, and the rank's descriptors (see ``rank.main``).
    ``show`` is as in ``start_world()``, ``connections`` the number of the task's pipes; ``reservation`` reserves the
    world's address unless it is -1.
    """
    page = WaitPage()  # first: a test that has closed its standard streams may still write to their numbers
    channel, remote = channel_pair()
    stacks, stacks_writer = os.pipe()
    capture, output = open_capture(rank, show)
    process = RankProcess(rank, name, channel, capture, stacks, page)
    shared = [descriptor for descriptor in (page.descriptor, reservation) if descriptor >= 0]
    inherited = [remote.detach(), output, os.dup(output), stacks_writer, *map(os.dup, shared)]
    for _ in range(connections):
        own, other = Pipe()
        process.connections.append(own)
        inherited.append(os.dup(other.fileno()))
        other.close()
    return process, inherited
