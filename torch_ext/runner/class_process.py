"""Runs in children of a module's zygote: :func:`collect` names the module's tests, as unittest finds them, and
:func:`main` is the class process. A class process runs the parent half of one class's tests and reports each result to
the supervisor. It asks the zygote for ranks and never forks them itself.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import os
import sys
import traceback
import unittest
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch_ext.results import Needs, Problem, Raised, RanksFailed, Remark, Status, TestName, TestResult
from torch_ext.runner.interrupts import Interrupts
from torch_ext.runner.messages import Body, ClassEnded, ClassOrder, TestEnded, TestNames, TestStarted
from torch_ext.world import _os, child, files, provider, verdict, wording
from torch_ext.world.channel import Channel
from torch_ext.world.child import end_fork, redirect
from torch_ext.world.exits import UnfinishedWorkError, call_exit_functions, disown_exit_functions
from torch_ext.world.outcome import Outcome, may_be_expected
from torch_ext.world.protocol import OWNER_VARIABLE, STACK_SIGNAL, Notice
from torch_ext.world.settings import TIMEOUT_DEFAULT, hosts_of, timeout_of
from torch_ext.world.start import ZygoteLostError
from torch_ext.world.verdict import WorldFailure, check_fixtures, check_ran


def _find_tests(module: str) -> list[tuple[str, unittest.TestCase]]:
    """Return the tests of the loaded ``module``, in the order of unittest or of its ``load_tests``, each with the name
    of its class.
    """
    found = sys.modules[module]
    tests = list(_flatten(unittest.defaultTestLoader.loadTestsFromModule(found)))
    names = _class_names({type(test) for test in tests}, vars(found))
    return [(names[type(test)], test) for test in tests]


def _class_names(classes: Collection[type], known: Mapping[str, object]) -> dict[type, str]:
    """Return the name of each class; of several with one ``__name__``, another of their names in ``known``, if any.

    >>> one, other = type("TestA", (), {}), type("TestA", (), {})
    >>> names = _class_names([one, other], {"TestA": one, "TestB": other})
    >>> names[one], names[other]
    ('TestA', 'TestB')
    """
    shared = Counter(cls.__name__ for cls in classes)
    bound = {value: name for name, value in known.items() if isinstance(value, type)}
    return {cls: cls.__name__ if shared[cls.__name__] == 1 else bound.get(cls, cls.__name__) for cls in classes}


def _flatten(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _flatten(each)
        else:
            yield each


def _needs_of(test: unittest.TestCase) -> Needs:
    """Return the needs of ``test``, by its class's ``world_size`` and its method's decorators.

    >>> case = type("TestA", (unittest.TestCase,), {"world_size": 3, "test_b": lambda self: None})
    >>> _needs_of(case("test_b"))
    Needs(world_size=3, processes=3, devices=0, alone=False, hosts=1)
    """
    method = getattr(type(test), test._testMethodName, None)
    required = _count(getattr(method, "_required_world_size", 0))
    try:
        ranks = required or _count(getattr(test, "world_size", 0))
    except Exception:  # the project's own property may work in ranks only
        ranks = 0
    threads = any(base.__name__ == "MultiThreadedTestCase" for base in type(test).__mro__)
    devices = max(required, _count(getattr(method, "_required_devices", 0)))
    alone = getattr(test, "alone", False) is True or getattr(method, "alone", False) is True
    return Needs(ranks, 1 if threads else max(1, ranks), devices, alone, 1 if threads else hosts_of(test))


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def collect(module: str, descriptors: Sequence[int]) -> int:
    """Target of a child: send the tests of the loaded ``module``. Descriptors: a channel, a pipe for stacks."""
    faulthandler.register(STACK_SIGNAL, descriptors[1], all_threads=True)
    provider.never_start_ranks()
    # A load_tests function may name a test twice; it runs once.
    tests = list({(cls, test._testMethodName): (cls, test) for cls, test in _find_tests(module)}.values())
    names = tuple((cls, test._testMethodName) for cls, test in tests)
    accelerator = sys.modules.get("torch_ext.accelerator")  # loaded by tests that ask for a device
    device = accelerator.device_type() if accelerator is not None else ""
    needs = tuple(_needs_of(test) for _, test in tests)
    Channel.from_descriptor(descriptors[0]).send(TestNames(names, needs, device))
    return 0


# Seconds to wait to be killed along with the zygote.
_END_S = 20.0

# Functions of unittest, and the fixture of a class or module that each calls.
_FIXTURES = {
    "_handleModuleFixture": "setUpModule",
    "_handleModuleTearDown": "tearDownModule",
    "_handleClassSetUp": "setUpClass",
    "_tearDownPreviousClass": "tearDownClass",
}


def main(order: ClassOrder, descriptors: Sequence[int]) -> int:
    """Target of a child. Descriptors: channels to the supervisor and the zygote, stdout, stderr, a pipe for stacks."""
    channel, zygote, stdout, stderr, stacks = descriptors
    redirect(stdout, stderr)
    os.close(stderr)
    _os.lead_process_group()
    faulthandler.enable(2)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    child.enter(order.environment)
    os.environ[OWNER_VARIABLE] = str(_os.getpid())
    sys.argv[:] = order.argv
    provider.use(Channel.from_descriptor(zygote), order.scratch)
    disown_exit_functions()
    result = _ClassResult(Channel.from_descriptor(channel), stdout, order.tests, order.failfast)
    wording.show_by(lambda text: result.send(Notice(text)))
    by_name = {(cls, test._testMethodName): test for cls, test in _find_tests(order.module)}
    suite, classes = _Suite(result), set[type[unittest.TestCase]]()
    for name in order.tests:
        if test := by_name.get((name.cls, name.method)):
            check_calls(test, result.report_body)
            suite.addTest(test)
            classes.add(type(test))
        else:
            gone = Remark(f"{order.module} no longer defines this test.")
            result.send_end(TestResult(name, Status.FAILED, 0.0, (gone,)))
    for cls in classes:
        _check_class_fixtures(cls)
    try:
        suite.run(result)
        for where, error in call_exit_functions():
            raise UnfinishedWorkError(f"{where}: {type(error).__name__}: {error}") from error
    except BaseException as error:
        result.end_fork(error)
        result.over()
        result.send(ClassEnded(True, None if error is result.interrupt else _escaped(error)))
    else:
        result.send(ClassEnded())
    return 0


def check_calls(test: unittest.TestCase, report_body: Callable[[bool], None] = lambda begins: None) -> None:
    """Make ``setUp``, ``tearDown``, the method and the cleanups of ``test`` fail if a call does not run the body.

    Calls ``report_body`` with True before the method runs, and with False after it. Leaves coroutines to
    :class:`unittest.IsolatedAsyncioTestCase`, which awaits them. Keeps the method itself, which suites look up on the
    instance.
    """
    is_async = isinstance(test, unittest.IsolatedAsyncioTestCase)
    for name in ("setUp", "tearDown"):
        setattr(test, name, _checked(getattr(test, name), name))
    call = test._callTestMethod  # type: ignore[attr-defined]

    def call_and_check(method: Callable[..., Any]) -> None:
        awaits = is_async and inspect.iscoroutinefunction(method)
        report_body(True)
        try:
            call(method if awaits else _checked(method, test._testMethodName))
        finally:
            report_body(False)

    test._callTestMethod = call_and_check  # type: ignore[attr-defined]
    if not is_async:
        clean_up = test._callCleanup  # type: ignore[attr-defined]

        def clean_up_and_check(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            clean_up(_checked(function, _cleanup_name(function)), *args, **kwargs)

        test._callCleanup = clean_up_and_check  # type: ignore[attr-defined]


def _check_class_fixtures(cls: type[unittest.TestCase]) -> None:
    """Make the fixtures of ``cls`` and of its module fail if a call does not run the body."""
    set_up, add = cls.setUpClass, cls.addClassCleanup
    refusal = None
    try:
        check_fixtures(cls)
    except TypeError as error:  # raise it in setUpClass, so that unittest attributes it to the class
        refusal = error

    def set_up_class() -> None:
        if refusal is not None:
            raise refusal
        check_ran(set_up(), "setUpClass")

    def add_cleanup(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        add(_checked(function, _cleanup_name(function)), *args, **kwargs)

    tear_down = _checked(cls.tearDownClass, "tearDownClass")
    replaced: dict[str, Callable[..., Any]]
    replaced = {"setUpClass": set_up_class, "tearDownClass": tear_down, "addClassCleanup": add_cleanup}
    for name, function in replaced.items():
        setattr(cls, name, staticmethod(function))
    module = sys.modules[cls.__module__]
    for name in ("setUpModule", "tearDownModule"):
        if hasattr(module, name):
            setattr(module, name, _checked(getattr(module, name), name))


def _cleanup_name(function: Callable[..., Any]) -> str:
    return f"the cleanup {getattr(function, '__name__', function)}"


def _checked(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_and_check(*args: Any, **kwargs: Any) -> Any:
        returned = method(*args, **kwargs)
        check_ran(returned, name)
        return returned

    return call_and_check


class _Suite(unittest.TestSuite):
    """Reports begin and end of each planned test: a class may run a test several times, or other tests beside it."""

    def __init__(self, result: _ClassResult) -> None:
        super().__init__()
        self._result = result

    def __iter__(self) -> Iterator[unittest.TestSuite | unittest.TestCase]:
        for test in super().__iter__():
            if isinstance(test, unittest.TestCase):
                self._result.begin(test)
            yield test
            self._result.over()


# If a test has several endings, the worst counts, as in unittest's summary.
_FROM_WORST = (Status.FAILED, Status.UNEXPECTED_SUCCESS, Status.XFAIL, Status.SKIPPED, Status.PASSED)


class _ClassResult(unittest.TestResult):
    """Sends each result to the supervisor as it happens. Everything from :meth:`begin` to :meth:`over` is one result of
    one planned test, even if the class runs it several times.
    """

    def __init__(self, channel: Channel, output: int, tests: Sequence[TestName], failfast: bool) -> None:
        super().__init__()
        self._left = {test.method: test for test in tests}  # tests without a result
        self._class = TestName(tests[0].file, tests[0].cls)
        self.failfast = failfast
        # The last reported exception that unittest does not catch, such as KeyboardInterrupt
        self.interrupt: BaseException | None = None
        self._pid = _os.getpid()
        self._channel = channel
        self._output = output  # descriptor of the file behind stdout and stderr, even if a test redirects them
        self._interrupts = Interrupts()
        self._has_outlived_zygote = False
        self.begin(None)

    def begin(self, test: unittest.TestCase | None) -> None:
        """Note that unittest is about to run ``test``; None: no test."""
        self._planned, self._frames = test, sys.getrecursionlimit()
        self._runs, self._has_ending = 0, False
        self._started_s = self._took_s = 0.0
        self._error: BaseException | None = None  # the first of the current test
        self._status: Status | None = None
        self._problems: list[Problem] = []
        self._reasons: list[str] = []

    @_os.with_room
    def send(self, event: Any) -> None:
        self.end_fork(self._error)
        with self._interrupts.held():  # an interrupted send would break the channel
            self._channel.send(event)

    def send_end(self, result: TestResult) -> None:
        """Report the result of a test or, without a method, of the class."""
        self._left.pop(result.test.method, None)
        _os.flush_output()
        self.send(TestEnded(result, os.fstat(self._output).st_size))

    def report_body(self, begins: bool) -> None:
        """Report the begin and end of the body, in which ranks have the whole time limit of the test."""
        if _os.getpid() == self._pid and hasattr(type(self._planned), "world_size"):
            self.send(Body(begins))

    def end_fork(self, error: BaseException | None) -> None:
        """End a test's forked child that continues as if it were this process; ``error`` is the child's exception."""
        if _os.getpid() != self._pid:
            end_fork(error, wording.read_error(error)[1] if error is not None else "")

    @_os.with_room
    def startTest(self, test: unittest.TestCase) -> None:
        self._end_with_zygote()
        files.restore()
        super().startTest(test)
        planned = self._planned or test
        if not self._runs:
            self._started_s = _os.monotonic()
        self._runs, self._has_ending = self._runs + 1, False
        try:
            limit_s = timeout_of(planned)
        except ValueError:  # setUp() of a class with ranks raises the error
            limit_s = float(TIMEOUT_DEFAULT)
        self.send(TestStarted(self._name(planned), limit_s))

    @_os.with_room
    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        escaping = sys.exc_info()[1]
        if escaping is not None:  # unittest does not catch it, and runs no further test
            self._error = escaping
            self._fail(_problem(escaping))
        elif not self._has_ending:
            self._fail(Remark("unittest ended the test without a result."))
        try:
            verdict.check()
        except verdict.UnjudgedRanksError as error:
            self._fail(Remark(str(error)))
        self._took_s = _os.monotonic() - self._started_s
        self.end_fork(self._error)
        self.interrupt, self._error = escaping, None

    def over(self) -> None:
        """Report the result of the current test, if it ran, now that unittest has finished it."""
        planned, status = self._planned, self._status
        self._planned = None
        sys.setrecursionlimit(max(self._frames, sys.getrecursionlimit()))  # undo a test's lower limit
        if planned is None or status is None:
            return
        if self._runs > 1 and status is Status.FAILED:
            self._problems.append(Remark(f"The class ran this test {self._runs} times; any failure counts."))
        # What our base classes have collected, without the output of ranks that passed
        found = [one for one in getattr(planned, "_outcomes", ()) if isinstance(one, Outcome)]
        ranks = tuple(replace(one, output="") if one.ok else one for one in found)
        reasons, problems = "; ".join(self._reasons), tuple(self._problems)
        self.send_end(TestResult(self._name(planned), status, self._took_s, problems, reasons, ranks=ranks))

    def _name(self, test: unittest.TestCase) -> TestName:
        return replace(self._class, method=test._testMethodName)

    def _end_with_zygote(self) -> None:
        """If the zygote is gone, wait for the kernel to kill this process too: a test that began before that would fail
        for another test's deed. The supervisor runs it in another process instead.
        """
        if not self._has_outlived_zygote and provider.given_zygote_ended():
            _os.sleep(_END_S)
            self._has_outlived_zygote = True

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._end(Status.PASSED)

    @_os.with_room
    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._error = self._error or err[1]
        problem = _problem(err[1], where="" if test is self._planned else str(test))
        if _is_fixture(test):
            self.send_end(TestResult(self._class, Status.FAILED, 0.0, (problem,)))
        else:
            self._fail(problem)

    addFailure = addError

    @_os.with_room
    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._error = self._error or err[1]
            self._fail(_problem(err[1], where=str(subtest)))

    def _end(self, status: Status) -> None:
        self._has_ending = True
        self._status = min(self._status or status, status, key=_FROM_WORST.index)

    def _fail(self, problem: Problem) -> None:
        self._end(Status.FAILED)
        self._problems.append(problem)
        if self.failfast:
            self.stop()

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        if _is_fixture(test):
            for left in list(self._left.values()):
                self.send_end(TestResult(left, Status.SKIPPED, 0.0, reason=reason))
            return
        self._end(Status.SKIPPED)
        self._reasons.append(reason)

    @_os.with_room
    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        if isinstance(err[1], WorldFailure) and not may_be_expected(err[1].report.outcomes):
            self._fail(_problem(err[1]))  # see may_be_expected(): not an expected failure
        else:
            self._end(Status.XFAIL)

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._end(Status.UNEXPECTED_SUCCESS)
        if self.failfast:
            self.stop()


def _is_fixture(test: object) -> bool:
    """Whether ``test`` is unittest's placeholder for a failed ``setUpClass`` or ``tearDownClass``."""
    return not isinstance(test, unittest.TestCase)


def _escaped(error: BaseException) -> Problem:
    """Describe an exception that has escaped from unittest's loop, outside of any test."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = [_FIXTURES[name] for name in names if name in _FIXTURES]
    return _problem(error, where=called[-1] if called else "")


def _problem(error: BaseException, where: str = "") -> Problem:
    if isinstance(error, WorldFailure):
        return RanksFailed(error.report, where)  # the parent half's traceback is no help
    if isinstance(error, ZygoteLostError):  # nor is it here
        way = "A signal that the test sent to a parent process or process group may have killed it."
        return Remark(f"The ranks were lost: {error}. {way}")
    message, trace = wording.read_error(error)
    return Raised(message, trace.rstrip(), where)
