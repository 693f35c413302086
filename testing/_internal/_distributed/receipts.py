"""Runs in a rank, around a test's body: turns the way it ends into a receipt."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as c10d

from torch_ext import accelerator
from torch_ext.compat._unittest import forget_class_cleanups, run_class_cleanups
from torch_ext.testing._internal._distributed.leaks import LeakCheck
from torch_ext.testing._internal._distributed.methods import Failed, body_has_ended, failed_parts, forget_body
from torch_ext.testing._internal._distributed.skips import skip_reason
from torch_ext.world import rank as world_rank
from torch_ext.world import settings, wording
from torch_ext.world._os import monotonic
from torch_ext.world.protocol import Part, RankStatus, Receipt

__unittest = True

# The exit code of a rank whose test raised, as upstream has it.
TEST_ERROR_EXIT_CODE = 10

_wants_group_ended = False


def passed() -> Receipt:
    return Receipt(RankStatus.PASSED, monotonic())


def skipped(reason: str) -> Receipt:
    return Receipt(RankStatus.SKIPPED, monotonic(), reason=reason)


def receipt_of(error: BaseException) -> Receipt | None:
    """Return the receipt for ``error``; None for a ``SystemExit`` whose code means neither pass nor skip. Races of the
    body are part of it, and turn a skip into a failure.
    """
    reason = skip_reason(error.code) if isinstance(error, SystemExit) else ""
    if isinstance(error, SystemExit) and not reason:
        return None
    is_skip = bool(reason) or isinstance(error, unittest.SkipTest)
    with_races = accelerator.blame_races(error, is_skip=is_skip)
    if not is_skip:
        return failure_of(error, with_races)
    if with_races is not error:
        return world_rank.failure(with_races)
    return replace(skipped(reason or str(error)), parts=tuple(each.part for each in failed_parts(error)))


def failure_of(error: BaseException, with_races: BaseException | None = None) -> Receipt:
    """Return the receipt of a rank that failed by ``error``, or by ``with_races``, of which ``error`` is a part."""
    receipt, found = world_rank.failure(with_races or error), failed_parts(error)
    if not found:
        return receipt
    parts = tuple(each.part for each in found)
    return replace(receipt, trace=_traces(receipt.trace, found), time_s=found[0].time_s, parts=parts)


def _traces(first: str, found: Sequence[Failed]) -> str:
    """Return the traceback of each part that failed, below the name of its sub-test."""
    traces = [first, *(wording.read_error(each.error)[1] for each in found[1:])]
    return "\n".join(
        f"Sub-test {each.part.sub_test}:\n{trace}" if each.part.sub_test else trace
        for each, trace in zip(found, traces, strict=True)
    )


def after_expected_failure(receipt: Receipt, cls: Any) -> Receipt:
    """Return ``receipt`` of a rank that ends now. An expected failure includes what class and module cleanups raise."""
    if not receipt.is_expected:
        return receipt
    for error in run_class_cleanups(cls):
        trace = f"{receipt.trace}\n{wording.read_error(error)[1]}"
        receipt = replace(receipt, trace=trace, parts=(*receipt.parts, Part("", False)))
    return receipt


def race_check() -> AbstractContextManager[None]:
    """Return ``accelerator.race_check`` for the body of a test or example. Rank 0 reports known races not met."""
    rank = world_rank.current()
    if rank is None:
        return accelerator.race_check("", wording.announce)
    return accelerator.race_check(rank.test if rank.rank == 0 else "", rank.notify)


def race_check_of_threads() -> accelerator.RaceCheckOfThreads | None:
    """Likewise, of a test whose ranks are threads; return None if the device has no checker."""
    rank = world_rank.current()
    return accelerator.race_check_of_threads(wording.announce if rank is None else rank.notify)


def next_order(orders: Connection) -> Any:
    """Return the parent half's next order, or None at its end. Later receipts carry the order's ticket."""
    try:
        ticket, order = orders.recv()
    except EOFError:
        return None
    world_rank.this_rank().begin(ticket)
    return order


def run_test(run: Callable[..., None], *args: Any, **kwargs: Any) -> Receipt:
    """Call ``run``, which is to run a test method in this rank, and return the receipt for the way it ended. The rank
    fails if no test method has run to its end, even if ``run`` swallowed the failure. Checks for races and leaks cover
    ``run``.

    Raises:
        SystemExit: one whose code means no skip, unless the code is 0 and the test had passed by then.
        BaseException: whatever ``run`` raised after the receipt was submitted.
    """
    rank = world_rank.this_rank()
    forget_body()
    leaks = LeakCheck() if settings.checks_leaks() else None
    try:
        with race_check(), accelerator.virtual_time():
            receipt = _receipt_of_call(rank, run, *args, **kwargs)
        if leaks is not None and receipt.status is RankStatus.PASSED and not rank.submitted:
            end_group()
            leaks.conclude()
        return receipt
    except Exception as error:  # raised by a check
        if rank.submitted:
            raise
        return world_rank.failure(error)


def _receipt_of_call(rank: world_rank.Rank, run: Callable[..., None], *args: Any, **kwargs: Any) -> Receipt:
    try:
        run(*args, **kwargs)
    except BaseException as error:
        if rank.submitted:
            raise
        if not (body_has_ended() and isinstance(error, SystemExit) and error.code in (0, None)):
            receipt = receipt_of(error)
            if receipt is None:
                raise
            return receipt
    if not body_has_ended():
        message = f"{run.__name__}() of the class returned, but the test method has not run to its end in this rank"
        return Receipt(RankStatus.FAILED, monotonic(), message, message)
    return passed()


def run_rank(cls: Any, devices: int, *args: Any, **kwargs: Any) -> None:
    """The body of a rank of ``cls``: call ``cls._run`` and the cleanups that it registers, and submit a receipt.

    Raises:
        SystemExit: the test failed or skipped, or as :func:`run_test` says.
    """
    rank = world_rank.this_rank()
    accelerator.request_devices(devices)
    forget_class_cleanups(cls)
    try:
        receipt = run_test(cls._run, *args, **kwargs)
    finally:
        failed = run_class_cleanups(cls)
    if rank.submitted:
        return
    if failed and receipt.status is not RankStatus.FAILED:
        receipt = world_rank.failure(failed[0])
    if receipt.status is not RankStatus.PASSED:
        rank.submit(receipt)
        sys.exit(TEST_ERROR_EXIT_CODE if receipt.status is RankStatus.FAILED else 0)
    rank.warn_of_globals(cls.__module__)
    if not rank.submit(passed()):
        end_group()


def end_group_unless_released() -> None:
    """Destroy the process groups at the end, unless all ranks end together; see Note [Life of a rank]."""
    global _wants_group_ended
    _wants_group_ended = True


def end_group() -> None:
    """Destroy all process groups if the test asked for it and has not done it."""
    if _wants_group_ended and c10d.is_initialized():
        c10d.destroy_process_group()
