"""What may set a key of a store, or send a signal, besides the ranks that are looked at. Imports the standard library
and its own layer only. Linux only: elsewhere there is nobody to be seen.

A rank that waits for a key, or handles a signal, can be reached by whoever knows its address or its pid. Those are the
parent half, in whose other threads and handlers a test may have left something to do, its children, and children of
ranks. They may act at any time: nothing is ever proven about them.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Collection

from torch_ext.world import _os
from torch_ext.world.leftovers import ends_by_itself

__all__ = ["handles_signals", "has_alarm", "may_act"]


def may_act(ranks: Collection[int]) -> bool:
    """Whether anything may act while this process waits for ``ranks`` (pids): a thread, an alarm or a child of this
    process, or a child of a rank.
    """
    return threading.active_count() > 1 or has_alarm() or _have_children(ranks)


def _have_children(ranks: Collection[int]) -> bool:
    ours = set(_os.own_children())
    ours.difference_update(*map(_ancestors, ranks))  # zygotes
    found = [*ours, *(child for rank in ranks for child in _os.children_of(rank))]
    return any(not ends_by_itself(_os.command_line(child)) for child in found)


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            pid = int(_os.stat_of(pid)[1])
        except OSError:
            break
    return found


def has_alarm() -> bool:
    """Whether a signal will come to this process because it has set an alarm."""
    try:
        with open("/proc/self/timers") as stream:
            sends = {int(number) for number in re.findall(r"^signal: (\d+)/", stream.read(), re.MULTILINE)}
    except OSError:  # the kernel has no such timers, or does not show them
        sends = set()
    # The one that is made in each rank sends SIGABRT: see Note [Last words].
    return bool(sends - {signal.SIGABRT}) or signal.getitimer(signal.ITIMER_REAL)[0] > 0


def handles_signals() -> bool:
    """Whether a handler in Python runs when some signal comes to this process."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(callable(handler) and handler is not signal.default_int_handler for handler in handlers)
