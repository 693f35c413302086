"""Ranks that are threads: how they run, hand in receipts, and are waited for."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from torch_ext import accelerator
from torch_ext.compat.testing import prepare_for_threads
from torch_ext.testing._internal._distributed import receipts
from torch_ext.testing._internal._distributed.races import race_check_of_threads
from torch_ext.world import operations, settings, stall
from torch_ext.world import rank as world_rank
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.protocol import Progress, Receipt, Said, Wait

__unittest = True

__all__ = ["RankThread", "hand_in", "start", "wait"]

_ENDING_OF = {Said.PASSED: Ending.PASSED, Said.FAILED: Ending.FAILED, Said.SKIPPED: Ending.SKIPPED}


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
    # An exit with an unknown code fails like an exception, because there is no process to end.
    unknown = Receipt(Said.FAILED, time.monotonic(), reason=f"SystemExit: {getattr(error, 'code', '')}")
    return receipts.receipt_of(error) or unknown


def start(world_size: int, target: Callable[[int], object]) -> list[threading.Thread]:
    """Start a thread for each rank; each calls ``target`` with its rank."""
    prepare_for_threads()
    # A mesh takes a device for its thread only where the process has used none, which would depend on who came first.
    accelerator.initialize()
    check = race_check_of_threads()
    threads: list[threading.Thread] = [RankThread(rank, target, check) for rank in range(world_size)]
    operations.test_began()
    for thread in threads:
        thread.start()
    return threads


def wait(threads: Sequence[threading.Thread], timeout_s: float) -> list[Outcome]:
    """Wait until all ranks have ended, hang provably (see Note [Provable hangs]) or are out of time.

    A race that no rank was charged with fails the first rank that has passed.
    """
    outcomes = _wait(threads, timeout_s)
    checks = {thread.check for thread in threads if isinstance(thread, RankThread)}
    for races in filter(None, (check.end() for check in checks if check)):
        for outcome in outcomes:
            if outcome.ending in (Ending.PASSED, Ending.SKIPPED):
                outcome.ending, outcome.receipt = Ending.FAILED, world_rank.failure(races)
                break
    return outcomes


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
    if before is None or not (before.blocked and now.blocked):
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
