"""What a class process reports about a test, and the meaning of its end, without processes: silence is no pass."""

import contextlib
import itertools
import re
import signal
import unittest
from typing import Any

import pytest

from torch_ext.results import Died, Raised, Remark, Status, TestName
from torch_ext.runner.class_process import _ClassResult, _Suite, check_calls
from torch_ext.runner.class_runner import ClassFacts, decide_next
from torch_ext.runner.messages import ClassEnded, TestEnded

pytestmark = pytest.mark.usefixtures("before")


class FakeChannel:
    def __init__(self):
        self.messages: list[Any] = []

    def send(self, message):
        self.messages.append(message)


TESTS = [TestName("test_a.py", "TestA", f"test_{letter}") for letter in "ab"]


def ending(test):
    """Run one test as a class process does, and return its result."""
    channel = FakeChannel()
    result = _ClassResult(channel, 2, TESTS, failfast=False)
    check_calls(test)
    suite = _Suite(result)
    suite.addTest(test)
    with contextlib.suppress(KeyboardInterrupt):
        suite.run(result)
    result.over()
    (ended,) = (message.result for message in channel.messages if isinstance(message, TestEnded))
    return ended


def case(**methods):
    return type("TestA", (unittest.TestCase,), {"test_a": lambda self: None, **methods})("test_a")


def interrupt(self):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["test_a", "a cleanup"])
def test_a_trace_begins_in_the_code_of_the_test(where):
    def fails(*of_a_method):
        signal.raise_signal(signal.SIGINT)

    def adds(self):
        self.addCleanup(fails)

    ended = ending(case(test_a=fails if where == "test_a" else adds))
    (problem,) = ended.problems
    assert isinstance(problem, Raised)
    found = re.findall(r'File ".*/([^/]+)", line \d+, in (\w+)', problem.trace)
    assert found == [("test_class_process.py", "fails")], problem.trace


def interrupt_in_subtest(self):
    with self.subTest(part=1):
        interrupt(self)


@pytest.mark.parametrize(
    "methods",
    [
        *({where: interrupt} for where in ("setUp", "test_a", "tearDown")),
        {"test_a": lambda self: self.addCleanup(interrupt, self)},
        {"test_a": interrupt_in_subtest},
        {"test_a": lambda self: self.skipTest("no"), "tearDown": interrupt},
        {"test_a": unittest.expectedFailure(interrupt)},
    ],
    ids=["setUp", "test_a", "tearDown", "in a cleanup", "in a sub-test", "after a skip", "of an expected failure"],
)
def test_interrupt_is_a_failure_with_its_traceback(methods):
    ended = ending(case(**methods))
    assert ended.status is Status.FAILED
    (problem,) = ended.problems
    assert isinstance(problem, Raised) and problem.sentence == "KeyboardInterrupt" and "in interrupt" in problem.trace


def test_test_without_a_result_from_unittest_is_a_failure():
    class Silent(unittest.TestCase):
        def run(self, result=None):
            result.startTest(self)
            result.stopTest(self)

        def test_a(self):
            pass

    ended = ending(Silent("test_a"))
    assert ended.status is Status.FAILED
    assert ended.problems == (Remark("unittest ended the test without a result."),)


# Bodies of a test, by the word for how they end.
ENDINGS = {
    "passes": lambda self: None,
    "fails": lambda self: self.fail("it fails"),
    "raises": lambda self: int("x"),
    "skips": lambda self: self.skipTest("it skips"),
    "fails in a part": lambda self: fail_in_a_part(self),
}


def fail_in_a_part(self):
    with self.subTest(part=1):
        self.fail("it fails in a part")


@pytest.mark.parametrize("expected", [False, True])
@pytest.mark.parametrize("inner", ["run", "__call__"])
def test_class_that_repeats_a_test_has_one_merged_result(expected, inner):
    for number in (1, 2, 3):
        for endings in itertools.product(ENDINGS, repeat=number):
            tests = []
            for _ in range(2):
                left = list(endings)

                def body(self, left=left):
                    ENDINGS[left.pop(0)](self)

                def again(self, result=None, left=left):
                    while left:
                        getattr(unittest.TestCase, inner)(self, result)

                tests.append(case(test_a=unittest.expectedFailure(body) if expected else body, **{inner: again}))
            oracle = unittest.TestResult()
            tests[0](oracle)
            ended = ending(tests[1])
            assert (ended.status.counted is Status.FAILED) == (not oracle.wasSuccessful()), endings
            if number == 1 and oracle.wasSuccessful():
                xfail = Status.XFAIL if oracle.expectedFailures else Status.PASSED
                assert ended.status is (Status.SKIPPED if oracle.skipped else xfail), endings
            message = " ".join(str(problem) for problem in ended.problems)
            for _, trace in oracle.failures + oracle.errors:
                assert trace.rstrip().rpartition("\n")[2] in message, endings
            assert ("ran this test" in message) == (number > 1 and ended.status is Status.FAILED)


def test_test_run_by_another_test_has_a_separate_result():
    class Beside(unittest.TestCase):
        def run(self, result=None):
            super().run(result)
            if self._testMethodName == "test_a":
                Beside("test_b").run(result)

        def test_a(self):
            pass

        def test_b(self):
            self.fail("b fails")

    channel = FakeChannel()
    result = _ClassResult(channel, 2, TESTS, failfast=False)
    suite = _Suite(result)
    suite.addTests([Beside("test_a"), Beside("test_b")])
    suite.run(result)
    ended = [message.result for message in channel.messages if isinstance(message, TestEnded)]
    assert [(each.test.method, each.status) for each in ended] == [("test_a", Status.FAILED), ("test_b", Status.FAILED)]
    assert isinstance(ended[0].problems[0], Raised) and "test_b" in ended[0].problems[0].where


async def coroutine(self):
    raise AssertionError("it ran")


def generator(self):
    raise AssertionError("it ran")
    yield


@pytest.mark.parametrize("method", [coroutine, generator])
@pytest.mark.parametrize("where", ["setUp", "test_a", "tearDown"])
def test_method_whose_call_runs_nothing_is_refused(where, method):
    ended = ending(case(**{where: method}))
    assert ended.status is Status.FAILED
    (problem,) = ended.problems
    assert isinstance(problem, Raised) and problem.sentence.startswith(f"TypeError: {where}() returned a ")


def test_awaited_tests_run_and_other_coroutines_are_refused():
    class Asynchronous(unittest.IsolatedAsyncioTestCase):
        async def test_runs(self):
            self.fail("it ran")

        def test_generator(self):
            yield

    (problem,) = ending(Asynchronous("test_runs")).problems
    assert isinstance(problem, Raised) and problem.sentence == "AssertionError: it ran"
    (problem,) = ending(Asynchronous("test_generator")).problems
    assert isinstance(problem, Raised) and "returned a generator" in problem.sentence


def test_method_on_the_instance_is_unchanged():
    test = case()
    before = test.test_a
    check_calls(test)
    assert test.test_a == before


# The end of a class process: silence is no pass

EXITED = Died("It exited with code 0.")
KILLED = Died("It was killed.")
RAISED = Raised("KeyboardInterrupt", "Traceback ...")
ENDED, REPORTED, LEFT = ClassEnded(), ClassEnded(True), ClassEnded(True, RAISED)


# Whether a test runs, how many have ended and are left, the last word, and how the process died; then the result.
ENDS = [
    (ClassFacts(False, 3, 0, ENDED), (None, False)),
    # A process that never said that it ended fails the class whatever its exit code.
    (ClassFacts(False, 3, 0, None), (EXITED, False)),
    (ClassFacts(False, 3, 0, None, KILLED), (KILLED, False)),
    (ClassFacts(False, 3, 0, ENDED, KILLED), (KILLED, False)),
    # A running test fails with the cause of the end, and the tests after it run.
    (ClassFacts(True, 1, 0, None), (EXITED, False)),
    (ClassFacts(True, 0, 2, None, KILLED), (KILLED, True)),
    (ClassFacts(True, 0, 2, REPORTED, KILLED), (KILLED, True)),
    (ClassFacts(True, 0, 2, LEFT, KILLED), (RAISED, True)),
    # A test has reported the interrupt, so no other message repeats it.
    (ClassFacts(False, 1, 2, REPORTED), (None, True)),
    (ClassFacts(False, 1, 0, REPORTED), (None, False)),
    # Between two tests: the class fails and the rest runs; before the first one, the class ends.
    (ClassFacts(False, 1, 2, LEFT), (RAISED, True)),
    (ClassFacts(False, 0, 2, LEFT), (RAISED, False)),
    (ClassFacts(False, 1, 2, None, KILLED), (KILLED, True)),
    (ClassFacts(False, 0, 2, None, KILLED), (KILLED, False)),
    *((ClassFacts(False, ended, 2, None, KILLED, lost_zygote=True), (None, True)) for ended in (0, 1)),
    (ClassFacts(False, 1, 0, None, KILLED, lost_zygote=True), (KILLED, False)),
    # Tests that unittest leaves out are missed.
    (ClassFacts(False, 0, 2, ENDED), (Remark("unittest ended the class before 2 of its tests began."), False)),
    (ClassFacts(False, 1, 2, ENDED), (None, True)),
]


@pytest.mark.parametrize(("facts", "following"), ENDS)
def test_decision_after_the_end_of_a_class_process(facts, following):
    assert decide_next(facts, facts.death or EXITED) == following
