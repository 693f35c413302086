"""Injects, by name, every fault that the world must survive. Runs in ranks; imports the standard library only.

Suites that the tests write call :func:`inject`, and :class:`Census` counts what is left behind after each test.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import unittest
from collections.abc import Callable

from torch_ext.world import _os

__all__ = ["FAULTS", "MARK", "Census", "ancestors", "inject", "marked_processes", "processes_where"]

# Set in the environment of a suite's processes, to recognise anything they leave behind.
MARK = "MARK_OF_A_TEST"


def _raise() -> None:
    raise ValueError("injected")


def _skip() -> None:
    raise unittest.SkipTest("injected reason")


def _exit_3() -> None:
    sys.exit(3)


def _leave_silently() -> None:
    os._exit(0)


def _sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sigsegv() -> None:
    ctypes.string_at(0)


def _hang() -> None:
    while True:
        time.sleep(1)


def _print_50_mb() -> None:
    for _ in range(50):
        os.write(1, (b"y" * 1023 + b"\n") * 1024)
    print("the last line")


def _leave_child() -> None:
    subprocess.Popen(["sleep", "6543"], start_new_session=True)


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "skip": _skip,
    "exit_3": _exit_3,
    "leave_silently": _leave_silently,
    "sigkill": _sigkill,
    "sigsegv": _sigsegv,
    "hang": _hang,
    "print_50_mb": _print_50_mb,
    "leave_child": _leave_child,
}


def inject(fault: str, *, rank: int, at: int) -> None:
    """Trigger ``fault`` if ``rank`` is ``at``."""
    if rank == at:
        FAULTS[fault]()


def marked_processes(mark: str) -> dict[int, str]:
    """Return the pid and command line of every process that carries ``mark``."""
    return processes_where(lambda variable: variable == f"{MARK}={mark}".encode())


def processes_where(holds: Callable[[bytes], bool]) -> dict[int, str]:
    """Return the pid and command line of every process that has been started with a variable (``NAME=value``) for
    which ``holds`` does. Zombies have none.
    """
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as environment, open(f"/proc/{entry}/cmdline", "rb") as command:
                if any(map(holds, environment.read().split(b"\0"))):
                    found[int(entry)] = command.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


class Census:
    """Counts processes (zombies of the tree included), descriptors of this process and those above it, and temporary
    files; writes a line of JSON a test.

    What is reaped in another process takes a moment, so each count is repeated until it agrees with the one before or
    two seconds have passed; a change that stays is written down once and then taken for the new state.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._last: dict[str, int] | None = None

    def note(self, test: str) -> None:
        end = time.monotonic() + 2
        while (counts := _count()) != self._last and self._last is not None and time.monotonic() < end:
            time.sleep(0.02)
        self._last = counts
        with open(self._path, "a") as stream:
            print(json.dumps({"test": test, **counts}), file=stream)


def _count() -> dict[str, int]:
    tree = ancestors()
    counts = {f"descriptors {level}": _descriptors(pid) for level, pid in enumerate(tree)}
    counts["processes"] = len(marked_processes(os.environ[MARK]))
    counts["zombies"] = sum(_is_zombie(child) for pid in tree for child in _children(pid))
    counts["files"] = sum(len(files) + len(folders) for _, folders, files in os.walk(os.environ["TMPDIR"]))
    return counts


def ancestors() -> list[int]:
    """Return the pids of this process and of its ancestors that carry the mark, from the bottom up."""
    marked = marked_processes(os.environ[MARK])
    found = [os.getpid()]
    while (parent := int(_stat(found[-1])[1])) in marked:
        found.append(parent)
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the command name, which may contain anything: state, parent, ..."""
    try:
        return _os.stat_of(pid)
    except OSError:
        return ["X", "0"]


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as stream:
            return [int(child) for child in stream.read().split()]
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[0] == "Z"


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return -1
