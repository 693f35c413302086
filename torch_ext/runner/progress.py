"""Results counted against the plan. A planned test that never reports counts too: silence is no pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch_ext.runner.results import Status, TestName, TestResult
from torch_ext.runner.schedule import Batch, Plan

__all__ = ["Progress", "counts"]


def counts(results: Iterable[TestResult]) -> Counter[Status]:
    """Return how many of ``results`` count as passed, failed and skipped."""
    return Counter(result.status.counted for result in results)


class Progress:
    """The results of one run, in the order in which they came."""

    def __init__(self, plan: Plan) -> None:
        self.results: list[TestResult] = []
        self._by_batch: dict[tuple[str, str], list[TestResult]] = {}
        self.replan(plan)

    def replan(self, plan: Plan) -> None:
        """Count against ``plan`` from now on. Results that have come stay."""
        told = {result.test for result in self.results}
        waiting = [test for test in plan.tests if test not in told]
        self._batches = {(batch.file.name, batch.cls): batch for batch in plan}
        self._waiting = dict.fromkeys(waiting)
        self._open = Counter((test.file, test.cls) for test in waiting)

    def add(self, result: TestResult) -> None:
        """Count ``result``."""
        self.results.append(result)
        self._by_batch.setdefault((result.test.file, result.test.cls), []).append(result)
        if result.test in self._waiting:
            del self._waiting[result.test]
            self._open[result.test.file, result.test.cls] -= 1

    def batch_of(self, test: TestName) -> Batch | None:
        """The planned class of ``test``; None for a file that could not be imported."""
        return self._batches.get((test.file, test.cls))

    def results_of(self, batch: Batch) -> list[TestResult]:
        """The results of one class so far, that of its ``setUpClass`` included."""
        return self._by_batch.get((batch.file.name, batch.cls), [])

    def missing(self) -> list[TestName]:
        """The planned tests that have no result."""
        return list(self._waiting)

    def missing_of(self, batch: Batch) -> int:
        """How many tests of one class have no result."""
        return self._open[batch.file.name, batch.cls]

    @property
    def passed(self) -> bool:
        """Whether everything that was planned ran, or was skipped with a reason, and nothing failed."""
        return not self._waiting and not counts(self.results)[Status.FAILED]
