"""Every message between the supervisor and the processes that hold tests. Standard library and own layer only.

====================  =====================================================================================
from -> to            messages
====================  =====================================================================================
supervisor -> child   :class:`ClassOrder`, or the name of a module, as the payload of the child's order
child -> supervisor   of a module one :class:`TestNames`
class process ->      :class:`TestStarted`, :class:`Body`, :class:`TestEnded`, and the world's ``Notice``;
supervisor            last of all :class:`ClassEnded`
====================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_ext.results import Needs, Problem, TestName, TestResult


@dataclass(frozen=True)
class TestNames:
    """The tests of a module, as ``(class, method)`` in their order, with their needs and device."""

    __test__ = False

    names: tuple[tuple[str, str], ...]
    needs: tuple[Needs, ...] = ()
    device: str = ""


@dataclass(frozen=True)
class ClassOrder:
    """Run these tests of one class, in this order, under this environment."""

    module: str
    tests: tuple[TestName, ...]
    environment: Mapping[str, str]
    argv: tuple[str, ...]
    scratch: str
    failfast: bool


@dataclass(frozen=True)
class TestStarted:
    """A test has begun, or begins again. Its process ends its ranks, if any, after ``timeout_s``; see :class:`Body`."""

    __test__ = False

    test: TestName
    timeout_s: float


@dataclass(frozen=True)
class Body:
    """The method of a test with ranks begins or ends. It waits for its ranks and ends them at the time limit."""

    begins: bool


@dataclass(frozen=True)
class TestEnded:
    """A test is over or, without a method, ``setUpClass`` or ``tearDownClass`` has failed."""

    __test__ = False

    result: TestResult
    printed_bytes: int = 0  # size of the process's output; what follows does not belong to the test


@dataclass(frozen=True)
class ClassEnded:
    """The whole order has run, including ``tearDownClass`` and ``tearDownModule``; the process exits next. ``early``:
    an exception that unittest does not catch, such as ``KeyboardInterrupt``, ended it.
    """

    early: bool = False
    problem: Problem | None = None  # the exception; None if the result of a test reports it
