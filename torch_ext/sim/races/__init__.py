"""Races between streams: every wait that is missing, found in one run. ``torch.sim.races``.

    with torch.sim.races.check():
        train_step()

raises :class:`RaceError` at the end of the block if two accesses to the same memory met in it, at least one of them a
write, that no event, stream, synchronization or collective orders. Timing does not matter: one run shows what any
interleaving could do (Note [One run is enough] in csrc/races/checker.h). Values do not change, except that memory that
is fresh or has been freed holds NaN.

``TORCH_EXT_RACES`` checks a whole program: ``error`` prints the races at its end and makes its exit code 1, ``report``
prints them, ``off`` (the default) does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator

from torch_ext.sim import _native
from torch_ext.sim.races._findings import Access, Frame, Race, take
from torch_ext.sim.races._report import render

__all__ = [
    "MODES",
    "VARIABLE",
    "Access",
    "Frame",
    "Race",
    "RaceError",
    "check",
    "check_body",
    "found",
    "mode",
    "render",
    "start",
    "stop",
]

VARIABLE = "TORCH_EXT_RACES"
MODES = ("error", "report", "off")


class RaceError(RuntimeError):
    """Accesses that nothing orders. The message tells of each; ``races`` has them as data."""

    def __init__(self, races: list[Race]) -> None:
        super().__init__(render(races))
        self.races = races


def mode() -> str:
    """Return what ``TORCH_EXT_RACES`` asks for: ``error``, ``report`` or ``off``.

    Raises:
        ValueError: it asks for something else.
    """
    asked = os.environ.get(VARIABLE) or "off"
    if asked not in MODES:
        raise ValueError(f"{VARIABLE}={asked}: expected one of {', '.join(MODES)}.")
    return asked


def start() -> None:
    """Check from now on, in all threads of this process. What happened before is forgotten. Does nothing while a check
    runs.
    """
    _native.start_race_check()


def stop() -> list[Race]:
    """Check no longer, and return the races found since they were last asked for."""
    _native.stop_race_check()
    return take()


def found() -> list[Race]:
    """Return the races found since they were last asked for, and go on checking."""
    return take()


@contextlib.contextmanager
def check(mode: str = "error") -> Iterator[None]:
    """Check the body of a ``with`` statement for races. Within a check that runs already, its body is part of that.

    Args:
        mode: ``error`` raises at the end of a body that did not raise itself; the error of one that did gets the races
            as a note, since they may be its cause. ``report`` prints to stderr. ``off`` checks nothing.

    Raises:
        RaceError: there are races, and ``mode`` is ``error``.
        ValueError: ``mode`` is none of these.
    """
    if mode not in MODES:
        raise ValueError(f"Got mode {mode!r}, expected one of {', '.join(MODES)}.")
    if mode == "off" or _native.is_checking_races():
        yield
        return
    start()
    try:
        yield
    except BaseException as error:
        races = stop()
        if races:
            error.add_note(render(races))
        raise
    races = stop()
    if races and mode == "error":
        raise RaceError(races)
    if races:
        print(render(races), file=sys.stderr, flush=True)


@contextlib.contextmanager
def check_body() -> Iterator[None]:
    """Check the body of a test as ``TORCH_EXT_RACES`` asks, whatever check of the whole process runs.

    Raises:
        RaceError: as :func:`check`.
    """
    stop()
    with check(mode()):
        yield


def check_program() -> None:
    """Check this process until it ends if ``TORCH_EXT_RACES`` asks for it. Called once, on registration."""
    asked = mode()
    if asked != "off":
        start()
        atexit.register(_end_program, asked)


def _end_program(asked: str) -> None:
    races = stop()
    if races:
        print(render(races), file=sys.stderr, flush=True)
        if asked == "error":
            sys.stdout.flush()
            os._exit(1)  # an exit function has no other way to change the exit code
