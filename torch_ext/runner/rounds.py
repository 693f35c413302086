"""A run of the plan: as many rounds as were asked for, and in each the failed tests once more, in fresh worlds.

Note [Reruns]
~~~~~~~~~~~~~
A test that failed runs again when its round is through, in a new class process with new ranks. If it passes then, it is
flaky: not passed, for the same code has failed, and no failure. A skip in the second run proves nothing, so the failure
stands. A class that failed as a whole does not run again, and neither does a file that cannot be
imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch_ext.results import FAILED, INTERRUPTED, OK, ClassEvent, RoundBegan, RunEnded, Status, TestName, TestResult
from torch_ext.runner.choice import Chosen
from torch_ext.runner.reporters.make import Reporters
from torch_ext.runner.schedule import Plan
from torch_ext.runner.steps import Executor, Judge
from torch_ext.world.wording import printable

__all__ = ["Rounds"]


class Rounds:
    """Runs the chosen tests as often as the options say. Reporters see only results with round and attempt."""

    def __init__(self, chosen: Chosen, executor: Callable[[], Executor]) -> None:
        self._chosen = chosen
        self._executor = executor
        self._options = chosen.request.options
        self._judge = _judge(chosen)
        notes, expected_s = filter(None, [chosen.note]), chosen.request.history.expected_s
        self._reporters = Reporters(chosen.plan, self._options, chosen.needs, expected_s, list(notes))
        self._tally = self._reporters.tally
        self._round = 1
        self._earlier: dict[TestName, tuple[TestResult, ...]] = {}
        self._again: list[TestName] = []

    def run(self) -> int:
        """Run every round and return the exit code. An interrupt ends the run, and is reported."""
        interrupted = False
        for failure in self._chosen.failures:
            self._take(failure)
        try:
            if self._chosen.plan.batches and not (self._options.failfast and self._has_failed()):
                try:
                    self._every_round()
                finally:
                    self._executor().close()
        except KeyboardInterrupt:
            interrupted = True
        if self._judge is not None and not interrupted:
            for stale in self._judge.out_of_date(self._chosen.plan.tests, whole=not self._options.narrowed):
                self._take(stale)
        self._chosen.request.history.save(self._tally.results)
        self._reporters(RunEnded(interrupted))
        flaky = any(result.status is Status.FLAKY for result in self._tally.results)
        passed = self._tally.passed and not (flaky and self._options.fail_on_flaky)
        return INTERRUPTED if interrupted else OK if passed else FAILED

    def _has_failed(self) -> bool:
        return any(one.status.counted is Status.FAILED for one in self._tally.results)

    def _take(self, event: ClassEvent) -> None:
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

    def _every_round(self) -> None:
        while True:
            self._one_round()
            if self._round == self._options.repeat or (self._options.failfast and not self._tally.passed):
                return
            self._round += 1
            self._earlier.clear()
            self._reporters(RoundBegan(self._round))

    def _one_round(self) -> None:
        judge = self._judge
        reasons = {test: reason for test in self._chosen.plan.tests if judge and (reason := judge.skipped(test))}
        for test, reason in reasons.items():
            self._take(TestResult(test, Status.SKIPPED, 0.0, reason=reason))
        plan, left = self._chosen.plan.without(reasons), len(self._chosen.plan.tests) + 1
        # A run that stops at the first failure goes on if that turns out to be a flake.
        while plan.batches and len(plan.tests) < left:
            left = len(plan.tests)
            self._executor().run(plan, self._take)
            while self._again:
                tests, self._again = self._again, []
                self._executor().run(self._part(tests), self._take)
            if not self._options.failfast or self._has_failed():
                return
            plan = self._part(self._tally.missing())

    def _part(self, tests: Iterable[TestName]) -> Plan:
        return self._chosen.plan.without(set(self._chosen.plan.tests) - set(tests))


def _judge(chosen: Chosen) -> Judge | None:
    """Return what judges results of files that are not our own."""
    request, options = chosen.request, chosen.request.options
    if request.upstream is None:
        return None
    surroundings = {
        "device": "sim" if options.cuda_as_sim else chosen.device,
        "cuda_as_sim": str(options.cuda_as_sim).lower(),
    }
    judge = request.upstream.judge([file.path for file in request.files], options.differences, surroundings)
    if judge.told and sys.stderr is not None:
        print(printable(f"warning: {judge.told}"), file=sys.stderr)
    return judge
