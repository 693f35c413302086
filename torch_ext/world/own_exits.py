"""Writes down where a rank is when its own code ends it. Runs in the rank; standard library only."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable
from typing import Any

__all__ = ["write_stacks_before", "write_text"]

# Signals that end a process, of which nothing else tells where it was: faulthandler's own write to stderr.
_SILENT = {
    getattr(signal, name)
    for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGPIPE")
    if hasattr(signal, name)
}


def write_stacks_before(descriptor: int) -> Callable[[], None]:
    """Have :func:`os._exit`, and :func:`os.kill` of this process, write its stacks to ``descriptor`` first.

    Returns:
        A function that ends this.
    """
    leave, kill, own = os._exit, os.kill, os.getpid()

    def _exit(status: int) -> Any:
        if os.getpid() == own:
            _write_stacks(descriptor)
        leave(status)

    def kill_after_writing(pid: int, signal_number: int, /) -> None:
        if pid == own == os.getpid() and signal_number in _SILENT and _is_default(signal_number):
            _write_stacks(descriptor)
        kill(pid, signal_number)

    def undo() -> None:
        os._exit, os.kill = leave, kill

    os._exit, os.kill = _exit, kill_after_writing
    return undo


def write_text(descriptor: int, text: str) -> None:
    """Write what fits; nobody may read it before this process has ended."""
    with contextlib.suppress(OSError):
        os.set_blocking(descriptor, False)
        os.write(descriptor, text.encode(errors="replace"))


def _write_stacks(descriptor: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.set_blocking(descriptor, False)
        faulthandler.dump_traceback(descriptor, all_threads=True)


def _is_default(signal_number: int) -> bool:
    return signal.getsignal(signal_number) is signal.SIG_DFL or signal_number == signal.SIGKILL
