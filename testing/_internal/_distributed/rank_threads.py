"""Ranks that are threads: how they run, hand in receipts, and are waited for."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import process_time  # bound now, because a body may replace the clock

from torch_ext import accelerator
from torch_ext.compat.testing import ThreadedWorld, prepare_for_threads
from torch_ext.testing._internal._distributed import receipts
from torch_ext.world import _os, follow, operations, provider, settings, verdict, wording
from torch_ext.world import rank as world_rank
from torch_ext.world._os import monotonic
from torch_ext.world.exits import ThreadErrors, UnfinishedWorkError
from torch_ext.world.frames import frames_of_threads, stack_of
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.protocol import Receipt, Wait
from torch_ext.world.settings import Limits
from torch_ext.world.threads import observe
from torch_ext.world.watch import PARENT_HALF, Finding, HangWatch, Measures, silence_text

__unittest = True

_STARTER = "_torch_ext_rank"

_current: _Shared | None = None


class _Escapes:
    """Collects exceptions that escape from threads started by ranks, directly or indirectly, until :meth:`end`."""

    def __init__(self) -> None:
        self._errors: list[tuple[int | None, UnfinishedWorkError]] = []
        self._threads = ThreadErrors(self._record)
        self._start = threading.Thread.start
        setattr(threading.Thread, "start", self._record_starter(self._start))  # noqa: B010 - a method, put back by end()

    @staticmethod
    def _record_starter(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        @functools.wraps(start)
        def start_thread(thread: threading.Thread) -> None:
            parent = threading.current_thread()
            setattr(thread, _STARTER, parent if isinstance(parent, RankThread) else getattr(parent, _STARTER, None))
            start(thread)

        return start_thread

    def _record(self, thread: threading.Thread | None, text: str, error: BaseException) -> None:
        starter: RankThread | None = getattr(thread, _STARTER, None)
        if starter is not None and starter.shared.escapes is not self:
            return  # started by an earlier test
        escape = UnfinishedWorkError(f"{text}: {type(error).__name__}: {error}")
        escape.__cause__ = error
        self._errors.append((starter.rank if starter is not None else None, escape))

    def end(self) -> list[tuple[int | None, UnfinishedWorkError]]:
        """Restore the hooks; return the escaped exceptions, each with the rank to charge if known."""
        setattr(threading.Thread, "start", self._start)  # noqa: B010
        self._threads.end()
        return self._errors


@dataclass(eq=False)
class _Shared:
    """What the ranks of one test share."""

    world: ThreadedWorld
    check: accelerator.RaceCheckOfThreads | None
    escapes: _Escapes


class RankThread(threading.Thread):
    """One rank, which holds its receipt. A daemon: one that hangs does not keep the process alive."""

    def __init__(self, rank: int, target: Callable[[int], object], shared: _Shared) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank = rank
        self.shared = shared
        self.receipt: Receipt | None = None
        self._run_as = target
        self._recursion_limit = sys.getrecursionlimit()

    def run(self) -> None:
        check = self.shared.check
        with check.rank(self.rank) if check else nullcontext():
            try:
                self._run_as(self.rank)
            except BaseException as error:
                hand_in(error)
            finally:
                # All threads share the limit, also of later tests.
                sys.setrecursionlimit(max(sys.getrecursionlimit(), self._recursion_limit))


def hand_in(error: BaseException | None) -> None:
    """Hand in the receipt of this thread's rank, unless it has one. ``error`` is None if the body ran to its end."""
    thread = threading.current_thread()
    if not isinstance(thread, RankThread) or thread.receipt is not None:
        return
    try:
        if error is None and thread.shared.check:
            thread.shared.check.raise_races()
    except Exception as races:
        error = races
    # An exit with an unknown code, such as torch's for ranks that wait for a failed one, fails like an exception.
    receipt = receipts.receipt_of(error) or receipts.failure_of(error) if error is not None else receipts.passed()
    thread.receipt = replace(receipt, time_s=monotonic())


def world_of(thread: threading.Thread) -> ThreadedWorld | None:
    """Return the world of a rank, or of a thread that a rank has started; None if it is neither."""
    rank = thread if isinstance(thread, RankThread) else getattr(thread, _STARTER, None)
    return rank.shared.world if isinstance(rank, RankThread) else None


def end_world() -> None:
    """Wake the peers of this thread's rank, which has failed."""
    world = world_of(threading.current_thread())
    if world is not None:
        world.end()


def is_of_this_test() -> bool:
    """Whether this thread is a rank of the running test, not one left behind by an earlier test."""
    return _current is not None and world_of(threading.current_thread()) is _current.world


def start(world_size: int, target: Callable[[int], object]) -> list[RankThread]:
    """Start a thread for each rank; each calls ``target`` with its rank."""
    prepare_for_threads()
    # A mesh sets its thread's device only if the process has used no device yet, which would depend on thread order.
    accelerator.initialize()
    check = receipts.race_check_of_threads()
    operations.test_began()
    global _current
    _current = shared = _Shared(ThreadedWorld(wording.place_here), check, _Escapes())
    threads = [RankThread(rank, target, shared) for rank in range(world_size)]
    verdict.record_started(threads[0] if threads else None, len(threads))
    for thread in threads:
        thread.start()
    return threads


def wait(threads: Sequence[RankThread], timeout_s: float) -> list[Outcome]:
    """Wait until all ranks have ended, hang provably (see Note [Provable hangs]) or are out of time.

    An exception that ended a thread fails the rank that started it; a race without a rank the first that passed.
    """
    verdict.record_judged(threads[0] if threads else None)
    tests = {thread.shared for thread in threads}
    try:
        outcomes = _wait(threads, timeout_s)
    finally:
        for test in tests:
            test.world.end()  # ranks that have not ended join no further collectives
        escaped = [each for test in tests for each in test.escapes.end()]
    for rank, error in escaped:
        _blame(outcomes, error, rank)
    for test in tests:
        if test.check and (races := test.check.end()):
            _blame(outcomes, races)
    return outcomes


def _blame(outcomes: Sequence[Outcome], error: BaseException, rank: int | None = None) -> None:
    """Fail ``rank`` because of ``error``; with None, the first rank that passed or failed as expected."""
    for outcome in outcomes:
        is_ok = outcome.ok or (outcome.receipt is not None and outcome.receipt.is_expected)
        if is_ok and rank in (None, outcome.rank):
            outcome.ending, outcome.receipt = Ending.FAILED, world_rank.failure(error)
            break


def _wait(threads: Sequence[RankThread], timeout_s: float) -> list[Outcome]:
    began_s = monotonic()
    deadline_s = began_s + timeout_s
    measures = Measures(cpu_time_s=lambda rank: process_time(), others=_other_actors)
    watch = HangWatch(Limits(timeout_s, hang_s=settings.hang_after_s()), began_s, measures)
    while (alive := [thread for thread in threads if thread.is_alive()]) and monotonic() < deadline_s:
        alive[0].join(max(0.0, min(deadline_s, watch.next_s) - monotonic()))
        if monotonic() < watch.next_s:
            continue
        watch.look((), monotonic())
        watch.observed(PARENT_HALF, observe())
        found = watch.judge(monotonic())
        if found is Finding.HUNG:
            return [_outcome(thread, Ending.HUNG) for thread in threads]
        if found is Finding.SILENT:
            wording.show(silence_text(watch.reasons, {thread.rank: _stacks_of(thread) for thread in alive}))
    return [_outcome(thread, Ending.TIMED_OUT) for thread in threads]


def _other_actors() -> tuple[str, ...]:
    """See Note [Who else may act]. The ranks are threads of this process."""
    zygote = provider.zygote_of_this_process()
    own = _os.other_children((), zygotes=provider.zygotes())
    return (*own, *follow.query_zygote(zygote, ())) if zygote is not None else own


def _outcome(thread: RankThread, while_alive: Ending) -> Outcome:
    rank, receipt = thread.rank, thread.receipt
    world = world_of(thread)
    called = world.record(rank) if world is not None else ""
    if thread.is_alive():
        return Outcome(rank, while_alive, stacks=_stacks_of(thread), waits=_waits_of(thread), collectives=called)
    if receipt is None:
        return Outcome(rank, Ending.SILENT)
    return Outcome(rank, Ending[receipt.status.name], time_s=receipt.time_s, receipt=receipt, collectives=called)


def _waits_of(thread: threading.Thread) -> tuple[Wait, ...]:
    frame = frames_of_threads().get(thread.ident or -1)
    return (operations.operation_of(frame).wait,) if frame is not None else ()


def _stacks_of(thread: threading.Thread) -> str:
    frame = frames_of_threads().get(thread.ident or -1)
    if frame is None:
        return ""
    shown = traceback.StackSummary.extract((each, each.f_lineno) for each in stack_of(frame))
    shown.reverse()
    own = [number for number, each in enumerate(shown) if "/_internal/_distributed/" in each.filename]
    return "".join(traceback.StackSummary.from_list(shown[own[-1] + 1 :] if own else shown).format())
