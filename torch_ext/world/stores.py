"""Makes the waits of a store tell which store it is. Runs in ranks; touches torch only if it is loaded.

A process that hangs in a method of a store is in C++, and the Python frame above says what was called, but not on what:
``group.store().wait(...)`` has a receiver without a name. So the methods that wait are called through a frame that
holds the store, the arguments and the time; see ``operations.py``. One that is made waits too: a server for its
clients.
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

__all__ = ["limit_of", "watch_waits", "words_for"]

_METHODS = ("barrier", "get", "multi_get", "queue_pop", "wait")
# The arguments of torch's TCPStore, and its time limit if it is given none, in seconds.
_OF_SERVER = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers")
_DEFAULT_S = 300.0


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
    server: Any = torch.distributed.TCPStore
    if not hasattr(server.__init__, "__wrapped__"):
        server.__init__ = _watched_server(server.__init__)


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait_in_store(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = time.monotonic()  # noqa: F841  # limit_of() reads it
        return method(self, *args, **kwargs)

    return wait_in_store


def _watched_server(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_store(self: Any, *args: Any, **kwargs: Any) -> None:
        began_s = time.monotonic()  # noqa: F841  # limit_of() reads it
        make(self, *args, **kwargs)

    return make_store


def words_for(frame: FrameType) -> str:
    """Return in words which call ``frame`` is in, one of those that :func:`limit_of` knows."""
    return "TCPStore()" if frame.f_code.co_name == "make_store" else f"{frame.f_locals['method'].__name__}() of a store"


def limit_of(frame: FrameType) -> float | None:
    """Return before when the call that ``frame`` is in does not end by itself, by ``time.monotonic``.

    None if ``frame`` is not that of a store's method, or of the making of one that serves.
    """
    if frame.f_code.co_filename != __file__ or frame.f_code.co_name not in ("wait_in_store", "make_store"):
        return None
    found = frame.f_locals
    if "began_s" not in found:
        return 0.0
    if frame.f_code.co_name == "make_store":
        given = {**dict(zip(_OF_SERVER, found["args"], strict=False)), **found["kwargs"]}
        # A client sleeps between two tries to connect, ever longer: it may go on by itself.
        waits = given.get("is_master", False) and given.get("wait_for_workers", True)
        return float(found["began_s"]) + _seconds(given.get("timeout")) if waits else 0.0
    values = [*found["args"], *found["kwargs"].values()]
    if any(value is False for value in values):  # queue_pop() that is not to wait
        return 0.0
    limits = [value for value in values if isinstance(value, timedelta)] or [found["self"].timeout]
    return float(found["began_s"]) + _seconds(limits[0])


def _seconds(limit: Any) -> float:
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else _DEFAULT_S
    return seconds if seconds > 0 else math.inf
