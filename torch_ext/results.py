"""Results of tests, names of tests and the events of a run, as data. The runner's reporters render them, and
``upstream`` judges them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_ext.world.outcome import Outcome
    from torch_ext.world.verdict import WorldReport  # keeps a list of cached names fast


# Exit codes of a command. A command that ends by a signal other than SIGINT has that signal's code.
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class SetupError(RuntimeError):
    """The run cannot start: a usage error, or torch or the device cannot be loaded. The message is for users."""


class OutputError(RuntimeError):
    """A report cannot be written, such as to a full disk. The message is for users."""


class Status(Enum):
    """The endings of a test. Each counts as passed, failed, skipped or flaky."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAIL = "expected failure"
    UNEXPECTED_SUCCESS = "unexpected success"
    FLAKY = "flaky"

    @property
    def counted(self) -> Status:
        """PASSED, FAILED, SKIPPED or FLAKY: the column of the summary that counts this ending.

        >>> Status.XFAIL.counted, Status.UNEXPECTED_SUCCESS.counted
        (<Status.PASSED: 'passed'>, <Status.FAILED: 'failed'>)
        """
        if self is Status.XFAIL:
            return Status.PASSED
        return Status.FAILED if self is Status.UNEXPECTED_SUCCESS else self


@dataclass(frozen=True, slots=True)
class TestName:
    """The address of one test; of a class if ``method`` is empty; of a file if ``cls`` is empty too."""

    __test__ = False  # pytest would collect it by its name

    file: str  # path below the root, with forward slashes and its suffix, such as distributed/test_a.py
    cls: str = ""
    method: str = ""  # with its parameters

    @property
    def id(self) -> str:
        """The spelling in reports and patterns.

        >>> TestName("a/test_b.py", "TestC", "test_d").id, TestName("a/test_b.py").id
        ('a/test_b.py::TestC::test_d', 'a/test_b.py')
        """
        return "::".join(part for part in (self.file, self.cls, self.method) if part)

    @property
    def dotted(self) -> str:
        """Unittest's spelling, relative to the root.

        >>> TestName("a/test_b.py", "TestC", "test_d").dotted
        'a.test_b.TestC.test_d'
        """
        module = self.file.removesuffix(".py").replace("/", ".")
        return ".".join(part for part in (module, self.cls, self.method) if part)


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources that a test needs, as far as its class and decorators declare them before it runs; those of a class
    are enough for each of its tests.
    """

    world_size: int = 0  # number of ranks; 0: none, or unknown before the test runs
    processes: int = 1  # number of processes of the ranks: `world_size`, or 1 if they are threads; at least 1
    devices: int = 0  # accelerator devices without which the test skips; 0: any number is enough
    alone: bool = False  # no other class may run at the same time
    hosts: int = 1  # number of hosts of the ranks, with as many ranks on each

    @property
    def of_each_host(self) -> Needs:
        """The needs of a class on one of its hosts.

        >>> Needs(processes=4, hosts=2).of_each_host == Needs(processes=2)
        True
        """
        return Needs(processes=-(-self.processes // self.hosts), alone=self.alone)


@dataclass(frozen=True, slots=True)
class Began:
    """A test, or if the method is empty, its class has begun."""

    test: TestName


@dataclass(frozen=True, slots=True)
class Over:
    """A class is over: no further event of it follows."""

    test: TestName


@dataclass(frozen=True, slots=True)
class Stalled:
    """A test has made no progress for long. ``text``: why no hang is proven, and the places of its ranks."""

    test: TestName
    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Sent a few times a second while tests run, for reporters that show the time."""


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """The whole plan runs again. ``number`` is 2 for the first repetition."""

    number: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The last event of a run, also after an interrupt."""

    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception outside of any rank: in a test's parent half, a fixture of its class, or the import of its file."""

    sentence: str  # the first line of its message, such as "ValueError: no"
    trace: str  # its traceback, without the harness's own frames
    where: str = ""  # the sub-test or fixture that raised it, such as `setUpClass` of a class; empty: the test itself


@dataclass(frozen=True, slots=True)
class RanksFailed:
    """Some ranks of a test did not pass."""

    report: WorldReport
    where: str = ""

    @property
    def sentence(self) -> str:
        return self.report.verdict.summary


@dataclass(frozen=True, slots=True)
class Died:
    """The process of a test or its class ended, or was killed, before it was done."""

    sentence: str  # describes the process and its end
    stacks: str = ""  # faulthandler's output if it hung; empty if it ended by itself


@dataclass(frozen=True, slots=True)
class Remark:
    """A failure that one sentence explains."""

    sentence: str


Problem = Raised | RanksFailed | Died | Remark


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of one test. A failed import of a file and a failed ``setUpClass`` are results too.

    The process that runs the test sets ``test`` to ``ranks``; the runner's ``Rounds`` sets the rest.
    """

    __test__ = False

    test: TestName  # without a method for a failure of the class, without a class for a failure of the file
    status: Status
    duration_s: float  # wall time in seconds, including start and end of its world
    problems: tuple[Problem, ...] = ()  # causes of its failure; empty unless it failed
    reason: str = ""  # why it was skipped, in words that a user can act on
    warnings: tuple[str, ...] = ()  # sentences that the summary repeats
    output: str = ""  # its parent half's output, without hidden frames; empty unless the test failed
    ranks: tuple[Outcome, ...] = ()  # of each world that it started; those that passed have no output
    round: int = 1  # number of its round, from 1
    attempt: int = 1  # number of its attempt in this round, from 1
    again: bool = False  # it failed and runs again, so this is not its final result
    earlier: tuple[TestResult, ...] = ()  # in the last attempt's result, the earlier attempts; all failed

    @property
    def died(self) -> bool:
        """Whether its process died while it ran."""
        return any(isinstance(problem, Died) for problem in self.problems)

    @property
    def failed_ranks(self) -> list[Outcome]:
        """The ranks of each world that did not pass, by number."""
        reports = [problem.report for problem in self.problems if isinstance(problem, RanksFailed)]
        return [one for report in reports for one in sorted(report.outcomes, key=lambda one: one.rank)]


# The events of running tests, and those of a whole run.
ClassEvent = Began | Over | TestResult | Tick | Stalled
Event = ClassEvent | RoundBegan | RunEnded
Sink = Callable[[ClassEvent], None]


# For an upstream file without a test: it sets ``TestCase = object`` without CUDA, or is no test file.
WITHOUT_TESTS = "the file defines no test here"


def import_failure(file: str, error: str, left: str = "") -> TestResult:
    """Return the result of a failed import with traceback ``error``; ``left``: a reason if the file skipped itself."""
    if left:
        return TestResult(TestName(file), Status.SKIPPED, 0.0, reason=left)
    return TestResult(TestName(file), Status.FAILED, 0.0, (raised(error),))


def raised(traceback: str) -> Raised:
    """Return the problem for a traceback."""
    trace = traceback.rstrip()
    return Raised(trace.rpartition("\n")[2], trace)
