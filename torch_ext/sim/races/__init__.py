"""Finds races between streams: every missing wait, in one run. ``torch.sim.races``.

    with torch.sim.races.check():
        train_step()

raises :class:`RaceError` at the end of the block if no event, stream, synchronization or collective orders two accesses
to the same memory, at least one of them a write. Timing does not matter: one run finds the races of all interleavings
(Note [One run is enough] in csrc/races/checker.h). Values do not change, except that fresh and freed memory holds NaN.

``TORCH_EXT_RACES`` checks a whole program: ``error`` prints the races at its end and makes its exit code 1, ``report``
prints them, ``off`` does nothing. If it is unset, programs are not checked, and tests on our harness are, as with
``error``. Known races of torch (known.json) fail no test; the summary names them.

``TORCH_EXT_SCHEDULE`` chooses one of the executions that the edges permit, ``late`` or ``random:7`` with a seed, so
that a race produces its wrong numbers: see :class:`Schedule`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_ext.sim import _native
from torch_ext.sim._patches import wrap
from torch_ext.sim.races._findings import Access, Frame, Race, merged
from torch_ext.sim.races._findings import take as found
from torch_ext.sim.races._known import KnownRace, known_races
from torch_ext.sim.races._report import render
from torch_ext.sim.races._schedule import SCHEDULES, Schedule
from torch_ext.sim.races._schedule import requested as requested_schedule
from torch_ext.sim.races._threads import AroundCollectives, as_rank, watch_handovers

__all__ = [
    "MODES",
    "SCHEDULES",
    "VARIABLE",
    "Access",
    "Frame",
    "KnownRace",
    "Race",
    "RaceError",
    "Schedule",
    "ThreadsCheck",
    "attach_races",
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
    """Unordered accesses to the same memory. The message describes each; ``races`` holds them as data."""

    def __init__(self, races: list[Race], replay: str = "") -> None:
        super().__init__("\n\n".join(filter(None, (render(races), replay))))
        self.races = races


def mode(unset: str = "off") -> str:
    """Return the value of ``TORCH_EXT_RACES``: ``error``, ``report`` or ``off``; ``unset`` if it is unset or empty.

    Raises:
        ValueError: the variable has another value.
    """
    requested = os.environ.get(VARIABLE) or unset
    if requested not in MODES:
        raise ValueError(f"{VARIABLE}={requested}: expected one of {', '.join(MODES)}.")
    return requested


def start(schedule: Schedule | None = None) -> None:
    """Check from now on, in all threads of this process, and forget earlier accesses. Does nothing while a check runs.

    Args:
        schedule: when lanes see results; by default as ``TORCH_EXT_SCHEDULE`` says.
    """
    (schedule or requested_schedule()).start()


def stop() -> list[Race]:
    """Stop checking, and return the races found since the last call of this function or :func:`found`."""
    _native.stop_race_check()
    return found()


@contextlib.contextmanager
def check(mode: str = "error", schedule: Schedule | str | None = None) -> Iterator[None]:
    """Check the body of a ``with`` statement for races. Within a running check, the body belongs to that check.

    Args:
        mode: ``error`` raises at the end of the body; an error that the body raised gets the races as a note instead,
            since they may be its cause. ``report`` prints to stderr. ``off`` checks nothing.
        schedule: a :class:`Schedule` or its name, such as ``late`` or ``random:7``; by default as
            ``TORCH_EXT_SCHEDULE`` says. A failure on any but ``early`` shows how to replay it.

    Raises:
        RaceError: there are races, and ``mode`` is ``error``.
        ValueError: ``mode`` is none of these.
    """
    if mode not in MODES:
        raise ValueError(f"Got mode {mode!r}, expected one of {', '.join(MODES)}.")
    if mode == "off" or _native.is_checking_races():
        yield
        return
    chosen = Schedule.parse(schedule) if isinstance(schedule, str) else schedule or requested_schedule()
    start(chosen)
    with _raise_or_print(mode, stop, chosen):
        yield


@contextlib.contextmanager
def _raise_or_print(mode: str, end: Callable[[], list[Race]], schedule: Schedule) -> Iterator[None]:
    """Raise or print the races of a body as ``mode`` says; ``end`` ends the check and returns them."""
    try:
        yield
    except BaseException as error:
        replay = schedule.replay()
        _add_notes(error, end(), replay)
        raise
    replay = schedule.replay()
    if failed := _verdict(mode, end(), replay):
        raise failed


def _verdict(mode: str, races: list[Race], replay: str) -> RaceError | None:
    """Return an error with the races of a body, if any, or print them where ``mode`` is not ``error``."""
    if not races:
        return None
    error = RaceError(races, replay)
    if mode == "error":
        return error
    _print(str(error))
    return None


def _add_notes(error: BaseException, races: list[Race], replay: str) -> None:
    for note in filter(None, (render(races) if races else "", replay)):
        if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):  # Python 3.11
            error.add_note(note)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Body:
    """The check of one test's body."""

    def __init__(self, mode: str, announce: Callable[[str], None]) -> None:
        self.mode = mode
        self.schedule = requested_schedule()
        self.announce = announce
        self.met: set[KnownRace] = set()
        self.was_blamed = False
        self._lock = threading.Lock()  # guards the next line
        self._deferred: list[Race] = []  # races found before a nested body began, or of other ranks' threads

    def begin(self) -> None:
        if _bodies:
            _bodies[-1].defer()
        _native.stop_race_check()
        found()  # drops races that belong to no body
        self.schedule.start()
        _bodies.append(self)

    def end(self) -> list[Race]:
        """End the check, and return the races of :meth:`take`."""
        races = self.take()
        _bodies.remove(self)
        if _bodies:
            _bodies[-1].met |= self.met
        else:
            stop()
        return races

    def judge(self, races: list[Race]) -> RaceError | None:
        """Return the error of this body with these races, if they fail it."""
        return _verdict(self.mode, races, self.schedule.replay())

    def defer(self) -> None:
        with self._lock:
            self._deferred += found()

    def take(self) -> list[Race]:
        """Return the races of this body since the last call, except known ones, which are announced once. In a rank's
        thread, return only the races whose later access the rank made.
        """
        rank = _native.rank_of_thread()
        with self._lock:
            races, self._deferred = self._deferred + found(), []
            if rank is not None:
                self._deferred = [race for race in races if race.later.rank != rank]
                races = [race for race in races if race.later.rank == rank]
        unknown = []
        for race in merged(races):
            known = next((each for each in known_races() if each.describes(race)), None)
            if known is None:
                unknown.append(race)
            elif known not in self.met:
                self.met.add(known)
                self.announce(f"known race of torch {torch.__version__}: {known.summary} ({known.link})")
        return unknown


_bodies: list[_Body] = []  # bodies under check, each within the one before


@contextlib.contextmanager
def check_body(test: str = "", announce: Callable[[str], None] | None = None) -> Iterator[None]:
    """Check the body of a test as ``TORCH_EXT_RACES`` asks, by default as with ``error``. Ends a check of the whole
    process. Known races of torch are announced and fail nothing. One body may be within another, as an example is
    within its test: a race counts for the innermost body that holds its later access. Each body starts a new check, so
    an example does not depend on earlier ones.

    Args:
        test: the unittest name of the test, to report the known races that it should have met and has not. A body
            within another one reports none.
        announce: called with one sentence for the user at a time; prints by default.

    Raises:
        RaceError: as :func:`check`.
    """
    requested = mode(unset="error")
    if requested == "off":
        if not _bodies:
            stop()
        yield
        return
    body = _Body(requested, announce or _print)
    body.begin()
    with _raise_or_print(requested, body.end, body.schedule):
        yield
    for known in () if _bodies else known_races():
        if not body.was_blamed and known not in body.met and known.is_met_by(test):
            body.announce(
                f"{test} no longer meets a known race: {known.summary}. If torch has fixed it, remove its entry"
            )


class ThreadsCheck:
    """The check of a test whose ranks are threads of this process, as ``TORCH_EXT_RACES`` asks. Each rank is charged
    with the races whose later access is its own. See :mod:`torch_ext.sim.races._threads` for the edges between ranks.
    """

    _current: ThreadsCheck | None = None

    def __init__(self, announce: Callable[[str], None], around_collectives: AroundCollectives) -> None:
        """Begin, before the threads start; ends an earlier check that is still open.

        Args:
            announce: as for :func:`check_body`.
            around_collectives: enters a context around each rank's part of a collective.
        """
        if ThreadsCheck._current is not None:
            ThreadsCheck._current.end()
        ThreadsCheck._current = self
        requested = mode(unset="error")
        self._body = _Body(requested, announce) if requested != "off" else None
        self._unwatch = watch_handovers(around_collectives) if self._body else None
        if self._body:
            self._body.begin()

    def rank(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Run all of a rank within this context, in its thread."""
        return as_rank(rank)

    def raise_races(self) -> None:
        """Raise the races of the calling rank, at the end of its body.

        Raises:
            RaceError: the rank has races, and ``TORCH_EXT_RACES`` is ``error``.
        """
        error = self._body.judge(self._body.take()) if self._body else None
        if error is not None:
            raise error

    def end(self) -> RaceError | None:
        """End the check after the threads have ended; return an error with the races that no rank was charged with, if
        there are any.
        """
        if ThreadsCheck._current is self:
            ThreadsCheck._current = None
        if self._body is None or self._unwatch is None:
            return None
        body, self._body = self._body, None
        self._unwatch()
        return body.judge(body.end())


def attach_races(error: BaseException, *, is_skip: bool = False) -> BaseException:
    """Return the error to report for the innermost body under check, which ``error`` has ended.

    Usually ``error`` itself, with notes: the races found so far, which may be its cause, and how to replay the
    schedule. But races do not hide behind a skip: they fail the body as :class:`RaceError`.
    """
    if not _bodies:
        return error
    body = _bodies[-1]
    body.was_blamed = True
    races, replay = body.take(), body.schedule.replay()
    if not is_skip:
        _add_notes(error, races, replay)
    elif failed := _verdict(body.mode, races, replay):
        return failed
    return error


def check_program() -> None:
    """Check this process until it ends if ``TORCH_EXT_RACES`` asks for it. Called once, on registration."""
    _report_saved_storages()
    requested = mode()
    if requested != "off":
        start()
        atexit.register(_end_program, requested)


def _report_saved_storages() -> None:
    """Report host storages that are written to files as reads, to every check from now on.

    ``torch.save``, checkpoints and ``all_gather_object`` read all bytes of a tensor's storage past torch's dispatcher.
    """

    def write(original: Callable[..., Any], *args: Any) -> Any:
        storage = next((each for each in args if isinstance(each, torch.UntypedStorage)), None)
        if storage is not None and storage.device.type == "cpu" and _native.is_checking_races():
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            _native.use_tensors("save", [whole], False)
        return original(*args)

    wrap(torch.UntypedStorage, "_write_file")(write)
    wrap(torch._C.PyTorchFileWriter, "write_record")(write)


def _end_program(requested: str) -> None:
    replay = requested_schedule().replay()
    races = stop()
    if races:
        print(RaceError(races, replay), file=sys.stderr, flush=True)
        if requested == "error":
            sys.stdout.flush()
            os._exit(1)  # an exit function has no other way to change the exit code
