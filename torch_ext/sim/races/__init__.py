"""Races between streams: every wait that is missing, found in one run. ``torch.sim.races``.

    with torch.sim.races.check():
        train_step()

raises :class:`RaceError` at the end of the block if two accesses to the same memory met in it, at least one of them a
write, that no event, stream, synchronization or collective orders. Timing does not matter: one run shows what any
interleaving could do (Note [One run is enough] in csrc/races/checker.h). Values do not change, except that memory that
is fresh or has been freed holds NaN.

``TORCH_EXT_RACES`` checks a whole program: ``error`` prints the races at its end and makes its exit code 1, ``report``
prints them, ``off`` does nothing. Unset, programs are not checked, and the bodies of tests that run on our harness are,
as with ``error``. What torch is known to get wrong (known.json) fails no test; the user is told.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch

from torch_ext.sim import _native
from torch_ext.sim.races._findings import Access, Frame, Race, take
from torch_ext.sim.races._known import KnownRace, known_races
from torch_ext.sim.races._report import render

__all__ = [
    "MODES",
    "VARIABLE",
    "Access",
    "Frame",
    "KnownRace",
    "Race",
    "RaceError",
    "check",
    "check_body",
    "found",
    "known_races",
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


def mode(unset: str = "off") -> str:
    """Return what ``TORCH_EXT_RACES`` asks for: ``error``, ``report`` or ``off``; ``unset`` if it asks for nothing.

    Raises:
        ValueError: it asks for something else.
    """
    asked = os.environ.get(VARIABLE) or unset
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
    with _judged(mode, lambda races: races):
        yield


@contextlib.contextmanager
def _judged(mode: str, judge: Callable[[list[Race]], list[Race]]) -> Iterator[None]:
    """Check a body, and do as ``mode`` says about those of the races found that ``judge`` returns."""
    start()
    try:
        yield
    except BaseException as error:
        races = judge(stop())
        if races and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(render(races))
        raise
    races = judge(stop())
    if races and mode == "error":
        raise RaceError(races)
    if races:
        print(render(races), file=sys.stderr, flush=True)


@contextlib.contextmanager
def check_body(test: str = "", tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Check the body of a test as ``TORCH_EXT_RACES`` asks, by default as with ``error``, whatever check of the whole
    process runs. Races that torch is known to have are told and fail nothing.

    Args:
        test: the test, as unittest names it, if it is to say which known races it should have met and has not.
        tell: is called with what the user should know, in one sentence each time; by default it is printed.

    Raises:
        RaceError: as :func:`check`.
    """
    stop()
    asked = mode(unset="error")
    if asked == "off":
        yield
        return
    met: set[KnownRace] = set()
    say = tell or (lambda text: print(text, file=sys.stderr, flush=True))

    def unknown(races: list[Race]) -> list[Race]:
        left = []
        for race in races:
            known = next((each for each in known_races() if each.describes(race)), None)
            if known is None:
                left.append(race)
            elif known not in met:
                met.add(known)
                say(f"known race of torch {torch.__version__}: {known.told} ({known.link})")
        return left

    with _judged(asked, unknown):
        yield
    for known in known_races():
        if known not in met and known.is_met_by(test):
            say(f"a known race is no longer met by {test}: {known.told}. If torch has mended it, take its entry away")


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
