"""Every operating-system call that the world makes beyond what Python offers on all systems, and those that tests put
others in the place of: taken from here, they are what they were before a test module was imported.

Runs in the supervisor, in zygotes and in ranks; imports the standard library only. On Linux everything here works;
elsewhere the functions say so through :data:`CAN_FORK` or return nothing, and ranks are fresh interpreters.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from os import fork, getpid, getppid, waitpid
from time import monotonic, sleep
from typing import IO, ParamSpec, TypeVar

__all__ = [
    "CAN_FORK",
    "SUPPORTED",
    "adopt_orphans",
    "children_of",
    "command_line",
    "computed_s",
    "delayed_s",
    "descendants_of",
    "die_with_parent",
    "end_process",
    "environment_at_start",
    "environment_of",
    "flush_output",
    "fork",
    "getpid",
    "getppid",
    "group_of",
    "is_ending",
    "is_stopped",
    "lead_process_group",
    "lists_children",
    "monotonic",
    "move_heap_to_huge_pages",
    "require_supported",
    "signal_name",
    "sleep",
    "starved_s",
    "stat_of",
    "tasks",
    "umask",
    "unnamed_file",
    "waitpid",
    "watch_exit",
    "with_room",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

SUPPORTED = sys.platform != "win32"
CAN_FORK = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_HUGE_PAGE_BYTES = 2 << 20
_PF_EXITING, _PF_SIGNALED = 0x4, 0x400


# Python's own recursion limit.
_FRAMES = 1000


def require_supported() -> None:
    """Raise where ranks cannot be started at all.

    Raises:
        RuntimeError: this is Windows.
    """
    if not SUPPORTED:
        raise RuntimeError(
            "torch_ext starts ranks on Linux and macOS: it hands open files from process to process, which Windows "
            "cannot. Use the Windows Subsystem for Linux."
        )


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends; exit now if ``parent`` is gone already."""
    if CAN_FORK:
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if getppid() != parent:
            os._exit(1)


def own_group() -> None:
    """Leave the process group: a signal to the group of what runs here is not meant for who started it."""
    with contextlib.suppress(OSError):  # it leads one already, or a session
        os.setpgid(0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that leftovers can be found and reaped."""
    if CAN_FORK:
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """Return the pids of the live and unreaped children of ``pid``; empty if it is gone or the system cannot tell."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as stream:
                found.extend(int(child) for child in stream.read().split())
    return found


def lists_children() -> bool:
    """Whether :func:`children_of` finds any on this system."""
    return os.path.exists(f"/proc/self/task/{getpid()}/children")


def descendants_of(pid: int) -> list[int]:
    """Return the pids of the children of ``pid``, and of theirs, as :func:`children_of` finds them."""
    return [found for child in children_of(pid) for found in (child, *descendants_of(child))]


def stat_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` that follow the name, which may hold anything: the state first.

    Raises:
        OSError: the process is gone, or hidden, or the system has no such file.
    """
    with open(f"/proc/{pid}/stat", errors="replace") as stream:
        return stream.read().rpartition(")")[2].split()


def computed_s(pid: int) -> float:
    """Return for how many seconds ``pid``, its descendants and those that they have reaped have computed, and the first
    thread of each has waited for a core; 0 if the system cannot tell.
    """
    try:
        fields = stat_of(pid)
    except OSError:
        return 0.0
    ticks = sum(int(field) for field in fields[11:15])
    own_s = ticks / os.sysconf("SC_CLK_TCK") + delayed_s(pid)
    return own_s + sum(computed_s(child) for child in children_of(pid))


def starved_s(pid: int) -> float:
    """Return for how many seconds the threads of ``pid`` have waited for a core; 0 if the system cannot tell."""
    try:
        return sum(_waited_s(f"/proc/{pid}/task/{task}") for task in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0.0


def delayed_s(pid: int) -> float:
    """Return for how many seconds the first thread of ``pid`` has waited for a core; 0 if the system cannot tell."""
    return _waited_s(f"/proc/{pid}")


def _waited_s(folder: str) -> float:
    try:
        with open(f"{folder}/schedstat") as stream:
            return int(stream.read().split()[1]) * 1e-9
    except (OSError, IndexError):  # it is gone, or the kernel keeps no such statistics
        return 0.0


def command_line(pid: int) -> str:
    """Return the command line of ``pid``, or an empty string if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return stream.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def tasks(pid: int = 0) -> int:
    """Return how many threads, native ones included, ``pid`` has; by default this process. 0 if it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid or 'self'}/task"))
    except OSError:
        return 0 if pid else threading.active_count()


def environment_at_start() -> dict[str, str]:
    """Return the environment that this process's program was started with, whatever has been set since."""
    return dict(environment_of(getpid()) or os.environ)


def watch_exit(pid: int) -> int:
    """Return a descriptor that becomes readable when child ``pid`` ends. The caller closes it and reaps the child."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    reader, writer = os.pipe()

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writer)

    threading.Thread(target=wait, name=f"exit of {pid}", daemon=True).start()
    return reader


def is_stopped(pid: int) -> bool:
    """Whether ``pid`` has been stopped by a signal, and not by a debugger."""
    try:
        return stat_of(pid)[0] == "T"
    except (OSError, IndexError):
        return False


def lead_process_group() -> None:
    """Put this process into a process group of its own."""
    with contextlib.suppress(OSError):  # it leads its session
        os.setpgid(0, 0)


def group_of(pid: int) -> int:
    """Return the process group of ``pid``; 0 if it is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that the program of ``pid`` was started with; empty if it is gone or not ours to read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            entries = stream.read().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def is_ending(pid: int) -> bool:
    """Whether ``pid`` ends, or will as soon as it gets a core because it has been sent SIGKILL; False if it is gone."""
    try:
        with open(f"/proc/{pid}/status") as stream:
            pending = (int(line.split()[1], 16) for line in stream if line.startswith(("SigPnd:", "ShdPnd:")))
            killed = any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)
        return killed or bool(int(stat_of(pid)[6]) & (_PF_EXITING | _PF_SIGNALED))
    except (OSError, IndexError):
        return False


def end_process(pid: int, how: int = signal.SIGKILL) -> None:
    """Send ``how`` to ``pid``, a child of this process that it has not reaped; no error if it is a zombie."""
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
    """Have ``function`` run with frames enough, whatever recursion limit the test that calls it has set."""

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
    """Write what this process has printed so far to where it goes. A test may have put anything there."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def umask() -> int:
    """Return this process's umask, which cannot be read without setting it."""
    found = os.umask(0)
    os.umask(found)
    return found


def unnamed_file() -> IO[bytes]:
    """Open a temporary file that has no name, so that nothing is left behind however its holders end. Writes append."""
    os.makedirs(tempfile.gettempdir(), 0o700, exist_ok=True)  # a test may have removed it
    file = tempfile.TemporaryFile(prefix="torch_ext-", buffering=0)  # noqa: SIM115  # the caller closes it
    if SUPPORTED:
        import fcntl

        # Otherwise writers share one file position with the reader, and would overwrite what it has gone back to read.
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def move_heap_to_huge_pages() -> None:
    """See Note [Huge pages]. Kernels before 6.1, or without huge pages, refuse."""
    if not CAN_FORK:
        return
    libc = _libc()
    with open("/proc/self/maps") as stream:
        areas = [line.split() for line in stream]
    for bounds, rights, *rest in areas:
        if rights == "rw-p" and (len(rest) < 4 or rest[3] == "[heap]"):
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            for page in range(-(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, end, _HUGE_PAGE_BYTES):
                if page + _HUGE_PAGE_BYTES <= end:
                    libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE_BYTES), _MADV_COLLAPSE)
