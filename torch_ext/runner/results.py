"""What became of a test, and how a test is named. Everything else in the runner speaks in these words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["SetupError", "Status", "TestName", "TestResult"]


class SetupError(RuntimeError):
    """Nothing can run: torch cannot be loaded, or not the device that was asked for. The message is for users."""


class Status(Enum):
    """The five endings of a test; every one of them counts as passed, failed or skipped."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAIL = "expected failure"
    UNEXPECTED_SUCCESS = "unexpected success"

    @property
    def counted(self) -> Status:
        """PASSED, FAILED or SKIPPED: the column of the summary in which this ending is counted.

        >>> Status.XFAIL.counted, Status.UNEXPECTED_SUCCESS.counted
        (<Status.PASSED: 'passed'>, <Status.FAILED: 'failed'>)
        """
        if self is Status.XFAIL:
            return Status.PASSED
        return Status.FAILED if self is Status.UNEXPECTED_SUCCESS else self


@dataclass(frozen=True, slots=True)
class TestName:
    """The address of one test; with an empty ``method`` that of its class, with an empty ``cls`` too that of its file.

    Attributes:
        file: path below the root, with forward slashes and its suffix, such as ``distributed/test_a.py``.
        cls: name of the class.
        method: name of the test method, parameters included.
    """

    __test__ = False  # pytest and unittest would take the name for a test class

    file: str
    cls: str = ""
    method: str = ""

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
class TestResult:
    """How one test ended. A file that cannot be imported and a ``setUpClass`` that raises are results too.

    Attributes:
        test: the test; without a method for a failure of the class, without a class for a failure of the file.
        status: its ending.
        duration_s: wall time in seconds, world start and end included.
        message: the finished failure text, shown as it is; empty unless the test failed.
        reason: why it was skipped, in words that a user can act on.
        warnings: one text for each warning worth repeating in the summary.
    """

    __test__ = False

    test: TestName
    status: Status
    duration_s: float
    message: str = ""
    reason: str = ""
    warnings: tuple[str, ...] = ()
