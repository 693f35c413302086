"""The class process: runs the parent half of one class's tests and tells the supervisor how each ended.

Runs in a child of the module's zygote, beside the ranks. It asks the zygote for ranks and never forks them itself.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import unittest
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch_ext.runner.collect import find_tests
from torch_ext.runner.messages import ClassFailed, ClassOrder, ClassSkipped, TestEnded, TestStarted
from torch_ext.runner.results import Problem, Raised, RanksFailed, Remark, Status
from torch_ext.world import frames, provider
from torch_ext.world.channel import Channel
from torch_ext.world.limits import timeout_of
from torch_ext.world.protocol import OWNER_VARIABLE, STACK_SIGNAL
from torch_ext.world.render import WorldFailure

__all__ = ["main"]

frames.hide(r"/runner/class_process\.py", "main", outwards=True)

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


def main(order: ClassOrder, descriptors: Sequence[int]) -> int:
    """Target of a child. Descriptors: the channel to the supervisor, one to the zygote, stdout, stderr, a pipe for
    stacks.
    """
    channel, zygote, stdout, stderr, stacks = descriptors
    for ours, theirs in ((stdout, 1), (stderr, 2)):
        os.dup2(ours, theirs)
        os.close(ours)
    faulthandler.enable(2)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(order.environment)
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    sys.argv[:] = order.argv
    provider.use(Channel.from_descriptor(zygote), order.scratch)
    result = _Result(Channel.from_descriptor(channel), order.failfast)
    by_name = {(type(test).__name__, test._testMethodName): test for test in find_tests(order.module)}
    suite = unittest.TestSuite()
    for method in order.methods:
        test = by_name.get((order.cls, method))
        if test is None:
            gone = Remark(f"{order.module} no longer defines this test.")
            result.tell(TestEnded(method, Status.FAILED, 0.0, (gone,), ""))
        else:
            suite.addTest(test)
    suite.run(result)
    return 0


class _Result(unittest.TestResult):
    """Sends each ending to the supervisor as it happens."""

    def __init__(self, channel: Channel, failfast: bool) -> None:
        super().__init__()
        self.failfast = failfast
        self._channel = channel
        self._started_s = 0.0
        self._status: Status | None = None
        self._problems: list[Problem] = []
        self._reasons: list[str] = []

    def tell(self, event: Any) -> None:
        self._channel.send(event)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started_s = time.monotonic()
        self._status, self._problems, self._reasons = None, [], []
        self.tell(TestStarted(_method(test), timeout_of(test)))

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        status = self._status or Status.PASSED
        took_s = time.monotonic() - self._started_s
        self.tell(TestEnded(_method(test), status, took_s, tuple(self._problems), "; ".join(self._reasons)))

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._status = self._status or Status.PASSED

    def addError(self, test: unittest.TestCase, err: _ExcInfo) -> None:
        if _is_fixture(test):
            self.tell(ClassFailed(_problem(err, where=str(test))))
            return
        self._fail(_problem(err))

    def addFailure(self, test: unittest.TestCase, err: _ExcInfo) -> None:
        self.addError(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: _ExcInfo | None) -> None:
        if err is not None:
            self._fail(_problem(err, where=str(subtest)))

    def _fail(self, problem: Problem) -> None:
        self._status = Status.FAILED
        self._problems.append(problem)
        if self.failfast:
            self.stop()

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        if _is_fixture(test):
            self.tell(ClassSkipped(reason))
            return
        self._status = self._status or Status.SKIPPED
        self._reasons.append(reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: _ExcInfo) -> None:
        self._status = Status.XFAIL

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._status = Status.UNEXPECTED_SUCCESS
        if self.failfast:
            self.stop()


def _is_fixture(test: object) -> bool:
    """Whether ``test`` is unittest's stand-in for a ``setUpClass`` or ``tearDownClass`` that did not succeed."""
    return not isinstance(test, unittest.TestCase)


def _method(test: unittest.TestCase) -> str:
    return test._testMethodName


def _problem(err: _ExcInfo, where: str = "") -> Problem:
    error = err[1]
    if error is None:
        raise AssertionError("unittest reported an error without an exception")
    if isinstance(error, WorldFailure):
        return RanksFailed(error.report, where)  # where the parent half waited for its ranks says nothing
    said, trace = frames.read_error(error)
    return Raised(said, trace.rstrip(), where)
