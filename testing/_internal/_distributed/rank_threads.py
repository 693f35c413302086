"""Ranks that are threads: how they run, hand in receipts, and are waited for."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch_ext import accelerator
from torch_ext.compat.testing import prepare_for_threads
from torch_ext.testing._internal._distributed import receipts
from torch_ext.testing._internal._distributed.races import race_check_of_threads
from torch_ext.world import operations, settings, stall
from torch_ext.world import rank as world_rank
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.protocol import Progress, Receipt, Said, Wait
from torch_ext.world.settling import UnfinishedWorkError

__unittest = True

__all__ = ["RankThread", "hand_in", "start", "wait"]

_STARTER = "_torch_ext_rank"
_Hook = Callable[[Any], object]

_ENDING_OF = {Said.PASSED: Ending.PASSED, Said.FAILED: Ending.FAILED, Said.SKIPPED: Ending.SKIPPED}


class _Escapes:
    """What escapes from threads that ranks have started, and from theirs, from now until :meth:`end`.

    A hook that the test itself puts in place of this one answers for them.
    """

    def __init__(self) -> None:
        self._errors: list[tuple[int | None, UnfinishedWorkError]] = []
        self._hook: _Hook = threading.excepthook
        self._start = threading.Thread.start
        threading.excepthook = self._note
        setattr(threading.Thread, "start", self._noting(self._start))  # noqa: B010 - a method, put back by end()

    @staticmethod
    def _noting(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        @functools.wraps(start)
        def starts(thread: threading.Thread) -> None:
            above = threading.current_thread()
            setattr(thread, _STARTER, above.rank if isinstance(above, RankThread) else getattr(above, _STARTER, None))
            start(thread)

        return starts

    def _note(self, raised: Any) -> None:
        if raised.exc_value is not None and not isinstance(raised.exc_value, SystemExit):
            error = raised.exc_value
            name = raised.thread.name if raised.thread is not None else "?"
            said = UnfinishedWorkError(f"thread {name!r} ended with an exception: {type(error).__name__}: {error}")
            said.__cause__ = error
            self._errors.append((getattr(raised.thread, _STARTER, None), said))
        self._hook(raised)

    def end(self) -> list[tuple[int | None, UnfinishedWorkError]]:
        """Put back what was there; return what has escaped, with the rank that it is due to if one is known."""
        setattr(threading.Thread, "start", self._start)  # noqa: B010
        if threading.excepthook == self._note:
            threading.excepthook = self._hook
        return self._errors


class RankThread(threading.Thread):
    """One rank. Its receipt is on the thread itself, so that one from an earlier test can never be taken for it.

    A daemon, so that a rank that hangs does not keep the process alive.
    """

    def __init__(
        self, rank: int, target: Callable[[int], object], check: accelerator.RaceCheckOfThreads | None = None
    ) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank = rank
        self.receipt: Receipt | None = None
        self.check = check
        self.escapes: _Escapes | None = None
        self._run_as = target

    def run(self) -> None:
        with self.check.rank(self.rank) if self.check else nullcontext():
            try:
                self._run_as(self.rank)
            except BaseException as error:
                hand_in(error)


def hand_in(error: BaseException | None) -> None:
    """Hand in the receipt of the rank that this thread is, unless it has handed one in.

    Args:
        error: what its body raised; None if the body has run to its end, which nobody else can know.
    """
    thread = threading.current_thread()
    if isinstance(thread, RankThread) and thread.receipt is None:
        thread.receipt = _receipt(error or _races_of(thread))


def _races_of(thread: RankThread) -> BaseException | None:
    try:
        if thread.check:
            thread.check.raise_races()
    except Exception as races:
        return races
    return None


def _receipt(error: BaseException | None) -> Receipt:
    if error is None:
        return receipts.passed()
    # An exit with an unknown code fails like an exception, because there is no process to end. It may be the one by
    # which torch ends the ranks that wait for one that has failed.
    return receipts.receipt_of(error) or world_rank.failure(error)


def start(world_size: int, target: Callable[[int], object]) -> list[threading.Thread]:
    """Start a thread for each rank; each calls ``target`` with its rank."""
    prepare_for_threads()
    # A mesh takes a device for its thread only where the process has used none, which would depend on who came first.
    accelerator.initialize()
    check = race_check_of_threads()
    threads = [RankThread(rank, target, check) for rank in range(world_size)]
    operations.test_began()
    escapes = _Escapes()
    for thread in threads:
        thread.escapes = escapes
        thread.start()
    return list(threads)


def wait(threads: Sequence[threading.Thread], timeout_s: float) -> list[Outcome]:
    """Wait until all ranks have ended, hang provably (see Note [Provable hangs]) or are out of time.

    An exception that ended a thread fails the rank that started it. A race that no rank was charged with fails the
    first rank that has passed.
    """
    try:
        outcomes = _wait(threads, timeout_s)
    finally:
        escaped = [each for noted in _of(threads, "escapes") for each in noted.end()]
    for rank, error in escaped:
        _charge(outcomes, error, rank)
    for races in filter(None, (check.end() for check in _of(threads, "check"))):
        _charge(outcomes, races)
    return outcomes


def _of(threads: Sequence[threading.Thread], name: str) -> set[Any]:
    return {found for thread in threads if (found := getattr(thread, name, None)) is not None}


def _charge(outcomes: Sequence[Outcome], error: BaseException, rank: int | None = None) -> None:
    """Fail ``rank`` because of ``error``, or the first that is well if none is known, unless it has failed anyway."""
    for outcome in outcomes:
        if outcome.ending in (Ending.PASSED, Ending.SKIPPED) and rank in (None, outcome.rank):
            outcome.ending, outcome.receipt = Ending.FAILED, world_rank.failure(error)
            break


def _wait(threads: Sequence[threading.Thread], timeout_s: float) -> list[Outcome]:
    deadline_s = time.monotonic() + timeout_s
    look_every_s = settings.hang_after_s() / 4 or float("inf")
    next_look_s, before = time.monotonic() + look_every_s, None
    while (alive := [thread for thread in threads if thread.is_alive()]) and time.monotonic() < deadline_s:
        alive[0].join(max(0.0, min(deadline_s, next_look_s) - time.monotonic()))
        if time.monotonic() >= next_look_s:
            progress = stall.observe()
            if _is_hung(before, progress, deadline_s):
                return [_outcome(thread, Ending.HUNG) for thread in threads]
            before, next_look_s = progress, time.monotonic() + look_every_s
    return [_outcome(thread, Ending.TIMED_OUT) for thread in threads]


def _is_hung(before: Progress | None, now: Progress, deadline_s: float) -> bool:
    if before is None or not (before.blocked and now.blocked) or not {os.getpid()}.issuperset(now.enders):
        return False
    return before.fingerprint == now.fingerprint and now.until_s >= deadline_s


def _outcome(thread: threading.Thread, while_alive: Ending) -> Outcome:
    rank, receipt = int(thread.name.rpartition(" ")[2]), getattr(thread, "receipt", None)
    if thread.is_alive():
        return Outcome(rank, while_alive, stacks=_stacks_of(thread), waits=_waits_of(thread))
    if receipt is None:
        return Outcome(rank, Ending.SILENT)
    return Outcome(rank, _ENDING_OF[receipt.said], time_s=receipt.time_s, receipt=receipt)


def _waits_of(thread: threading.Thread) -> tuple[Wait, ...]:
    frame = sys._current_frames().get(thread.ident or -1)
    return (operations.operation_of(frame).wait,) if frame is not None else ()


def _stacks_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or -1)
    if frame is None:
        return ""
    shown = traceback.StackSummary.extract(traceback.walk_stack(frame))
    shown.reverse()
    own = [number for number, each in enumerate(shown) if "/_internal/_distributed/" in each.filename]
    return "".join(traceback.StackSummary.from_list(shown[own[-1] + 1 :] if own else shown).format())
