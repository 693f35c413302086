"""The type of a reporter, results counted against the plan, and the files of reports."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from torch_ext.results import Event, OutputError, RoundBegan, SetupError, Status, TestName, TestResult
from torch_ext.runner.schedule import Batch, Plan

__all__ = ["COLUMNS", "ReportFile", "Reporter", "Tally", "counts", "writing"]

COLUMNS = (Status.PASSED, Status.FAILED, Status.SKIPPED, Status.FLAKY)


def counts(results: Iterable[TestResult]) -> Counter[Status]:
    """Return how many of ``results`` count as passed, failed, skipped and flaky."""
    return Counter(result.status.counted for result in results)


class Tally:
    """The results of one run, in the order in which they came; of several attempts at a test the last.

    Tests are missed by round: after :class:`~torch_ext.results.RoundBegan`, the whole plan is expected once more.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._earlier: list[TestResult] = []  # of the rounds before
        self._lost: list[TestName] = []  # by the rounds before
        self._latest: dict[TestName, TestResult] = {}
        self._batches = {batch.key: batch for batch in plan}
        self.waiting = dict.fromkeys(plan.tests)  # the tests of the plan that have no result in this round

    def __call__(self, event: Event) -> None:
        if isinstance(event, TestResult):
            known = self._latest.get(event.test)
            if known is None or event.attempt > 1 or known.status.counted is not Status.FAILED:
                self._latest[event.test] = event
            self.waiting.pop(event.test, None)
        elif isinstance(event, RoundBegan):
            self._earlier, self._lost = self.results, self.missing()
            self._latest, self.waiting = {}, dict.fromkeys(self.plan.tests)

    @property
    def results(self) -> list[TestResult]:
        """Those of all rounds so far."""
        return [*self._earlier, *self._latest.values()]

    def batch_of(self, test: TestName) -> Batch | None:
        """The planned class of ``test``; None for a file that could not be imported."""
        return self._batches.get((test.file, test.cls))

    def results_of(self, batch: Batch) -> list[TestResult]:
        """The results of one class in this round so far, its fixtures' failures included."""
        return [one for test, one in self._latest.items() if (test.file, test.cls) == batch.key]

    def missing(self) -> list[TestName]:
        """The planned tests that have no result."""
        return [*self._lost, *self.waiting]

    def missing_of(self, batch: Batch) -> int:
        """How many tests of one class have no result in this round."""
        return sum(test in self.waiting for test in batch.tests)

    @property
    def passed(self) -> bool:
        """Whether everything that was planned ran, or was skipped with a reason, and nothing failed. A test that failed
        and passed when it ran again is flaky, and no failure.
        """
        return not self.missing() and not counts(self.results)[Status.FAILED]


# Gets every event of one run, in the supervisor, on the main thread. Raises ``OutputError``, in words for users, when
# it cannot write; the run then ends. A result with ``again`` is followed by another of the same test and round, which
# counts in its place.
Reporter = Callable[[Event], None]


@contextmanager
def writing(failure: str) -> Iterator[None]:
    """Raise an OSError of the block as an OutputError that begins with ``failure``, unless the reader has left."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"{failure}: {os.strerror(error.errno or 0)}") from error


class ReportFile:
    """Opens ``path`` at once, so that a run does not end with a report that cannot be written, nor leave an older one.

    Args:
        path: the file, whose folder is made if need be; ``-``: stdout.
        what: the report, in words.

    Raises:
        SetupError: it cannot be opened.
    """

    def __init__(self, path: str, what: str) -> None:
        self._failure = f"{what} cannot be written to {'stdout' if path == '-' else path}"
        self._stream: TextIO | None = None
        if path == "-":
            return
        if path.endswith(".py"):
            raise SetupError(f"{self._failure}, which is no place for a report")
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed with the report
        except OSError as error:
            raise SetupError(f"{self._failure}: {os.strerror(error.errno or 0)}") from error

    def write(self, text: str) -> None:
        """Write ``text``, and have the system know it at once.

        Raises:
            OutputError: the file takes no more.
            BrokenPipeError: the reader has left.
        """
        with writing(self._failure):
            stream = sys.stdout if self._stream is None else self._stream
            stream.write(text)
            stream.flush()

    def close(self) -> None:
        """Close the file. Raises as :meth:`write`."""
        if self._stream is not None:
            with writing(self._failure):
                self._stream.close()
