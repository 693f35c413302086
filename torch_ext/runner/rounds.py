"""A run of the plan: as many rounds as were asked for, and in each the failed tests once more, in fresh worlds.

Note [Reruns]
~~~~~~~~~~~~~
A test that failed runs again when its round is through, in a class process and ranks of its own. If it passes then, it
is flaky: not passed, for the same code has failed, and no failure. What is skipped when it runs again has told nothing,
so its failure stands. A file that cannot be imported and a class whose fixture raises are not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torch_ext.runner.names import Collected
from torch_ext.runner.options import Options
from torch_ext.runner.progress import Progress
from torch_ext.runner.reporters.base import Reporter
from torch_ext.runner.results import Began, Status, TestName, TestResult, import_failure
from torch_ext.runner.schedule import Batch, Plan, make_plan

__all__ = ["Rounds", "Runner"]


class Runner(Protocol):
    """Runs a plan once."""

    def run(
        self,
        plan: Plan,
        sink: Callable[[Began | TestResult], None],
        renew: Callable[[Collected], Sequence[Batch]],
    ) -> None:
        """See ``cli.Executor``."""
        ...


class Rounds:
    """Runs ``plan`` and tells the reporters.

    Args:
        plan: what runs.
        options: how often.
        reporters: who is told; they see only results whose round and attempt are filled in.
        renewed: returns the plan of a file that was imported only now; None if it holds what was planned.

    Attributes:
        progress: what has come of the plan.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        reporters: Iterable[Reporter],
        renewed: Callable[[Collected], Plan | None],
    ) -> None:
        self.progress = Progress(plan)
        self._plan = plan
        self._options = options
        self._reporters = tuple(reporters)
        self._renewed = renewed
        self._round = 1
        self._earlier: dict[TestName, tuple[TestResult, ...]] = {}
        self._again: list[TestName] = []

    def take(self, event: Began | TestResult) -> None:
        """Count a result and tell the reporters of it, or of what begins."""
        if isinstance(event, Began):
            for reporter in self._reporters:
                reporter.begin(event)
            return
        result = self._numbered(event)
        self.progress.add(result)
        for reporter in self._reporters:
            reporter.add(result)

    def _numbered(self, result: TestResult) -> TestResult:
        earlier = self._earlier.get(result.test, ())
        failed = result.status.counted is Status.FAILED
        again = failed and bool(result.test.method) and len(earlier) < self._options.reruns
        if earlier and result.status is Status.SKIPPED:
            result, earlier = replace(earlier[-1], warnings=result.warnings), earlier[:-1]
        elif earlier and not failed:
            result = replace(result, status=Status.FLAKY)
        result = replace(result, round=self._round, attempt=len(earlier) + 1, again=again, earlier=earlier)
        if again:
            self._earlier[result.test] = (*earlier, replace(result, earlier=()))
            self._again.append(result.test)
        return result

    def run(self, runner: Callable[[], Runner]) -> None:
        """Run every round. An interrupt passes through."""
        while True:
            self._one_round(runner)
            failed = not self.progress.passed
            enough = self._round == self._options.repeat
            if enough or (failed and (self._options.until_failure or self._options.failfast)):
                return
            self._round += 1
            self._earlier.clear()
            self.progress.new_round(self._plan)
            for reporter in self._reporters:
                reporter.new_round(self._round)

    def finish(self, *, interrupted: bool) -> None:
        """Tell the reporters that no more results come."""
        for reporter in self._reporters:
            reporter.finish(interrupted=interrupted)

    def _one_round(self, runner: Callable[[], Runner]) -> None:
        plan, left = self._plan, len(self._plan.tests) + 1
        # A run that stops at the first failure goes on if that turns out to be a flake.
        while plan.batches and len(plan.tests) < left:
            left = len(plan.tests)
            runner().run(plan, self.take, self._renew)
            while self._again:
                tests, self._again = self._again, []
                runner().run(self._part(tests), self.take, self._renew)
            if not self._options.failfast or any(one.status.counted is Status.FAILED for one in self.progress.results):
                return
            plan = self._part(self.progress.missing())

    def _part(self, tests: Iterable[TestName]) -> Plan:
        files = list(dict.fromkeys(batch.file for batch in self._plan))
        wanted = set(tests)
        return make_plan(files, [test for test in self._plan.tests if test in wanted])

    def _renew(self, found: Collected) -> Sequence[Batch]:
        if found.error:
            self.take(import_failure(found.file.name, found.error))
            return ()
        plan = self._renewed(found)
        if plan is not None:
            self._plan = self._plan.replaced(found.file, plan.batches)
            self.progress.replan(self._plan)
            for reporter in self._reporters:
                reporter.replan(self._plan)
        return [batch for batch in self._plan if batch.file == found.file]
