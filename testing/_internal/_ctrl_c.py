"""Ctrl-C while ``python some_test_file.py`` still imports that file, before the runner
handles it: prints one word instead of a traceback, and exits with the runner's code.
Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_INTERRUPTED = 130  # the runner's exit code
_REPEAT_S = 0.5  # in which a repeated Ctrl-C counts as one


def install() -> None:
    """Handle uncaught interrupts if the program is a script. Idempotent."""
    main: Any = sys.modules["__main__"]
    installed = getattr(sys.excepthook, "__name__", "") == "_end_without_traceback"
    if installed or main.__spec__ or not getattr(main, "__file__", None):
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
