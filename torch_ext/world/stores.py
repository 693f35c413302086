"""Makes the waits of a store tell which store it is. Runs in ranks; touches torch only if it is loaded.

A process that hangs in a method of a store is in C++, and the Python frame above says what was called, but not on what:
``group.store().wait(...)`` has a receiver without a name. So the methods that wait are called through a frame that
holds the store, the arguments and the time; see ``operations.py``.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

__all__ = ["limit_of", "watch_waits"]

_METHODS = ("barrier", "get", "multi_get", "queue_pop", "wait")


def watch_waits() -> None:
    """Have the waiting methods of torch's stores tell of themselves in this process. Idempotent."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return
    store = torch.distributed.Store
    for name in _METHODS:
        method = getattr(store, name, None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(store, name, _watched(method))


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait_in_store(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = time.monotonic()  # noqa: F841  # limit_of() reads it
        return method(self, *args, **kwargs)

    return wait_in_store


def limit_of(frame: FrameType) -> float | None:
    """Return before when the call that ``frame`` is in does not end by itself, by ``time.monotonic``.

    None if ``frame`` is not that of a store's method.
    """
    if frame.f_code.co_filename != __file__ or frame.f_code.co_name != "wait_in_store":
        return None
    found = frame.f_locals
    if "began_s" not in found:
        return 0.0
    given = [*found["args"], *found["kwargs"].values()]
    if any(value is False for value in given):  # queue_pop() that is not to wait
        return 0.0
    limits = [value for value in given if isinstance(value, timedelta)] or [found["self"].timeout]
    seconds = limits[0].total_seconds()
    return float(found["began_s"]) + seconds if seconds > 0 else math.inf
