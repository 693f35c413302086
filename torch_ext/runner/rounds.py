"""Runs the chosen tests, with reporters: the requested number of rounds, each with reruns of failed tests.

Note [Reruns]
~~~~~~~~~~~~~
A test that failed runs again at the end of its round, in a new class process. If the rerun passes, the test is flaky:
neither passed nor failed. If the rerun skips, the failure stands. A class that failed as a whole does not run again,
nor does a file that cannot be imported.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from torch_ext.results import (
    FAILED,
    INTERRUPTED,
    OK,
    ClassEvent,
    Event,
    Needs,
    Over,
    RoundBegan,
    RunEnded,
    Status,
    TestName,
    TestResult,
)
from torch_ext.runner.choice import Chosen
from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.tally import InOrder, Reporter, ReportFile, Tally
from torch_ext.runner.reporters.text import ProgressLines, TextReporter, Writer, annotate
from torch_ext.runner.schedule import Plan
from torch_ext.runner.steps import Executor, Judge


class Reporters:
    """All reporters that ``options`` request. The text starts with ``notes``, and goes to stderr if stdout has JSON."""

    def __init__(
        self,
        plan: Plan,
        options: RunOptions,
        needs: Mapping[TestName, Needs] = {},
        expected_s: Callable[[TestName], float | None] = lambda test: None,
        notes: Sequence[str] = (),
    ) -> None:
        self.tally = Tally(plan)
        out, files = Writer(sys.stderr if options.json == "-" else sys.stdout), list[Reporter]()
        self._at_end: list[Callable[[Tally, bool], None]] = []
        if options.json:
            from torch_ext.runner.reporters.jsonlines import JsonReporter

            files.append(JsonReporter(self.tally, options, ReportFile(options.json, "the JSON report"), needs))
        if options.junit:
            from torch_ext.runner.reporters.junit import write_junit

            junit = ReportFile(options.junit, "the JUnit report")
            self._at_end.append(partial(write_junit, options=options, file=junit, start_s=time.time()))
        if options.github:
            self._at_end.append(partial(annotate, root=os.path.relpath(options.root), out=out))
        text = TextReporter(self.tally, options, out, notes)
        watch = ProgressLines(self.tally, expected_s, out, often=options.verbosity >= 0)
        self._all: list[Reporter] = [self.tally, *[watch] * (options.pdb is None), InOrder(plan, text), *files]

    def __call__(self, event: Event) -> None:
        for reporter in self._all:
            reporter(event)
        if isinstance(event, RunEnded):
            for write in self._at_end:
                write(self.tally, event.interrupted)


class Rounds:
    """Runs the chosen tests as often as the options require. Numbers each result by round and attempt for reporters."""

    def __init__(self, chosen: Chosen, executor: Callable[[], Executor]) -> None:
        self._chosen = chosen
        self._executor = executor
        self._options = chosen.request.options
        request = chosen.request
        self._judge: Judge | None = None  # of results of upstream's files
        if request.upstream is not None:
            device = "sim" if self._options.cuda_as_sim else chosen.device
            conditions = {"device": device, "cuda_as_sim": str(self._options.cuda_as_sim).lower()}
            conditions["clock"] = self._options.clock or "off"
            paths = [file.path for file in request.files]
            self._judge = request.upstream.judge(paths, self._options.differences, conditions)
        notes, expected_s = [chosen.note] if chosen.note else [], chosen.history.expected_s
        self._reporters = Reporters(chosen.plan, self._options, chosen.needs, expected_s, notes)
        self._tally = self._reporters.tally
        self._round = 1
        self._earlier: dict[TestName, tuple[TestResult, ...]] = {}
        self._again: list[TestName] = []

    @property
    def warning(self) -> str:
        """A sentence of the judge about the run; empty if there is none."""
        return self._judge.warning if self._judge else ""

    def run(self) -> int:
        """Run every round and return the exit code. An interrupt ends the run, and reporters show it."""
        interrupted = True
        for failure in self._chosen.failures:
            self._publish(failure)
        with suppress(KeyboardInterrupt):
            if self._chosen.plan.batches and not (self._options.failfast and self._has_failed()):
                with closing(self._executor()):
                    self._every_round()
            interrupted = False
        if self._judge is not None and not interrupted:
            for stale in self._judge.out_of_date(self._chosen.plan.tests, whole=not self._options.narrowed):
                self._publish(stale)
        self._chosen.history.save(self._tally.results)
        self._reporters(RunEnded(interrupted))
        flaky = any(result.status is Status.FLAKY for result in self._tally.results)
        passed = self._tally.passed and not (flaky and self._options.fail_on_flaky)
        return INTERRUPTED if interrupted else OK if passed else FAILED

    def _has_failed(self) -> bool:
        return any(one.status.counted is Status.FAILED for one in self._tally.results)

    def _publish(self, event: ClassEvent) -> None:
        """Pass an event to the reporters; number a result before."""
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
            self._publish(TestResult(test, Status.SKIPPED, 0.0, reason=reason))
        plan, left = self._chosen.plan.without(reasons), len(self._chosen.plan.tests) + 1
        names = {batch.name for batch in plan.batches}
        for batch in self._chosen.plan.batches:
            if batch.name not in names:
                self._publish(Over(batch.name))  # executors report only classes that they run
        # With failfast, the run goes on if the first failure turns out to be a flake.
        while plan.batches and len(plan.tests) < left:
            left = len(plan.tests)
            self._executor().run(plan, self._publish)
            while self._again:
                tests, self._again = self._again, []
                self._executor().run(self._part(tests), self._publish)
            if not self._options.failfast or self._has_failed():
                return
            plan = self._part(self._tally.missing())

    def _part(self, tests: Iterable[TestName]) -> Plan:
        return self._chosen.plan.without(set(self._chosen.plan.tests) - set(tests))
