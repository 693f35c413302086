"""Results counted against the plan. A planned test that never reports counts too: silence is no pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch_ext.runner.results import Status, TestName, TestResult
from torch_ext.runner.schedule import Batch, Plan

__all__ = ["Progress", "counts"]


def counts(results: Iterable[TestResult]) -> Counter[Status]:
    """Return how many of ``results`` count as passed, failed, skipped and flaky."""
    return Counter(result.status.counted for result in results)


class Progress:
    """The results of one run, in the order in which they came; of several attempts at a test the last.

    Tests are missed by round: after :meth:`new_round`, the whole plan is expected once more.
    """

    def __init__(self, plan: Plan) -> None:
        self.results: list[TestResult] = []
        self._lost: list[TestName] = []  # by the rounds before
        self._waiting: dict[TestName, None] = {}
        self._plan = plan
        self._batches = {(batch.file.name, batch.cls): batch for batch in plan}
        self.new_round()

    def new_round(self) -> None:
        """Expect every test of the plan, though it may have run in an earlier round."""
        self._lost += self._waiting
        self._places: dict[TestName, int] = {}
        self._by_batch: dict[tuple[str, str], dict[int, TestResult]] = {}
        self._waiting = dict.fromkeys(self._plan.tests)
        self._open = Counter((test.file, test.cls) for test in self._plan.tests)

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
