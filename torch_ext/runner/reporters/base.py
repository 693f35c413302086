"""What every reporter of results can do, results counted against the plan, and files that reports are written to."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from torch_ext.results import Began, OutputError, SetupError, Status, TestName, TestResult
from torch_ext.runner.schedule import Batch, Plan

__all__ = ["ReportFile", "Reporter", "Tally", "counts"]


def counts(results: Iterable[TestResult]) -> Counter[Status]:
    """Return how many of ``results`` count as passed, failed, skipped and flaky."""
    return Counter(result.status.counted for result in results)


class Tally:
    """The results of one run, in the order in which they came; of several attempts at a test the last.

    Tests are missed by round: after :meth:`new_round`, the whole plan is expected once more.
    """

    def __init__(self, plan: Plan) -> None:
        self.results: list[TestResult] = []
        self._lost: list[TestName] = []  # by the rounds before
        self._waiting: dict[TestName, None] = {}
        self.plan = plan
        self._batches = {(batch.file.name, batch.cls): batch for batch in plan}
        self.new_round()

    def new_round(self) -> None:
        """Expect every test of the plan, though it may have run in an earlier round."""
        self._lost += self._waiting
        self._places: dict[TestName, int] = {}
        self._by_batch: dict[tuple[str, str], dict[int, TestResult]] = {}
        self._waiting = dict.fromkeys(self.plan.tests)
        self._open = Counter((test.file, test.cls) for test in self.plan.tests)

    def add(self, result: TestResult) -> None:
        """Count ``result``, in the place of an earlier attempt at the same test."""
        place = self._places.get(result.test, -1) if result.attempt > 1 else -1
        if place < 0:
            place = len(self.results)
            self.results.append(result)
        self.results[place] = result
        self._places[result.test] = place
        self._by_batch.setdefault((result.test.file, result.test.cls), {})[place] = result
        if result.test in self._waiting:
            del self._waiting[result.test]
            self._open[result.test.file, result.test.cls] -= 1

    def batch_of(self, test: TestName) -> Batch | None:
        """The planned class of ``test``; None for a file that could not be imported."""
        return self._batches.get((test.file, test.cls))

    def results_of(self, batch: Batch) -> list[TestResult]:
        """The results of one class in this round so far, that of its ``setUpClass`` included."""
        return list(self._by_batch.get((batch.file.name, batch.cls), {}).values())

    def missing(self) -> list[TestName]:
        """The planned tests that have no result."""
        return [*self._lost, *self._waiting]

    def missing_of(self, batch: Batch) -> int:
        """How many tests of one class have no result in this round."""
        return self._open[batch.file.name, batch.cls]

    @property
    def passed(self) -> bool:
        """Whether everything that was planned ran, or was skipped with a reason, and nothing failed. A test that failed
        and passed when it ran again is flaky, and no failure.
        """
        return not self.missing() and not counts(self.results)[Status.FAILED]


class Reporter(Protocol):
    """Takes the results of one run. Called in the supervisor, on the main thread, never at once from two places.

    Whatever writes raises ``results.OutputError`` where it cannot, in words for users; the run then ends.
    """

    def begin(self, began: Began) -> None:
        """Take note that a class or a test has begun. Several may be under way at once. Must not block either."""
        ...

    def add(self, result: TestResult) -> None:
        """Take one result, as soon as its test has ended. Must not block on anything but its own output.

        A result with ``again`` is followed by another of the same test and round, which counts in its place.
        """
        ...

    def new_round(self, number: int) -> None:
        """Take note that the whole plan runs once more. ``number`` is 2 for the first repetition."""
        ...

    def finish(self, *, interrupted: bool = False) -> None:
        """Take note that no more results come. Called once, also after an interrupt."""
        ...


class ReportFile:
    """Opens ``path`` at once, so that a run does not end with a report that cannot be written, nor leave an older one.

    Args:
        path: the file, whose folder is made if need be; ``-``: stdout.
        what: what is written, in words.

    Raises:
        SetupError: it cannot be opened.
    """

    def __init__(self, path: str, what: str) -> None:
        self._path, self._what = path, what
        self._stream: TextIO | None = None
        if path == "-":
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed with the report
        except OSError as error:
            raise SetupError(f"{what} cannot be written to {path}: {os.strerror(error.errno or 0)}") from error

    def write(self, text: str) -> None:
        """Write ``text``, and have the system know it at once.

        Raises:
            OutputError: the file takes no more.
            BrokenPipeError: stdout's reader has left.
        """
        with self._told():
            stream = sys.stdout if self._stream is None else self._stream
            stream.write(text)
            stream.flush()

    def close(self) -> None:
        """Close the file. Raises as :meth:`write`."""
        if self._stream is not None:
            with self._told():
                self._stream.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._stream is None and isinstance(error, BrokenPipeError):
                raise
            reason = os.strerror(error.errno or 0)
            place = "stdout" if self._stream is None else self._path
            raise OutputError(f"{self._what} cannot be written to {place}: {reason}") from error
