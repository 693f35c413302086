"""Which processes can end a wait in the kernel: those that hold the other end of a pipe, or the lock of a file. Imports
the standard library only. Linux only: elsewhere nobody is found.

Nobody found means that it is not known who can: a descriptor is on its way to a relative through a socket, and may be
the one, or a process of another user does not show what it holds. It is taken for granted that no descriptor is on its
way to anybody else, and that a process of another user which is older than this one holds nothing of it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["holders_of_lock", "holders_of_record_lock", "is_pipe", "writers_of_pipe"]

_KERNEL_THREAD = 0x00200000
# A number, an arrow for one that waits for the lock of that number, and a process.
_RECORD_LOCK = re.compile(r"^(\d+): +(->)? *POSIX +\w+ +\w+ +(-?\d+) ", re.MULTILINE)
_UNDER_WAY = re.compile(r"^scm_fds: [1-9]", re.MULTILINE)
_LOCK = re.compile(r"^lock:\s+\d+: FLOCK +\w+ +(READ|WRITE)", re.MULTILINE)


def writers_of_pipe(descriptor: int) -> tuple[int, ...]:
    """Return the processes that can write to the pipe from which this process reads by ``descriptor``."""
    pipe = _target(descriptor)

    def writes(process: str, number: str) -> bool:
        path = f"/proc/{process}/fd/{number}"
        return os.readlink(path) == pipe and bool(os.lstat(path).st_mode & stat.S_IWUSR)

    return _processes(writes) if is_pipe(descriptor) else ()


def is_pipe(descriptor: int) -> bool:
    """Whether it is an end of a pipe without a name; who knows the name of one can open it at any time."""
    return _target(descriptor).startswith("pipe:[")


def _target(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def holders_of_lock(descriptor: int, *, exclusive: bool) -> tuple[int, ...]:
    """Return the processes that keep this one from locking a file by ``flock()``: those that have an open file by which
    it is locked, which need not have locked it themselves.
    """
    try:
        file = os.fstat(descriptor)
    except OSError:
        return ()

    def holds(process: str, number: str) -> bool:
        path = f"/proc/{process}/fd/{number}"
        if not os.readlink(path).startswith("/") or not os.path.samestat(os.stat(path), file):
            return False
        with open(f"/proc/{process}/fdinfo/{number}") as stream:
            kinds = _LOCK.findall(stream.read())
        return "WRITE" in kinds or (exclusive and "READ" in kinds)

    return _processes(holds)


def holders_of_record_lock() -> tuple[int, ...]:
    """Return the processes that keep this one from locking a part of a file (``fcntl.lockf()``). Only the process that
    has locked it can let go of it.
    """
    try:
        with open("/proc/locks") as stream:
            locks = stream.read()
    except OSError:
        return ()
    own = {number for number, waits, pid in _RECORD_LOCK.findall(locks) if waits and int(pid) == os.getpid()}
    found = {int(pid) for number, waits, pid in _RECORD_LOCK.findall(locks) if number in own and not waits}
    return tuple(sorted(found)) if min(found, default=0) > 0 else ()  # others are of no process, or of none seen here


def _processes(has: Callable[[str, str], bool]) -> tuple[int, ...]:
    """Return the processes for one of whose descriptors ``has(process, descriptor)`` holds."""
    found = []
    own_start = _stat("self").start
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            numbers = os.listdir(f"/proc/{process}/fd")
        except PermissionError:
            other = _stat(process)
            if other.start >= own_start and not other.flags & _KERNEL_THREAD:
                return ()
            continue
        except OSError:  # it is gone
            continue
        if any(_is_true(_has_descriptors_under_way, process, number) for number in numbers) and _is_relative(process):
            return ()
        if any(_is_true(has, process, number) for number in numbers):
            found.append(int(process))
    return tuple(sorted(found))


def _has_descriptors_under_way(process: str, number: str) -> bool:
    """Whether it is a socket through which descriptors have been sent that nobody has received."""
    if not os.readlink(f"/proc/{process}/fd/{number}").startswith("socket:"):
        return False
    with open(f"/proc/{process}/fdinfo/{number}") as stream:
        return _UNDER_WAY.search(stream.read()) is not None


def _is_true(has: Callable[[str, str], bool], process: str, number: str) -> bool:
    try:
        return has(process, number)
    except OSError:  # it was closed meanwhile
        return False


def _is_relative(process: str) -> bool:
    """Whether it descends from the process that has started this one, as its ranks do and all that these start."""
    pid = int(process)
    while pid > 1 and pid != os.getppid():
        pid = _stat(str(pid)).parent
    return pid > 1


class _Stat(NamedTuple):
    """The parent of a process, the kernel's flags of it, and when it started, in ticks."""

    parent: int
    flags: int
    start: int


def _stat(process: str) -> _Stat:
    """Return zeros if it is gone."""
    try:
        with open(f"/proc/{process}/stat") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return _Stat(0, 0, 0)
    return _Stat(int(fields[1]), int(fields[6]), int(fields[19]))
