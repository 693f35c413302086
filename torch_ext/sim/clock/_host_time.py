"""The host's clocks of code that runs in virtual time.

``time.perf_counter``, ``monotonic`` and ``process_time``, and their ``_ns``, read the host's virtual time, so a
program that times its own steps gets the model's numbers. ``time.time``, ``time.sleep`` and the limits of waits keep
the machine's time: a deadline must end a hang. Code that took a function out of ``time`` before, as Python's own
``threading`` and torch_ext's deadlines do, keeps it too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_NAMES = ("perf_counter", "monotonic", "process_time")
_NANOSECONDS_PER_SECOND = 1e9


@contextlib.contextmanager
def replaced(now_ns: Callable[[], int]) -> Iterator[None]:
    """Make the host's clocks read ``now_ns`` in the body of a ``with`` statement, in all threads."""

    def seconds() -> float:
        return now_ns() / _NANOSECONDS_PER_SECOND

    functions: dict[str, Any] = dict.fromkeys(_NAMES, seconds) | dict.fromkeys(map("{}_ns".format, _NAMES), now_ns)
    with mock.patch.multiple(time, **functions):
        yield
