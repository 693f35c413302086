"""Which processes can end a wait in the kernel: those that hold the other end of a pipe, or the lock of a file. Imports
the standard library and its own layer only. Linux only: elsewhere nobody is found.

Nobody found means that it is not known who can: a descriptor is on its way to a relative through a socket, and may be
the one; a process does not show what it holds; or there are too many to look at. It is taken for granted that no
descriptor is on its way to anybody else, and that a process which hides what it holds has nothing of this one if it is
older and of another user or no relative.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch_ext.world import _os

__all__ = ["holders_of_lock", "holders_of_record_lock", "is_pipe", "writers_of_pipe"]

_KERNEL_THREAD = 0x00200000
# The first kernel that tells of descriptors under way, in the information on a socket.
_TELLS_OF_SOCKETS = (5, 6)
# How long to look, in seconds: meanwhile the rank answers no other question.
_LOOK_S = 0.5
# A number, an arrow for one that waits for the lock of that number, and a process.
_RECORD_LOCK = re.compile(r"^(\d+): +(->)? *POSIX +\w+ +\w+ +(-?\d+) ", re.MULTILINE)
_UNDER_WAY = re.compile(r"^scm_fds: [1-9]", re.MULTILINE)
_LOCK = re.compile(r"^lock:\s+\d+: FLOCK +\w+ +(READ|WRITE)", re.MULTILINE)
_UID = re.compile(r"^Uid:\s+(\d+)", re.MULTILINE)
# Of a process or descriptor that is gone.
_GONE = (FileNotFoundError, ProcessLookupError)


class _UnknownError(Exception):
    """Something may hold what is looked for, and does not show it."""


def writers_of_pipe(descriptor: int) -> tuple[int, ...]:
    """Return the processes that can write to the pipe from which this process reads by ``descriptor``."""
    pipe = _target(descriptor)

    def writes(process: str, number: str, target: str) -> bool:
        return target == pipe and bool(os.lstat(f"/proc/{process}/fd/{number}").st_mode & stat.S_IWUSR)

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

    def holds(process: str, number: str, target: str) -> bool:
        if not target.startswith("/"):
            return False
        kinds = _LOCK.findall(_read(f"/proc/{process}/fdinfo/{number}"))
        if "WRITE" not in kinds and not (exclusive and "READ" in kinds):
            return False
        # Only now: on a network that is gone, looking at a file may take for ever.
        return os.path.samestat(os.stat(f"/proc/{process}/fd/{number}"), file)

    return _processes(holds)


def holders_of_record_lock() -> tuple[int, ...]:
    """Return the processes that keep this one from locking a part of a file (``fcntl.lockf()``). Only the process that
    has locked it can let go of it.
    """
    try:
        locks = _RECORD_LOCK.findall(_read("/proc/locks"))
    except OSError:
        return ()
    own = {number for number, waits, pid in locks if waits and int(pid) == os.getpid()}
    found = {int(pid) for number, waits, pid in locks if number in own and not waits}
    return tuple(sorted(found)) if min(found, default=0) > 0 else ()  # others are of no process, or of none seen here


def _processes(has: Callable[[str, str, str], bool]) -> tuple[int, ...]:
    """Return the processes for one of whose descriptors ``has(process, descriptor, target)`` holds."""
    if not _tells_of_sockets() or not os.path.exists("/proc/1/stat"):  # only a process's own user may see it at all
        return ()
    end_s = time.monotonic() + _LOOK_S
    try:
        listed = [process for process in os.listdir("/proc") if process.isdigit()]
        stats = {process: each for process in listed if (each := _stat(process)) is not None}
        own = stats[str(os.getpid())]
        return tuple(sorted(int(process) for process in stats if _holds(process, stats, own, has, end_s)))
    except (_UnknownError, OSError):
        return ()


def _holds(
    process: str, stats: dict[str, _Stat], own: _Stat, has: Callable[[str, str, str], bool], end_s: float
) -> bool:
    if stats[process].holds_nothing:
        return False
    related, found = _is_relative(process, stats), False
    try:
        for number in os.listdir(f"/proc/{process}/fd"):
            if time.monotonic() > end_s:
                raise _UnknownError
            try:
                target = os.readlink(f"/proc/{process}/fd/{number}")
                if related and target.startswith("socket:"):
                    _check_nothing_is_under_way(process, number)
                found = found or has(process, number, target)
            except _GONE:  # it was closed meanwhile
                continue
        return found
    except _GONE:
        return False
    except PermissionError:
        if stats[process].start >= own.start or (related and not _is_of_another_user(process)):
            raise _UnknownError from None
        return False


def _check_nothing_is_under_way(process: str, number: str) -> None:
    """Raise if it is a socket through which descriptors have been sent that nobody has received."""
    if _UNDER_WAY.search(_read(f"/proc/{process}/fdinfo/{number}")):
        raise _UnknownError


def _is_relative(process: str, stats: dict[str, _Stat]) -> bool:
    """Whether it descends from the process that has started this one, as its ranks do and all that these start."""
    ancestor = os.getppid()
    while process in stats and int(process) != ancestor:
        process = stats[process].parent
    return int(process) == ancestor or ancestor <= 1


def _is_of_another_user(process: str) -> bool:
    uid = _UID.search(_read(f"/proc/{process}/status"))
    return uid is not None and int(uid[1]) != os.getuid()


def _tells_of_sockets() -> bool:
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return release is not None and (int(release[1]), int(release[2])) >= _TELLS_OF_SOCKETS


@dataclass(frozen=True)
class _Stat:
    """The parent of a process, when it started, in ticks, and whether it holds nothing: one of the kernel, or dead."""

    parent: str
    start: int
    holds_nothing: bool


def _stat(process: str) -> _Stat | None:
    """Return None if it is gone."""
    try:
        fields = _os.stat_of(int(process))
    except _GONE:
        return None
    except PermissionError:
        raise _UnknownError from None
    return _Stat(fields[1], int(fields[19]), fields[0] in "ZX" or bool(int(fields[6]) & _KERNEL_THREAD))


def _read(path: str) -> str:
    with open(path, errors="replace") as stream:
        return stream.read()
