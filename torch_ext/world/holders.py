"""Which processes can end a wait in the kernel: those that hold the other end of a pipe, or the lock of a file. Imports
the standard library only. Linux only: elsewhere nobody is found.

Nobody found means that it is not known who can: a descriptor may be on its way through a socket, and a process of
another user does not show what it holds. One of those that is older than this process is taken to hold nothing of it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable

__all__ = ["holders_of_lock", "writers_of_pipe"]

_KERNEL_THREAD = 0x00200000
_LOCK = re.compile(r"^lock:\s+\d+: FLOCK +\w+ +(READ|WRITE)", re.MULTILINE)


def writers_of_pipe(descriptor: int) -> tuple[int, ...]:
    """Return the processes that can write to the pipe from which this process reads by ``descriptor``.

    Nobody is found if it is anything else: whoever knows its name can open a named pipe.
    """
    try:
        pipe = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ()

    def writes(process: str, number: str) -> bool:
        path = f"/proc/{process}/fd/{number}"
        return os.readlink(path) == pipe and bool(os.lstat(path).st_mode & stat.S_IWUSR)

    return _processes(writes) if pipe.startswith("pipe:[") else ()


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


def _processes(has: Callable[[str, str], bool]) -> tuple[int, ...]:
    """Return the processes for one of whose descriptors ``has(process, descriptor)`` holds."""
    found = []
    _, own_start = _flags_and_start("self")
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            numbers = os.listdir(f"/proc/{process}/fd")
        except PermissionError:
            flags, start = _flags_and_start(process)
            if start >= own_start and not flags & _KERNEL_THREAD:
                return ()
            continue
        except OSError:  # it is gone
            continue
        if any(_is_true(has, process, number) for number in numbers):
            found.append(int(process))
    return tuple(sorted(found))


def _is_true(has: Callable[[str, str], bool], process: str, number: str) -> bool:
    try:
        return has(process, number)
    except OSError:  # it was closed meanwhile
        return False


def _flags_and_start(process: str) -> tuple[int, int]:
    """Return the kernel's flags of a process, and when it started in ticks; zeros if it is gone."""
    try:
        with open(f"/proc/{process}/stat") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[6]), int(fields[19])
