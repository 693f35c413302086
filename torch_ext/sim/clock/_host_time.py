"""The host's clocks of code that runs in virtual time.

``time.perf_counter``, ``monotonic`` and ``process_time``, and their ``_ns``, read the host's virtual time, so a
program that times its own steps gets the model's numbers. ``time.sleep`` of the main thread sleeps, and moves that
time too, so a loop that waits for a clock ends. ``time.time`` and the limits of waits keep the machine's time: a
deadline must end a hang. Code that took a function out of ``time`` before, as Python's own ``threading`` and
torch_ext's deadlines do, keeps it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_NAMES = ("perf_counter", "monotonic", "process_time")
_NANOSECONDS_PER_SECOND = 1e9


@contextlib.contextmanager
def replaced(now_ns: Callable[[], int], host_sleeps: Callable[[int], None]) -> Iterator[None]:
    """Make the host's clocks read ``now_ns`` in the body of a ``with`` statement, in all threads.

    ``host_sleeps`` gets the nanoseconds of each ``time.sleep``.
    """

    def seconds() -> float:
        return now_ns() / _NANOSECONDS_PER_SECOND

    really_sleep = time.sleep

    def sleep(seconds: float) -> None:
        really_sleep(seconds)
        if threading.current_thread() is threading.main_thread():  # others run beside it
            host_sleeps(round(seconds * _NANOSECONDS_PER_SECOND))

    functions: dict[str, Any] = dict.fromkeys(_NAMES, seconds) | dict.fromkeys(map("{}_ns".format, _NAMES), now_ns)
    with mock.patch.multiple(time, sleep=sleep, **functions):
        yield
