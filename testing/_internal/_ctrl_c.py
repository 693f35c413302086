"""Ctrl-C while ``python some_test_file.py`` still imports that file. Standard library
only.

From ``run_tests()`` on, the runner handles interrupts. Most of the time before goes
into imports, where an interrupt would print a traceback. After :func:`install` it
prints one word and ends the process with code 130, as in the runner.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

__all__ = ["install"]

# The runner's exit code for an interrupted run.
_INTERRUPTED = 130
# Seconds in which a repeated Ctrl-C counts as one: another interrupt within the hook
# below would print two tracebacks.
_REPEAT_S = 0.5


def install() -> None:
    """Handle uncaught interrupts if the program is a script. Idempotent."""
    main = sys.modules.get("__main__")
    is_script = (
        main is not None and main.__spec__ is None and getattr(main, "__file__", None)
    )
    if (
        not is_script
        or getattr(sys.excepthook, "__name__", "") == "_end_without_traceback"
    ):
        return
    previous, pid = sys.excepthook, os.getpid()

    def _end_without_traceback(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None, /
    ) -> None:
        if not issubclass(kind, KeyboardInterrupt) or os.getpid() != pid:
            previous(kind, error, trace)
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)

    interrupted_s = -_REPEAT_S

    def _interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted_s
        now_s = time.monotonic()
        if now_s - interrupted_s >= _REPEAT_S:
            interrupted_s = now_s
            raise KeyboardInterrupt

    sys.excepthook = _end_without_traceback
    # Only the main thread handles signals; a program's own handler stays.
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupt)
