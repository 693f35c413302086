"""The operating-system calls of the world that Python lacks or that tests replace, and readers of /proc. Tests may
replace ``open`` and functions of ``os`` and ``time``; the names here keep the originals. A library that freezes clocks
also replaces the imported names of ``time``'s functions, so the clocks here are ``partial`` objects.

Runs in the supervisor, in zygotes and in ranks; imports the standard library only. Linux only.

Note [Who else may act]
~~~~~~~~~~~~~~~~~~~~~~~
A zygote is the parent of its ranks, and adopts every process below it whose own parent ends. It knows the children that
it has forked (ranks, spares, the class process, its copies); a rank, the parent half or the import of the test's file
started every other process. Processes of the import stay with the original zygote, which lists them to its copies. The
parent half looks at its own children and threads, and adopts its orphans itself if it is no child of a zygote (pytest,
``python test_x.py``).

Processes that have ended or are being killed do not count, nor do two that only clean up: multiprocessing's resource
tracker and torch's shared memory manager. Read descendants before the zygote's own children: a process whose parent
ends between the two reads then shows up in one of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from os import close as _close
from os import fork as fork
from os import getpid as getpid
from os import getppid as getppid
from os import listdir as listdir
from os import open as _open
from os import pread as _pread
from os import read as _read
from os import readlink as readlink
from os import waitpid as waitpid
from time import sleep as sleep
from typing import IO, ParamSpec, TypeVar

from torch_ext.world.protocol import Process

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING, _PF_SIGNALED = 0x4, 0x400
_FRAMES = 1000  # Python's own recursion limit
_STAT_BYTES = 4096  # far above a line of /proc/PID/stat
_COMMAND_CHARACTERS = 100

monotonic = functools.partial(time.monotonic)
wall_clock = functools.partial(time.time)


def require_supported() -> None:
    """Raise RuntimeError on any system but Linux."""
    if sys.platform != "linux":
        raise RuntimeError("torch_ext starts ranks on Linux only; on Windows, use the Windows Subsystem for Linux")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit now if ``parent`` is gone."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, to find and reap leftovers."""
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """Return the pids of the live and unreaped children of ``pid``; empty if it is gone or the system cannot tell."""
    found: list[int] = []
    for thread in threads_of(pid):
        with contextlib.suppress(OSError):
            found.extend(int(child) for child in read_file(f"/proc/{pid}/task/{thread}/children").split())
    return found


def lists_children() -> bool:
    """Whether this system supports :func:`children_of`."""
    return "children" in listdir(f"/proc/self/task/{getpid()}")


def descendants_of(pid: int) -> list[int]:
    """Return the pids of all live and unreaped descendants of ``pid``."""
    return [found for child in children_of(pid) for found in (child, *descendants_of(child))]


def read_file(path: str) -> bytes:
    """Return the content of a file. Raises OSError if it cannot be read."""
    descriptor = _open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: _read(descriptor, 1 << 16), b""))
    finally:
        _close(descriptor)


def read_memory(address: int, size: int) -> bytes:
    """Return ``size`` bytes at ``address`` of this process. Raises OSError as :func:`read_file` does."""
    descriptor = _open("/proc/self/mem", os.O_RDONLY)
    try:
        return _pread(descriptor, size, address)
    finally:
        _close(descriptor)


def lines_of(path: str) -> list[str]:
    """Return the lines of a file of text. Raises OSError as :func:`read_file` does."""
    return read_file(path).decode(errors="replace").splitlines()


def stat_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name (which may contain any character): the state first. Raises
    OSError if the process is gone or hidden.
    """
    descriptor = _open(f"/proc/{pid}/stat", os.O_RDONLY)  # three system calls; open() in Python takes eight
    try:
        return _read(descriptor, _STAT_BYTES).rpartition(b")")[2].decode().split()
    finally:
        _close(descriptor)


def field_of(pid: int, index: int) -> str:
    """Return one field of :func:`stat_of`; empty if the process is gone."""
    try:
        return stat_of(pid)[index]
    except (OSError, IndexError):
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a signal, rather than a debugger, has stopped ``pid``."""
    return field_of(pid, 0) == "T"


def start_of(pid: int) -> str:
    """Return when process or thread ``pid`` started, in the kernel's ticks; empty if it is gone."""
    return field_of(pid, 19)


def cpu_time_s(pid: int) -> float:
    """Return the CPU time of ``pid``, its descendants and the processes that they have reaped, plus the time for which
    the first thread of each has waited for a core, in seconds; 0 if unknown.
    """
    try:
        fields = stat_of(pid)
    except OSError:
        return 0.0
    ticks = sum(int(field) for field in fields[11:15])
    own_s = ticks / os.sysconf("SC_CLK_TCK") + delayed_s(pid)
    return own_s + sum(cpu_time_s(child) for child in children_of(pid))


def starved_s(pid: int) -> float:
    """Return the time for which all threads of ``pid`` together have waited for a core, in seconds; 0 if unknown."""
    return sum(_waited_s(f"/proc/{pid}/task/{thread}") for thread in threads_of(pid))


def delayed_s(pid: int) -> float:
    """Return the time for which the first thread of ``pid`` has waited for a core, in seconds; 0 if unknown."""
    return _waited_s(f"/proc/{pid}")


def _waited_s(folder: str) -> float:
    try:
        return int(read_file(f"{folder}/schedstat").split()[1]) * 1e-9
    except (OSError, IndexError):  # the process is gone, or the kernel keeps no such statistics
        return 0.0


def command_line(pid: int) -> str:
    """Return the command line of ``pid``, or an empty string if it is gone or a zombie."""
    try:
        return read_file(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def threads_of(pid: int = 0) -> set[int]:
    """Return the numbers of the threads, native ones included, of ``pid`` (default: this process); empty if gone."""
    with contextlib.suppress(OSError):
        return {int(name) for name in listdir(f"/proc/{pid or 'self'}/task")}
    return set()


def watch_exit(pid: int) -> int:
    """Return a descriptor that becomes readable when child ``pid`` ends. The caller closes it and reaps the child."""
    if hasattr(os, "pidfd_open"):  # missing in a Python built for old kernels
        return os.pidfd_open(pid)
    reader, writer = os.pipe()

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writer)

    threading.Thread(target=wait, name=f"exit of {pid}", daemon=True).start()
    return reader


def lead_process_group() -> None:
    """Put this process into its own process group."""
    with contextlib.suppress(OSError):  # EPERM: this process leads its session
        os.setpgid(0, 0)


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which ``pid`` was executed; empty if the process is gone or another user's."""
    try:
        entries = read_file(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def is_ending(pid: int) -> bool:
    """Whether ``pid`` is exiting or has a pending SIGKILL; False if it is gone."""
    try:
        lines = lines_of(f"/proc/{pid}/status")
        pending = (int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))
        killed = any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)
        return killed or bool(int(stat_of(pid)[6]) & (_PF_EXITING | _PF_SIGNALED))
    except (OSError, IndexError):
        return False


def end_process(pid: int, how: int = signal.SIGKILL) -> None:
    """Send signal ``how`` to ``pid``, an unreaped child of this process; no error if it is a zombie."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


def signal_name(number: int) -> str:
    """Return the name of a signal.

    >>> signal_name(11)
    'SIGSEGV'
    >>> signal_name(200)
    'signal 200'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def with_room(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: run ``function`` under a sufficient recursion limit, even if a test has lowered the limit."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        limit = sys.getrecursionlimit()
        if limit >= _FRAMES:
            return function(*args, **kwargs)
        sys.setrecursionlimit(limit + _FRAMES)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setrecursionlimit(limit)

    return run


def flush_output() -> None:
    """Flush stdout and stderr. Ignores errors: a test may have replaced the streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def umask() -> int:
    """Return this process's umask. Sets and restores it, the only way to read it."""
    found = os.umask(0)
    os.umask(found)
    return found


def unnamed_file() -> IO[bytes]:
    """Open a temporary file that disappears when its last holder ends. Writes append."""
    os.makedirs(tempfile.gettempdir(), 0o700, exist_ok=True)  # a test may have removed it
    file = tempfile.TemporaryFile(prefix="torch_ext-", buffering=0)  # noqa: SIM115  # the caller closes it
    # Writers share the reader's file position: without O_APPEND they would write wherever the reader has sought to.
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def short_command(command: str) -> str:
    """Return the first 100 characters of a command line as one line, even if it contains a program of several lines.

    >>> short_command("sleep " + "6" * 200) == "sleep " + "6" * 94 + "..."
    True
    >>> short_command("python -c while True:\\n    pass")
    'python -c while True: pass'
    """
    command = " ".join(command.split())
    return command if len(command) <= _COMMAND_CHARACTERS else f"{command[:_COMMAND_CHARACTERS]}..."


_CLEANS_UP = re.compile(
    r"\S+ (-\S+ )*-c from multiprocessing\.resource_tracker import main;main\(\d+\)|\S*/torch_shm_manager"
)


def other_children(ranks: Iterable[int], zygotes: Iterable[int] = ()) -> tuple[str, ...]:
    """Describe the children of this process that may act, except ``zygotes``, ``ranks`` and ancestors of ``ranks``."""
    excluded = set(zygotes).union(*map(_ancestors, ranks))
    return tuple(descriptions(pid for pid in children_of(getpid()) if pid not in excluded))


def identify(pids: Iterable[int]) -> tuple[Process, ...]:
    """Return the processes of ``pids`` that may act, each with its start time, since the kernel reuses pids."""
    return tuple(Process(pid, start) for pid in _live(pids) if (start := start_of(pid)))


def still_running(processes: Iterable[Process]) -> Iterator[str]:
    """Yield a description of each of ``processes`` that may still act."""
    return descriptions(each.pid for each in processes if start_of(each.pid) == each.start)


def descriptions(pids: Iterable[int]) -> Iterator[str]:
    """Yield a description of each of ``pids`` that may act."""
    return (f"process {pid} ({short_command(command_line(pid)) or '?'})" for pid in _live(pids))


def _live(pids: Iterable[int]) -> Iterator[int]:
    """Yield the pids that may act; replace a process that only cleans up by its live children."""
    for pid in pids:
        if _has_ended(pid) or is_ending(pid):
            continue
        if _CLEANS_UP.fullmatch(command_line(pid)):
            yield from _live(children_of(pid))
        else:
            yield pid


def _has_ended(pid: int) -> bool:
    try:
        return stat_of(pid)[0] in "ZX"
    except OSError as error:
        return isinstance(error, FileNotFoundError)


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        while pid > 1 and pid not in found:
            found.add(pid)
            pid = int(stat_of(pid)[1])
    return found
