"""Every operating-system call that the world makes beyond what Python offers on all systems, and those that tests put
others in the place of: taken from here, they are what they were before a test module was imported.

Runs in the supervisor, in zygotes and in ranks; imports the standard library only. On Linux everything here works;
elsewhere the functions say so through :data:`CAN_FORK` or return nothing, and ranks are fresh interpreters.

Processes of a run that are neither its ranks nor the harness: which of them may act, and which a rank has left
behind. Standard library and own layer only.

Note [Who else may act]
~~~~~~~~~~~~~~~~~~~~~~~
A zygote is the parent of its ranks, and adopts every process below it whose own parent ends. It knows which children it
has forked itself: ranks, spares, the class process, its copies. All others were started by a rank, by the parent half,
or by the file of the test as it was imported; a copy learns from its original which processes those were, since they
stay with the original. The parent half looks at its own children and threads. Where it is no child of a zygote (pytest,
``python test_x.py``), it adopts its orphans itself, so that they can be found.

Processes that have ended or are being killed do not count, nor do two that only clean up: multiprocessing's resource
tracker and torch's shared memory manager. Descendants are read before the zygote's own children: a process whose parent
ends in between is seen in one of the two places.

Note [Leftovers]
~~~~~~~~~~~~~~~~
A zygote is the subreaper of its descendants, so that a process whose parent has ended becomes the zygote's child. Its
owner is the child of the zygote that started it. Every child of a zygote leads a process group of its own, which the
processes that it starts join, so the group tells the owner. A process that has left that group still has the variable
``TORCH_EXT_OWNER`` of the environment that it was started in; one that has neither is charged to the child that ended
last. A process whose owner still lives is let be: the processes of a class serve until the class ends.

Three kinds end by themselves once their clients are gone, and clean up before they do: torch's shared memory manager,
and multiprocessing's resource tracker and fork server. They are nobody's leftovers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from os import fork, getpid, getppid, waitpid
from time import monotonic, sleep
from typing import IO, ParamSpec, TypeVar

from torch_ext.world import _os
from torch_ext.world.protocol import Process

__all__ = [
    "CAN_FORK",
    "SUPPORTED",
    "adopt_orphans",
    "below_ranks",
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
    "known",
    "lead_process_group",
    "lists_children",
    "monotonic",
    "move_heap_to_huge_pages",
    "others_of_parent_half",
    "require_supported",
    "short_command",
    "signal_name",
    "sleep",
    "starved_s",
    "stat_of",
    "still_there",
    "tasks",
    "umask",
    "unnamed_file",
    "waitpid",
    "watch_exit",
    "with_room",
    "words_of",
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


_COMMAND_CHARACTERS = 100


def short_command(command: str) -> str:
    """Return the first 100 characters of a command line, which may be a program of several, as one line.

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


def others_of_parent_half(ranks: Iterable[int], zygotes: Iterable[int] = ()) -> tuple[str, ...]:
    """Return the children of this process that may act, in words: all but ``zygotes`` and those of ``ranks``."""
    ours = set(zygotes).union(*map(_ancestors, ranks))
    return tuple(words_of(pid for pid in _os.children_of(os.getpid()) if pid not in ours))


def below_ranks(ranks: Iterable[int]) -> Iterator[str]:
    """Yield the processes that ``ranks`` have started, in words."""
    for rank in ranks:
        yield from words_of(_os.children_of(rank))


def known(pids: Iterable[int]) -> tuple[Process, ...]:
    """Return what tells these processes from later ones of the same number."""
    return tuple(Process(pid, start) for pid in _live(pids) if (start := _start_of(pid)))


def still_there(processes: Iterable[Process]) -> Iterator[str]:
    """Yield those of ``processes`` that have not ended, in words."""
    for each in processes:
        if _start_of(each.pid) == each.start:
            yield from words_of([each.pid])


def _live(pids: Iterable[int]) -> Iterator[int]:
    """Yield those that may act, and those below them that do in the place of one that only cleans up."""
    for pid in pids:
        if _has_ended(pid) or _os.is_ending(pid):
            continue
        if _CLEANS_UP.fullmatch(_os.command_line(pid)):
            yield from _live(_os.children_of(pid))
        else:
            yield pid


def _has_ended(pid: int) -> bool:
    try:
        return _os.stat_of(pid)[0] in "ZX"
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _start_of(pid: int) -> str:
    try:
        return _os.stat_of(pid)[19]
    except OSError:
        return ""


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            pid = int(_os.stat_of(pid)[1])
        except OSError:
            break
    return found


def words_of(pids: Iterable[int]) -> Iterator[str]:
    """Yield those of ``pids`` that may act, in words."""
    yield from map(_words, _live(pids))


def _words(pid: int) -> str:
    return f"process {pid} ({short_command(_os.command_line(pid)) or '?'})"
