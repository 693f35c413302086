"""Results of tests, names of tests and the events of a run, as data. The runner's reporters make text of them, and
``upstream`` judges them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_ext.world.outcome import Outcome
    from torch_ext.world.verdict import WorldReport  # a list of cached names must not pay for its import


# Exit codes of a command; what ended by another signal than SIGINT has that signal's.
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class SetupError(RuntimeError):
    """Nothing can run: torch, or the device that was asked for, cannot be loaded. The message is for users."""


class OutputError(RuntimeError):
    """A report cannot be written, because its stream takes no more. The message is for users."""


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
        """PASSED, FAILED, SKIPPED or FLAKY: the column of the summary in which this ending is counted.

        >>> Status.XFAIL.counted, Status.UNEXPECTED_SUCCESS.counted
        (<Status.PASSED: 'passed'>, <Status.FAILED: 'failed'>)
        """
        if self is Status.XFAIL:
            return Status.PASSED
        return Status.FAILED if self is Status.UNEXPECTED_SUCCESS else self


@dataclass(frozen=True, slots=True)
class TestName:
    """The address of one test; with an empty ``method`` of its class, with an empty ``cls`` too of its file."""

    __test__ = False  # pytest and unittest would take the name for a test class

    file: str  # path below the root, with forward slashes and its suffix, such as distributed/test_a.py
    cls: str = ""
    method: str = ""  # with its parameters

    @property
    def id(self) -> str:
        """The spelling that is shown to users and accepted from them.

        >>> TestName("a/test_b.py", "TestC", "test_d").id, TestName("a/test_b.py").id
        ('a/test_b.py::TestC::test_d', 'a/test_b.py')
        """
        return "::".join(part for part in (self.file, self.cls, self.method) if part)

    @property
    def dotted(self) -> str:
        """The spelling of unittest, relative to the root.

        >>> TestName("a/test_b.py", "TestC", "test_d").dotted
        'a.test_b.TestC.test_d'
        """
        module = self.file.removesuffix(".py").replace("/", ".")
        return ".".join(part for part in (module, self.cls, self.method) if part)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a test asks of the machine, as far as its class and decorators say so before it runs."""

    world_size: int = 0  # its ranks; 0: it has none, or they are not known before it runs
    processes: int = 1  # that its ranks are: `world_size`, or 1 where they are threads; never below 1
    devices: int = 0  # accelerator devices without which it skips; 0: any number will do
    alone: bool = False  # nothing else may run beside its class
    hosts: int = 1  # on which its ranks run


@dataclass(frozen=True, slots=True)
class Began:
    """A test, or with an empty method its class, has begun."""

    test: TestName


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing more comes of a class."""

    test: TestName


@dataclass(frozen=True, slots=True)
class Stalled:
    """A test has made no progress for long. ``text``: why that does not prove a hang, and where its ranks are."""

    test: TestName
    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A moment has passed. Sent a few times a second while tests run, for views that show the time."""


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """The whole plan runs once more. ``number`` is 2 for the first repetition."""

    number: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The last event of a run, also after an interrupt."""

    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception outside of any rank: in a test's parent half, a fixture of its class, or the import of its file."""

    error: str  # the first line of what it says, such as "ValueError: no"
    trace: str  # its traceback, without the harness's own frames
    where: str = ""  # what raised it if that is not the test itself: a sub-test, or `setUpClass` of a class

    @property
    def sentence(self) -> str:
        return self.error


@dataclass(frozen=True, slots=True)
class RanksFailed:
    """The ranks of a test did not all pass."""

    report: WorldReport
    where: str = ""

    @property
    def sentence(self) -> str:
        return self.report.verdict.summary


@dataclass(frozen=True, slots=True)
class Died:
    """The process that runs a test or its class ended, or was ended, before it was done."""

    sentence: str  # which process, and how it ended
    stacks: str = ""  # where it hung, as faulthandler tells it; empty if it ended by itself


@dataclass(frozen=True, slots=True)
class Remark:
    """A failure that one sentence explains."""

    sentence: str


Problem = Raised | RanksFailed | Died | Remark


@dataclass(frozen=True, slots=True)
class TestResult:
    """How one test ended. A file that cannot be imported and a ``setUpClass`` that raises are results too.

    What runs tests fills in ``test`` to ``ranks``; the rest is known to what counts rounds and attempts.
    """

    __test__ = False

    test: TestName  # without a method for a failure of the class, without a class for a failure of the file
    status: Status
    duration_s: float  # wall time in seconds, start and end of its world included
    problems: tuple[Problem, ...] = ()  # why it failed; empty unless it did
    reason: str = ""  # why it was skipped, in words that a user can act on
    warnings: tuple[str, ...] = ()  # sentences worth repeating in the summary
    output: str = ""  # what its parent half printed, without hidden frames; empty unless the test failed
    ranks: tuple[
        Outcome, ...
    ] = ()  # several of one number if it started several worlds; those that passed have no output
    round: int = 1  # which of the rounds of the run it belongs to, from 1
    attempt: int = 1  # how often the test has run in this round, this time included
    again: bool = False  # it failed and runs once more, so that this is not its last word
    earlier: tuple[TestResult, ...] = ()  # the attempts before this one, if it is the last; all failed

    @property
    def died(self) -> bool:
        """Whether its process ended under it."""
        return any(isinstance(problem, Died) for problem in self.problems)

    @property
    def failed_ranks(self) -> list[Outcome]:
        """The ranks of each world that did not pass, by number."""
        reports = [problem.report for problem in self.problems if isinstance(problem, RanksFailed)]
        return [one for report in reports for one in sorted(report.outcomes, key=lambda one: one.rank)]


# What happens while tests run, and the events of a whole run.
ClassEvent = Began | Over | TestResult | Tick | Stalled
Event = ClassEvent | RoundBegan | RunEnded
Sink = Callable[[ClassEvent], None]


# Why a file of upstream's has no result: it has ``TestCase = object`` where there is no CUDA, or is no test file.
WITHOUT_TESTS = "the file defines no test here"


def import_failure(file: str, error: str, left: str = "") -> TestResult:
    """Return the result of a file that cannot be imported; ``error`` is the traceback. ``left``: why it is left out."""
    if left:
        return TestResult(TestName(file), Status.SKIPPED, 0.0, reason=left)
    return TestResult(TestName(file), Status.FAILED, 0.0, (raised(error),))


def raised(traceback: str) -> Raised:
    """Return the problem that a traceback is."""
    trace = traceback.rstrip()
    return Raised(trace.rpartition("\n")[2], trace)
