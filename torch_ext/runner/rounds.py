"""A run of the plan: as many rounds as were asked for, and in each the failed tests once more, in fresh worlds.

Note [Reruns]
~~~~~~~~~~~~~
A test that failed runs again when its round is through, in a new class process with new ranks. If it passes then, it is
flaky: not passed, for the same code has failed, and no failure. A skip in the second run proves nothing, so the failure
stands. A class that failed as a whole does not run again, and neither does a file that cannot be
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch_ext.results import ClassEvent, RoundBegan, Status, TestName, TestResult
from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.base import Tally
from torch_ext.runner.reporters.make import Reporters
from torch_ext.runner.schedule import Plan
from torch_ext.runner.steps import Executor, Judge

__all__ = ["Rounds"]


class Rounds:
    """Runs ``plan`` as often as ``options`` say; ``reporters`` see only results with round and attempt."""

    def __init__(self, plan: Plan, options: RunOptions, reporters: Reporters, judge: Judge | None = None) -> None:
        self.plan = plan
        self._options = options
        self._reporters = reporters
        self._judge = judge
        self._round = 1
        self._earlier: dict[TestName, tuple[TestResult, ...]] = {}
        self._again: list[TestName] = []

    @property
    def progress(self) -> Tally:
        """The results so far."""
        return self._reporters.tally

    def take(self, event: ClassEvent) -> None:
        """Number a result, and hand it or any other event to the reporters."""
        if isinstance(event, TestResult):
            event = self._numbered(self._judge.judged(event) if self._judge else event)
        self._reporters(event)

    def _numbered(self, result: TestResult) -> TestResult:
        earlier = self._earlier.get(result.test, ())
        failed = result.status.counted is Status.FAILED
        again = failed and bool(result.test.method) and len(earlier) < self._options.reruns
        attempt = len(earlier) + 1
        if earlier and result.status is Status.SKIPPED:
            result, earlier = replace(earlier[-1], warnings=result.warnings), earlier[:-1]
        elif earlier and not failed:
            result = replace(result, status=Status.FLAKY)
        result = replace(result, round=self._round, attempt=attempt, again=again, earlier=earlier)
        if again:
            self._earlier[result.test] = (*earlier, replace(result, earlier=()))
            self._again.append(result.test)
        return result

    def run(self, runner: Callable[[], Executor]) -> None:
        """Run every round. An interrupt passes through."""
        while True:
            self._one_round(runner)
            failed = not self.progress.passed
            enough = self._round == self._options.repeat
            if enough or (failed and self._options.failfast):
                return
            self._round += 1
            self._earlier.clear()
            self._reporters(RoundBegan(self._round))

    def _one_round(self, runner: Callable[[], Executor]) -> None:
        judge = self._judge
        reasons = {test: reason for test in self.plan.tests if judge and (reason := judge.skipped(test))}
        for test, reason in reasons.items():
            self.take(TestResult(test, Status.SKIPPED, 0.0, reason=reason))
        plan, left = self.plan.without(reasons), len(self.plan.tests) + 1
        # A run that stops at the first failure goes on if that turns out to be a flake.
        while plan.batches and len(plan.tests) < left:
            left = len(plan.tests)
            runner().run(plan, self.take)
            while self._again:
                tests, self._again = self._again, []
                runner().run(self._part(tests), self.take)
            if not self._options.failfast or any(one.status.counted is Status.FAILED for one in self.progress.results):
                return
            plan = self._part(self.progress.missing())

    def _part(self, tests: Iterable[TestName]) -> Plan:
        return self.plan.without(set(self.plan.tests) - set(tests))
