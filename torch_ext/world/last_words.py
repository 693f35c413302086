"""What a rank says when C++ aborts it. Runs in the rank; Linux; standard library only.

Note [Last words]
~~~~~~~~~~~~~~~~~
An exception that nobody catches in a thread of gloo's ends the process by ``abort()``, and Python's handlers of signals
never get to run. What a rank has called last would be lost, though it tells the cause. So a C function stands in for
the handler of SIGABRT that enters the interpreter, sends the record, and leaves the rest to faulthandler. The
interpreter is there to be entered: gloo's threads do not hold its lock, and whoever does will let go of it soon. An
abort may also come from where nothing can be done any more, such as the memory allocator. Then a timer, made in good
time, sends the signal to another thread, and faulthandler's handler ends the process all the same. Once a first word is
out, the allocator works, and what is slow is the machine: the rest gets more time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Sequence

__all__ = ["say_before_abort"]

# Seconds for the first word, and for those that follow it.
_FIRST_S, _REST_S = 2, 20

_CLOCK_MONOTONIC = 1


class _Event(ctypes.Structure):
    """``struct sigevent``, whose size is 64 bytes, to send a signal to the process."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _Speaker:
    """What :func:`say_before_abort` has been told, for the one process that was told it."""

    def __init__(self, words: Sequence[Callable[[], None]], timer: ctypes.c_void_p) -> None:
        self.words = words
        self.timer = timer
        self.pid = os.getpid()
        self.before: int | None = None


_speaker: _Speaker | None = None

# Made when this module is imported, which is in a zygote, since each rank would take a millisecond over it.
_libc = ctypes.CDLL(None)
# Nothing can be allocated where the allocator aborts.
_spans = [(ctypes.c_long * 4)(0, 0, limit_s, 0) for limit_s in (_FIRST_S, _REST_S)]
_libc.signal.restype, _libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
_has_timers = hasattr(_libc, "timer_create")


def _speak_and_abort(number: int) -> None:
    speaker = _speaker
    if speaker is not None:
        _libc.timer_settime(speaker.timer, 0, _spans[0], None)
        _libc.signal(number, speaker.before)
        if os.getpid() == speaker.pid:
            for word in speaker.words:
                with contextlib.suppress(Exception):  # such as nobody who listens any more
                    word()
                _libc.timer_settime(speaker.timer, 0, _spans[1], None)
    getattr(_libc, "raise")(number)  # held back until this handler returns


_on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(_speak_and_abort)


def say_before_abort(*words: Callable[[], None]) -> None:
    """Have ``words`` called in turn, on whatever thread it happens, before this process ends by ``abort()``.

    Call it after faulthandler has been enabled, whose handler follows. Children that this process forks are silent.
    """
    global _speaker
    timer = ctypes.c_void_p()
    event = _Event(None, signal.SIGABRT, 0, b"")
    if not _has_timers or _libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        return
    _speaker = _Speaker(words, timer)
    _speaker.before = _libc.signal(signal.SIGABRT, ctypes.cast(_on_abort, ctypes.c_void_p))
