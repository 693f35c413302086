"""What an interpreter does at its very end, for ranks, which end without it. The standard library only.

A rank is a fork of a process that has loaded torch, and leaves by ``os._exit()``: to take all of that down would cost
it half a second. But a program may count on what Python does with its globals, and on files being written that it has
not closed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import threading

__all__ = ["finalize"]

_FILES = frozenset((io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom))


def finalize(harness_thread: str) -> None:
    """Drop the globals of ``__main__``, as Python does, and write what open files hold back.

    Where a daemon thread of the program still runs, the globals stay: Python has stopped such threads by then, and what
    they print about names that are gone would help nobody.

    Args:
        harness_thread: the name of a thread that has no use for them.
    """
    main = sys.modules.get("__main__")
    own = {threading.current_thread().name, harness_thread}
    if main is not None and own.issuperset(thread.name for thread in threading.enumerate()):
        names = vars(main)
        # Those with one underscore in front go first, then all others.
        for name in sorted((name for name in names if name != "__builtins__"), key=lambda name: not _is_private(name)):
            names[name] = None
    for found in gc.get_objects():
        if type(found) in _FILES:  # isinstance() asks objects that warn of it
            with contextlib.suppress(Exception):  # closed meanwhile, or nobody reads it any more
                found.flush()


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
