"""Races between streams: every wait that is missing, found in one run. ``torch.sim.races``.

    with torch.sim.races.check():
        train_step()

raises :class:`RaceError` at the end of the block if two accesses to the same memory met in it, at least one of them a
write, that no event, stream, synchronization or collective orders. Timing does not matter: one run shows what any
interleaving could do (Note [One run is enough] in csrc/races/checker.h). Values do not change, except that memory that
is fresh or has been freed holds NaN.

``TORCH_EXT_RACES`` checks a whole program: ``error`` prints the races at its end and makes its exit code 1, ``report``
prints them, ``off`` does nothing. Unset, programs are not checked, and the bodies of tests that run on our harness are,
as with ``error``. Known races of torch (known.json) fail no test; the summary names them.

``TORCH_EXT_SCHEDULE`` chooses one of the executions that the edges permit, ``late`` or ``random:7`` with a seed, so
that the wrong number of a race is seen: see :class:`Schedule`.
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
from torch_ext.sim.races._findings import Access, Frame, Race, merged, take
from torch_ext.sim.races._known import KnownRace, known_races
from torch_ext.sim.races._report import render
from torch_ext.sim.races._schedule import SCHEDULES, Schedule
from torch_ext.sim.races._schedule import asked as asked_schedule
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
    "blamed",
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

    def __init__(self, races: list[Race], replay: str = "") -> None:
        super().__init__("\n\n".join(filter(None, (render(races), replay))))
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


def start(schedule: Schedule | None = None) -> None:
    """Check from now on, in all threads of this process. What happened before is forgotten. Does nothing while a check
    runs.

    Args:
        schedule: when results are seen; by default as ``TORCH_EXT_SCHEDULE`` says.
    """
    (schedule or asked_schedule()).start()


def stop() -> list[Race]:
    """Check no longer, and return the races found since they were last asked for."""
    _native.stop_race_check()
    return take()


def found() -> list[Race]:
    """Return the races found since they were last asked for, and go on checking."""
    return take()


@contextlib.contextmanager
def check(mode: str = "error", schedule: Schedule | str | None = None) -> Iterator[None]:
    """Check the body of a ``with`` statement for races. Within a check that runs already, its body is part of that.

    Args:
        mode: ``error`` raises at the end of a body that did not raise itself; the error of one that did gets the races
            as a note, since they may be its cause. ``report`` prints to stderr. ``off`` checks nothing.
        schedule: a :class:`Schedule` or its name, such as ``late`` or ``random:7``; by default as
            ``TORCH_EXT_SCHEDULE`` says. Whatever fails on another than ``early`` says how to run it again.

    Raises:
        RaceError: there are races, and ``mode`` is ``error``.
        ValueError: ``mode`` is none of these.
    """
    if mode not in MODES:
        raise ValueError(f"Got mode {mode!r}, expected one of {', '.join(MODES)}.")
    if mode == "off" or _native.is_checking_races():
        yield
        return
    chosen = Schedule.parse(schedule) if isinstance(schedule, str) else schedule or asked_schedule()
    start(chosen)
    with _judged(mode, stop, chosen):
        yield


@contextlib.contextmanager
def _judged(mode: str, end: Callable[[], list[Race]], schedule: Schedule) -> Iterator[None]:
    """Do as ``mode`` says about the races of a body that is being checked; ``end`` ends that and returns them."""
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
    """Return the error of a body with these races, if there are any; where they fail nothing they are printed."""
    if not races:
        return None
    error = RaceError(races, replay)
    if mode == "error":
        return error
    _say(str(error))
    return None


def _add_notes(error: BaseException, races: list[Race], replay: str) -> None:
    for note in filter(None, (render(races) if races else "", replay)):
        if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):  # Python 3.11
            error.add_note(note)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Body:
    """The check of one test's body."""

    def __init__(self, mode: str, tell: Callable[[str], None]) -> None:
        self.mode = mode
        self.schedule = asked_schedule()
        self.tell = tell
        self.met: set[KnownRace] = set()
        self.was_blamed = False
        self._lock = threading.Lock()  # of the next line
        self._aside: list[Race] = []  # found before a body within this one began, or not this thread's

    def begin(self) -> None:
        if _bodies:
            _bodies[-1].set_aside()
        _native.stop_race_check()
        found()  # what is nobody's
        self.schedule.start()
        _bodies.append(self)

    def end(self) -> list[Race]:
        """End the check, and return what :meth:`take` does."""
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

    def set_aside(self) -> None:
        with self._lock:
            self._aside += found()

    def take(self) -> list[Race]:
        """Return the races of this body since the last call, and announce each known one once instead. In a rank's
        thread these are the races whose later access the rank made.
        """
        rank = _native.rank_of_thread()
        with self._lock:
            races, self._aside = self._aside + found(), []
            if rank is not None:
                self._aside = [race for race in races if race.later.rank != rank]
                races = [race for race in races if race.later.rank == rank]
        left = []
        for race in merged(races):
            known = next((each for each in known_races() if each.describes(race)), None)
            if known is None:
                left.append(race)
            elif known not in self.met:
                self.met.add(known)
                self.tell(f"known race of torch {torch.__version__}: {known.told} ({known.link})")
        return left


_bodies: list[_Body] = []  # that are being checked, each within the one before


@contextlib.contextmanager
def check_body(test: str = "", tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Check the body of a test as ``TORCH_EXT_RACES`` asks, by default as with ``error``, whatever check of the whole
    process runs. Known races of torch are announced and fail nothing. One body may be within another, as an
    example is within its test: a race counts for the innermost one that holds its later access. Each starts anew, so an
    example does not depend on earlier ones.

    Args:
        test: the test, as unittest names it, if it is to say which known races it should have met and has not. A body
            within another one says nothing of that.
        tell: is called with what the user should know, in one sentence each time; by default it is printed.

    Raises:
        RaceError: as :func:`check`.
    """
    asked = mode(unset="error")
    if asked == "off":
        if not _bodies:
            stop()
        yield
        return
    body = _Body(asked, tell or _say)
    body.begin()
    with _judged(asked, body.end, body.schedule):
        yield
    for known in () if _bodies else known_races():
        if not body.was_blamed and known not in body.met and known.is_met_by(test):
            body.tell(
                f"a known race is no longer met by {test}: {known.told}. If torch has mended it, take its entry away"
            )


class ThreadsCheck:
    """The check of a test whose ranks are threads of this process, as ``TORCH_EXT_RACES`` asks. Each rank is charged
    with the races whose later access is its own. See :mod:`torch_ext.sim.races._threads` for what orders two ranks.
    """

    _current: ThreadsCheck | None = None

    def __init__(self, tell: Callable[[str], None], around_collectives: AroundCollectives) -> None:
        """Begin. Call it before the threads start; a check that nobody has ended ends now.

        Args:
            tell: as for :func:`check_body`.
            around_collectives: how to be around the collectives of the ranks' group.
        """
        if ThreadsCheck._current is not None:
            ThreadsCheck._current.end()
        ThreadsCheck._current = self
        asked = mode(unset="error")
        self._body = _Body(asked, tell) if asked != "off" else None
        self._unwatch = watch_handovers(around_collectives) if self._body else None
        if self._body:
            self._body.begin()

    def rank(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Run all of a rank within this context, in its thread."""
        return as_rank(rank)

    def raise_races(self) -> None:
        """Call it in a rank's thread, at the end of its body.

        Raises:
            RaceError: the rank has races, and ``TORCH_EXT_RACES`` is ``error``.
        """
        error = self._body.judge(self._body.take()) if self._body else None
        if error is not None:
            raise error

    def end(self) -> RaceError | None:
        """End the check when the threads have ended, and return an error with the races that no rank was charged with,
        if there are any.
        """
        if ThreadsCheck._current is self:
            ThreadsCheck._current = None
        if self._body is None or self._unwatch is None:
            return None
        body, self._body = self._body, None
        self._unwatch()
        return body.judge(body.end())


def blamed(error: BaseException, *, is_skip: bool = False) -> BaseException:
    """Return what the body that is being checked, and that ``error`` has ended, is to be reported with.

    That is the error. What the check has found so far becomes a note of it, since it may be the cause; so does the way
    to replay the schedule. But races do not hide behind a skip: they fail the body as :class:`RaceError`.
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
    asked = mode()
    if asked != "off":
        start()
        atexit.register(_end_program, asked)


def _report_saved_storages() -> None:
    """Report to every check, from now on, the host's storages that are written to files.

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


def _end_program(asked: str) -> None:
    replay = asked_schedule().replay()
    races = stop()
    if races:
        print(RaceError(races, replay), file=sys.stderr, flush=True)
        if asked == "error":
            sys.stdout.flush()
            os._exit(1)  # an exit function has no other way to change the exit code
