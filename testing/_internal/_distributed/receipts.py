"""Runs in a rank, around a test's body: turns the way it ends into a receipt."""

from __future__ import annotations

import sys
import time
import unittest
from collections.abc import Callable
from typing import Any

import torch.distributed as c10d

from torch_ext import accelerator
from torch_ext.testing._internal._distributed.methods import body_has_ended, forget_body
from torch_ext.testing._internal._distributed.races import race_check
from torch_ext.testing._internal._distributed.skips import skip_reason
from torch_ext.world import rank as world_rank
from torch_ext.world import settings
from torch_ext.world.protocol import Receipt, Said

__unittest = True

__all__ = [
    "TEST_ERROR_EXIT_CODE",
    "body_passed",
    "end_group_unless_released",
    "passed",
    "receipt_of",
    "run_rank",
    "run_test",
    "skipped",
    "take_wish_to_end_group",
]

# The exit code of a rank whose test raised, as upstream has it.
TEST_ERROR_EXIT_CODE = 10

_wants_group_ended = False
_body_has_passed = False


def passed() -> Receipt:
    return Receipt(Said.PASSED, time.monotonic())


def skipped(reason: str) -> Receipt:
    return Receipt(Said.SKIPPED, time.monotonic(), reason=reason)


def receipt_of(error: BaseException) -> Receipt | None:
    """Return the receipt for ``error``; None for a ``SystemExit`` whose code means neither pass nor skip.

    Races that the check of a body has found by then are part of it, and turn a skip into a failure.
    """
    reason = skip_reason(error.code) if isinstance(error, SystemExit) else ""
    if isinstance(error, SystemExit) and not reason:
        return None
    is_skip = bool(reason) or isinstance(error, unittest.SkipTest)
    blamed = accelerator.blame_races(error, is_skip=is_skip)
    return skipped(reason or str(error)) if is_skip and blamed is error else world_rank.failure(blamed)


def run_test(run: Callable[..., None], *args: Any, **kwargs: Any) -> Receipt:
    """Call ``run``, which is to run a test method in this rank, and return the receipt for the way it ended.

    A ``run`` that returns though no test method has run to its end has failed, also where it swallowed the failure.
    One check for races covers all that ``run`` does.

    Raises:
        SystemExit: one whose code means no skip, unless the code is 0 and the test had passed by then.
        BaseException: whatever ``run`` raised after the receipt was handed in.
    """
    global _body_has_passed
    rank = world_rank.this_rank()
    _body_has_passed = False
    forget_body()
    try:
        with race_check():
            return _receipt_of_call(rank, run, *args, **kwargs)
    except Exception as error:  # of the check
        if rank.handed_in:
            raise
        return world_rank.failure(error)


def _receipt_of_call(rank: world_rank.Rank, run: Callable[..., None], *args: Any, **kwargs: Any) -> Receipt:
    try:
        run(*args, **kwargs)
    except BaseException as error:
        if rank.handed_in:
            raise
        if not (_body_has_passed and isinstance(error, SystemExit) and error.code in (0, None)):
            receipt = receipt_of(error)
            if receipt is None:
                raise
            return receipt
    if not body_has_ended():
        unrun = f"{run.__name__}() of the class returned, but the test method has not run to its end in this rank"
        return Receipt(Said.FAILED, time.monotonic(), unrun, unrun)
    return passed()


def run_rank(devices: int, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """The body of a rank: call ``run`` (a class's ``_run``) and hand in a receipt.

    Args:
        devices: how many devices the test needs.
        run, args, kwargs: the call.

    Raises:
        SystemExit: the test failed or skipped, or as :func:`run_test` says.
    """
    rank = world_rank.this_rank()
    accelerator.request_devices(devices)
    receipt = run_test(run, *args, **kwargs)
    if rank.handed_in:
        return
    if receipt.said is not Said.PASSED:
        rank.hand_in(receipt)
        sys.exit(TEST_ERROR_EXIT_CODE if receipt.said is Said.FAILED else 0)
    rank.tell_of_globals(getattr(getattr(run, "__self__", None), "__module__", ""))
    if settings.full_teardown():
        end_group()
        rank.hand_in(passed())
    elif not rank.hand_in(passed()):
        end_group()


def body_passed() -> None:
    """Note that the test method has run to its end, whatever the class's ``_run`` does afterwards."""
    global _body_has_passed
    _body_has_passed = True


def take_wish_to_end_group() -> bool:
    """Return whether the process groups are to be destroyed now that a test is over, and forget it."""
    global _wants_group_ended
    wanted, _wants_group_ended = _wants_group_ended, False
    return wanted


def end_group_unless_released() -> None:
    """Destroy the process groups at the end, unless all ranks end together; see Note [Life of a rank]."""
    global _wants_group_ended
    _wants_group_ended = True


def end_group() -> None:
    """Destroy all process groups if the test asked for it and has not done it."""
    if _wants_group_ended and c10d.is_initialized():
        c10d.destroy_process_group()
