"""Counts the results of a run against its plan, tracks the running classes, and has the helpers of all reporters."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from torch_ext.results import (
    Began,
    Event,
    OutputError,
    Over,
    RoundBegan,
    RunEnded,
    SetupError,
    Stalled,
    Status,
    TestName,
    TestResult,
    Tick,
)
from torch_ext.runner.schedule import Batch, Plan

COLUMNS = (Status.PASSED, Status.FAILED, Status.SKIPPED, Status.FLAKY)

# Called with every event of one run, on the main thread of the supervisor. An ``OutputError`` from it ends the run.
# After a result with ``again``, another result of the same test and round replaces it.
Reporter = Callable[[Event], None]


def counts(results: Iterable[TestResult]) -> Counter[Status]:
    """Return the numbers of passed, failed, skipped and flaky ``results``."""
    return Counter(result.status.counted for result in results)


class Tally:
    """The results of one run, in order of arrival; of several attempts at a test, the last. Each round expects all
    tests.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._earlier: list[TestResult] = []  # of earlier rounds
        self._lost: list[TestName] = []  # tests without a result in earlier rounds
        self._latest: dict[TestName, TestResult] = {}
        self._batches = {batch.name: batch for batch in plan}
        self.running: dict[TestName, tuple[TestName, float]] = {}  # each class, or its current test, and the start time
        self._begin_round()

    def _begin_round(self) -> None:
        self._latest, self.began_s = {}, time.monotonic()
        self.waiting = dict.fromkeys(self.plan.tests)  # tests of the plan without a result in this round

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundBegan):
            self._earlier, self._lost = self.results, self.missing()
            self._begin_round()
        elif isinstance(event, Began):
            self.running[TestName(event.test.file, event.test.cls)] = event.test, time.monotonic()
        elif isinstance(event, Over):
            self.running.pop(event.test, None)
        elif isinstance(event, TestResult):
            self._count(event)

    def _count(self, result: TestResult) -> None:
        test = result.test
        known = self._latest.get(test)
        if known is None or result.attempt > 1 or known.status.counted is not Status.FAILED:
            self._latest[test] = result
        self.waiting.pop(test, None)
        cls = TestName(test.file, test.cls)
        if self.running.get(cls, (None, 0.0))[0] == test:
            self.running[cls] = cls, time.monotonic()

    @property
    def results(self) -> list[TestResult]:
        """The results of all rounds so far."""
        return [*self._earlier, *self._latest.values()]

    def batch_of(self, test: TestName) -> Batch | None:
        """Return the planned class of ``test``; None for a file that could not be imported."""
        return self._batches.get(TestName(test.file, test.cls))

    def results_of(self, batch: Batch) -> list[TestResult]:
        """Return the results of one class in this round so far, including its fixtures' failures."""
        return [one for test, one in self._latest.items() if TestName(test.file, test.cls) == batch.name]

    def missing(self) -> list[TestName]:
        """Return the planned tests without a result."""
        return [*self._lost, *self.waiting]

    @property
    def passed(self) -> bool:
        """Whether every planned test has a result, and none failed. A flaky test has not."""
        return not self.missing() and not counts(self.results)[Status.FAILED]


class InOrder:
    """A reporter that forwards all events to another, class after class in the order of the plan.

    Holds the events of a class until all earlier classes, or the round, are over. Forwards a failure, a stall and the
    beginning of a class at once.
    """

    def __init__(self, plan: Plan, reporter: Reporter) -> None:
        self._plan, self._reporter = plan, reporter
        self._begin_round()

    def _begin_round(self) -> None:
        self._held: dict[TestName, list[Event]] = {batch.name: [] for batch in self._plan}
        self._over: set[TestName] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Tick):
            return
        if isinstance(event, (RoundBegan, RunEnded)):
            for key in self._held:
                self._release(key)
            self._begin_round()
            self._reporter(event)
            return
        key = TestName(event.test.file, event.test.cls)
        if key not in self._held or _is_urgent(event):
            self._reporter(event)
        else:
            self._held[key].append(event)
        if isinstance(event, Over):
            self._over.add(key)
        for first in list(self._held):
            self._release(first)
            if first not in self._over:
                break
            del self._held[first]

    def _release(self, key: TestName) -> None:
        held, self._held[key] = self._held[key], []
        for event in held:
            self._reporter(event)


def _is_urgent(event: Event) -> bool:
    if isinstance(event, TestResult):
        return event.status.counted is Status.FAILED
    return isinstance(event, Stalled) or (isinstance(event, Began) and not event.test.method)


@contextmanager
def writing(failure: str, kind: type[OutputError | SetupError] = OutputError) -> Iterator[None]:
    """Context: turn an OSError into an error that begins with ``failure``, except BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise kind(f"{failure}: {os.strerror(error.errno or 0)}") from error


class ReportFile:
    """The file of the report ``what``. Opens ``path`` (``-``: stdout) and its folder before the run, to detect errors,
    by a SetupError, and to remove an older report.
    """

    def __init__(self, path: str, what: str) -> None:
        self._failure = f"{what} cannot be written to {'stdout' if path == '-' else path}"
        self._stream: TextIO | None = None
        if path == "-":
            return
        if path.endswith(".py"):
            raise SetupError(f"{self._failure}, a Python file")
        with writing(self._failure, SetupError):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed with the report

    def write(self, text: str) -> None:
        """Write ``text`` and flush. Raises OutputError, or BrokenPipeError if the reader has closed the pipe."""
        with writing(self._failure):
            stream = sys.stdout if self._stream is None else self._stream
            stream.write(text)
            stream.flush()

    def close(self) -> None:
        """Close the file. Raises as :meth:`write`."""
        if self._stream is not None:
            with writing(self._failure):
                self._stream.close()
