"""The case process: runs the parent half of one class's tests and tells the supervisor how each ended.

Runs in a child of the module's zygote, beside the ranks; it asks the zygote for those and never forks them itself.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch_ext.runner.collect import find_tests
from torch_ext.runner.results import Status
from torch_ext.world import access
from torch_ext.world.rank import STACK_SIGNAL, failure
from torch_ext.world.wire import Channel

__all__ = ["CaseOrder", "ClassFailed", "ClassSkipped", "TestEnded", "TestStarted", "main"]

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


@dataclass(frozen=True)
class CaseOrder:
    """Which tests a case process runs, all of one class, in this order, and under which environment."""

    module: str
    cls: str
    methods: tuple[str, ...]
    environment: Mapping[str, str]
    argv: tuple[str, ...]
    scratch: str
    failfast: bool


@dataclass(frozen=True)
class TestStarted:
    """A test has begun; its own time limit is so many seconds."""

    method: str
    timeout_s: float


@dataclass(frozen=True)
class TestEnded:
    """A test is over."""

    method: str
    status: Status
    duration_s: float
    message: str
    reason: str


@dataclass(frozen=True)
class ClassFailed:
    """``setUpClass`` or ``tearDownClass`` raised."""

    message: str


@dataclass(frozen=True)
class ClassSkipped:
    """``setUpClass`` skipped the class."""

    reason: str


def main(order: CaseOrder, descriptors: Sequence[int]) -> int:
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
    sys.argv[:] = order.argv
    access.use(Channel.from_descriptor(zygote), order.scratch)
    result = _Result(Channel.from_descriptor(channel), order.failfast)
    by_name = {(type(test).__name__, test._testMethodName): test for test in find_tests(order.module)}
    suite = unittest.TestSuite()
    for method in order.methods:
        test = by_name.get((order.cls, method))
        if test is None:
            result.tell(
                TestEnded(method, Status.FAILED, 0.0, f"{order.module} does not define this test (any more).", "")
            )
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
        self._messages: list[str] = []
        self._reasons: list[str] = []

    def tell(self, event: Any) -> None:
        self._channel.send(event)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started_s = time.monotonic()
        self._status, self._messages, self._reasons = None, [], []
        self.tell(TestStarted(_method(test), _timeout_s(test)))

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        status = self._status or Status.PASSED
        took_s = time.monotonic() - self._started_s
        self.tell(TestEnded(_method(test), status, took_s, "\n\n".join(self._messages), "; ".join(self._reasons)))

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._status = self._status or Status.PASSED

    def addError(self, test: unittest.TestCase, err: _ExcInfo) -> None:
        message = _describe(err)
        if _is_fixture(test):
            self.tell(ClassFailed(f"{test}\n{message}"))
            return
        self._status = Status.FAILED
        self._messages.append(message)
        if self.failfast:
            self.stop()

    def addFailure(self, test: unittest.TestCase, err: _ExcInfo) -> None:
        self.addError(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: _ExcInfo | None) -> None:
        if err is not None:
            self.addError(test, err)
            self._messages[-1] = f"in {subtest}\n{self._messages[-1]}"

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
        self._messages.append("The test is expected to fail, but it passed.")
        if self.failfast:
            self.stop()


def _is_fixture(test: object) -> bool:
    """Whether ``test`` is unittest's stand-in for a ``setUpClass`` or ``tearDownClass`` that did not succeed."""
    return not isinstance(test, unittest.TestCase)


def _method(test: unittest.TestCase) -> str:
    return test._testMethodName


def _timeout_s(test: unittest.TestCase) -> float:
    """Ask the test's own harness, which this layer does not import, for its limit."""
    timeouts = sys.modules.get("torch_ext.testing._internal._distributed.timeouts")
    return float(timeouts.timeout_of(test)) if timeouts is not None else 120.0


def _describe(err: _ExcInfo) -> str:
    error = err[1]
    if error is None:
        return ""
    # A world's failure tells what its ranks did; where its parent half waited for them says nothing.
    if hasattr(error, "outcomes"):
        return str(error)
    return failure(error).trace.rstrip()
