"""How a test case replaces its test method: the parent half waits for the ranks, and unittest runs it in each rank.

Note [unittest in ranks]
~~~~~~~~~~~~~~~~~~~~~~~~
A rank runs the test method by :meth:`unittest.TestCase.run`, with a result object of ours and without fixtures. So
sub-tests, skips, expected failures and cleanups mean in a rank what they mean to unittest. The record leaves the
replaced method as one exception, as existing overrides of ``_run`` and ``run_test`` expect; :func:`failed_parts`
returns the rest of it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import types
import unittest
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

from torch_ext import accelerator
from torch_ext.compat._unittest import name_of_sub_test, run_test_method
from torch_ext.testing._internal._distributed.helpers import plainly_equal
from torch_ext.testing._internal._distributed.skips import skip_reason
from torch_ext.testing._internal.common_utils import TestCase
from torch_ext.world import debugger, provider, wording
from torch_ext.world import rank as world_rank
from torch_ext.world._os import monotonic
from torch_ext.world.outcome import may_be_expected
from torch_ext.world.protocol import Part
from torch_ext.world.settings import timeout_of
from torch_ext.world.verdict import WorldFailure, check_fixtures, check_ran

# unittest hides its own frames and ours. pytest shows all frames if none is left, so under pytest keep the waiting one.
__unittest = "_pytest.unittest" not in sys.modules

provider.watch_this_process()

_DEFAULT = "runTest"
_PARENT_RANK = -1
# The attribute of a test method with the function ``(case, method)`` that its parent half calls; by default it waits.
PARENT_HALF = "_torch_ext_parent_half"
_PARTS = "_torch_ext_parts"
_ended_in = 0  # the process in which a test method has run to its end


class RanksTestCase(TestCase):
    """A test case whose method its ranks run, while the parent half waits for them."""

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        # unittest passes the name by position or as ``methodName``; pytest none when it collects.
        name = methodName if methodName != _DEFAULT else method_name
        super().__init__(name)
        self._prepare()
        method = getattr(self, name, None)
        if method is not None:
            setattr(self, name, self.join_or_run(method))
        elif methodName != _DEFAULT:
            raise ValueError(f"{type(self).__name__} has no test method {name!r}")

    def _prepare(self) -> None:
        """Prepare this process for starting ranks, unless it is a rank."""
        if world_rank.current() is None:
            accelerator.device_type()  # load the device before the zygote is forked
            provider.prepare(type(self).__module__)

    def join_or_run(self, fn: Callable[[], Any]) -> Any:
        """Return a replacement for test method ``fn``: in a rank it runs ``fn``, in the parent half it waits."""

        @wraps(fn)
        def wrapper(self: Any, **kwargs: Any) -> None:
            if self.rank == _PARENT_RANK:
                _judge(self, fn)
            else:
                run_method(self, functools.partial(fn, **kwargs))

        return types.MethodType(wrapper, self)

    def assertEqual(self, x: Any, y: Any, msg: Any = None, **options: Any) -> None:  # type: ignore[override]
        if options or not plainly_equal(x, y):
            super().assertEqual(x, y, msg, **options)

    def _wait_for_ranks(self, fn: Callable[[], Any]) -> None:
        """Wait in the parent half until the ranks have run ``fn``; raise WorldFailure or SkipTest unless all passed."""
        raise NotImplementedError

    def setUp(self) -> None:
        check_fixtures(type(self))
        timeout_of(self)  # refuse an invalid limit before ranks start
        super().setUp()


def count_ranks(case: Any, world_size: Any = None) -> int:
    """Return how many ranks ``case``, a test case or its class, asks for by ``world_size`` (default: its attribute).

    Raises:
        ValueError: the value is not a non-negative integer.
    """
    found = case.world_size if world_size is None else world_size
    name = (case if isinstance(case, type) else type(case)).__name__
    if isinstance(found, bool) or not hasattr(type(found), "__index__") or found < 0:
        raise ValueError(f"world_size of {name} is {found!r}; expected the number of ranks as an int, such as 2")
    return operator.index(found)


def _judge(case: Any, fn: Callable[[], Any]) -> None:
    __tracebackhide__ = True
    try:
        case._wait_for_ranks(fn)
    except WorldFailure as failure:
        outcome = getattr(case, "_outcome", None)
        if outcome is not None and not may_be_expected(failure.report.outcomes):
            outcome.expecting_failure = False  # a failure even of a test that is expected to fail
        raise


class Failed(NamedTuple):
    """A part of a test that failed or, in a test that skips, a part that skipped."""

    part: Part
    error: BaseException
    time_s: float


class _Result(unittest.TestResult):
    """Records what unittest reports about one run of a test method in a rank."""

    def __init__(self) -> None:
        super().__init__()
        self._failed: list[Failed] = []
        self._skipped: list[Failed] = []
        self._passed = False

    def addSuccess(self, test: Any) -> None:
        self._passed = True

    def addError(self, test: Any, err: Any) -> None:
        self._add(test, err[1], expectable=False)

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._add(subtest, err[1], expectable=False)

    def addSkip(self, test: Any, reason: str) -> None:
        self._add(test, unittest.SkipTest(reason), expectable=False)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self._add(test, err[1], expectable=True)

    addUnexpectedSuccess = addSuccess  # the parent half finds that all ranks have passed

    def _add(self, test: Any, error: BaseException, *, expectable: bool) -> None:
        reason = _reason_of_skip(error)
        skip = unittest.SkipTest(reason) if reason else error
        name = name_of_sub_test(test)
        failed = Failed(Part(name, expectable), skip, monotonic())
        if isinstance(skip, unittest.SkipTest):
            self._skipped.append(failed)
            return
        self._failed.append(failed)
        if not expectable:
            debugger.examine(error)
        if name and world_rank.current() is not None:
            # The rank goes on, and may hang in a collective that its peers do not call: only this shows the failure.
            with contextlib.suppress(Exception):  # the test may have closed it
                print(f"sub-test {name} failed: {wording.read_error(error)[0]}", file=sys.stderr, flush=True)

    def conclude(self) -> None:
        """Return if the test passed.

        Raises:
            BaseException: the error of the first part that failed, or of the first that skipped if none failed.
            AssertionError: unittest did not report how the test ended.
        """
        exits = [each for each in self._failed if isinstance(each.error, SystemExit)]
        others = [each for each in self._failed if each not in exits]
        found = others or exits or self._skipped
        if not found:
            if not self._passed:
                raise AssertionError("unittest returned without reporting how the test method ended")
            return
        error = found[0].error
        if found is self._skipped:
            error = unittest.SkipTest("; ".join(dict.fromkeys(str(each.error) for each in found)))
        vars(error)[_PARTS] = found
        raise error


def _reason_of_skip(error: BaseException) -> str:
    """Return why an exception other than unittest's skips a test: one of torch's exit codes, or pytest.skip()."""
    if isinstance(error, SystemExit):
        return skip_reason(error.code)
    return str(error) or "skipped" if provider.is_skip_of_pytest(error) else ""


def failed_parts(error: BaseException) -> Sequence[Failed]:
    """Return what failed or skipped in the run of a test method that raised ``error``."""
    return vars(error).get(_PARTS, ())


def run_method(case: Any, method: Callable[[], Any]) -> None:
    """Run ``method`` as unittest runs a test method, with its cleanups; see Note [unittest in ranks].

    Raises:
        BaseException: as :meth:`_Result.conclude` does.
    """
    result = _Result()
    run_test_method(case, result, method, check_ran)
    forget_body()  # one that this body has run
    result.conclude()
    global _ended_in
    _ended_in = os.getpid()


def forget_body() -> None:
    """Forget the bodies that have run in this rank, so that none counts as the next test's."""
    global _ended_in
    _ended_in = 0


def body_has_ended() -> bool:
    """Whether a test method has passed in this rank since the last :func:`forget_body`, by any caller."""
    return _ended_in == os.getpid()
