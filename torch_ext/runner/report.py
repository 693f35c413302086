"""What a user sees of a run: progress, each failure as it happens, and the summary."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import TextIO

from torch_ext.runner.options import Options
from torch_ext.runner.paper import Paper
from torch_ext.runner.rerun import rerun_command
from torch_ext.runner.results import Status, TestResult
from torch_ext.runner.schedule import Batch, Plan
from torch_ext.runner.tally import Tally, counts

__all__ = ["Report"]

_COLUMNS = (Status.PASSED, Status.FAILED, Status.SKIPPED)
_STYLES = {Status.PASSED: "green", Status.FAILED: "bold red", Status.SKIPPED: "yellow"}


class Report:
    """Prints results as they come; :meth:`finish` prints the summary.

    Args:
        plan: what should run; a planned test without a result is shown as not run.
        options: verbosity, and what the rerun lines repeat.
        stream: where to print.
    """

    def __init__(self, plan: Plan, options: Options, stream: TextIO) -> None:
        self.tally = Tally(plan)
        self._plan = plan
        self._options = options
        self._paper = Paper(stream)
        self._printed: set[Batch] = set()
        self._start_s = time.monotonic()

    def add(self, result: TestResult) -> None:
        """Take one result. Called on the main thread, as soon as the test has ended; does not block."""
        self.tally.add(result)
        if self._options.verbosity > 0:
            self._test_line(result)
        if result.status.counted is Status.FAILED:
            self._failure(result)
        batch = self.tally.batch_of(result.test)
        if batch is not None and not self.tally.missing_of(batch):
            self._batch_line(batch)

    def finish(self, *, interrupted: bool = False) -> None:
        """Print what remains, and the summary; its last line is ``N passed, N failed, N skipped``."""
        for batch in self._plan:
            if self.tally.results_of(batch):
                self._batch_line(batch)
        self._skips()
        self._warnings()
        self._failed_again()
        self._not_run(interrupted)
        number = len(self.tally.results)
        self._paper.line(f"Ran {_tests(number)} in {time.monotonic() - self._start_s:.2f} s")
        self._paper.line(*_joined(_columns(self.tally.results, _COLUMNS)))

    def _test_line(self, result: TestResult) -> None:
        reason = f"  {result.reason}" if result.reason else ""
        word = (result.status.value, _STYLES[result.status.counted])
        self._paper.line(result.test.id, "  ", word, f"  {result.duration_s:.2f} s{reason}")

    def _failure(self, result: TestResult) -> None:
        self._paper.line()
        self._paper.line(("FAILED", _STYLES[Status.FAILED]), f" {result.test.id}  {result.duration_s:.2f} s")
        if message := result.message or _wordless(result):
            self._paper.verbatim(message)
        self._paper.line(f"rerun: {rerun_command(self._options, result.test)}")
        self._paper.line()

    def _batch_line(self, batch: Batch) -> None:
        if self._options.verbosity != 0 or batch in self._printed:
            return
        self._printed.add(batch)
        results = self.tally.results_of(batch)
        columns = _columns(results, [column for column in _COLUMNS if counts(results)[column]])
        if missing := self.tally.missing_of(batch):
            columns.append((f"{missing} not run", "yellow"))
        duration_s = sum(result.duration_s for result in results)
        self._paper.line(f"{batch.file.name}::{batch.cls}  ", *_joined(columns), f"  {duration_s:.2f} s")

    def _skips(self) -> None:
        skipped = [result for result in self.tally.results if result.status is Status.SKIPPED]
        self._grouped("Skipped", (result.reason or "no reason given" for result in skipped))
        if skipped and len(skipped) == len(self.tally.results):
            self._paper.line(("Nothing ran: every test was skipped.", "yellow"))

    def _warnings(self) -> None:
        self._grouped("Warnings", (text for result in self.tally.results for text in result.warnings))

    def _grouped(self, title: str, texts: Iterable[str]) -> None:
        groups = Counter(texts).most_common()
        if groups:
            self._paper.line(f"{title}:")
        for text, number in groups:
            self._paper.line(f"{number:6}  {text}")

    def _failed_again(self) -> None:
        failed = [result.test.id for result in self.tally.results if result.status.counted is Status.FAILED]
        if failed:
            self._paper.line(("Failed:", _STYLES[Status.FAILED]))
        for name in failed:
            self._paper.line(f"  {name}")

    def _not_run(self, interrupted: bool) -> None:
        if interrupted:
            self._paper.line(("Interrupted.", "bold yellow"))
        missing = self.tally.missing()
        if not self.tally.results:
            self._paper.line(("Nothing ran.", "bold yellow"))
        if missing:
            self._paper.line((f"Not run: {_tests(len(missing))}, the first of them {missing[0].id}", "bold yellow"))


def _wordless(result: TestResult) -> str:
    if result.status is Status.UNEXPECTED_SUCCESS:
        return "The test is marked as an expected failure and passed: take the mark away."
    return ""


def _tests(number: int) -> str:
    return f"{number} test" if number == 1 else f"{number} tests"


def _columns(results: Iterable[TestResult], columns: Iterable[Status]) -> list[tuple[str, str]]:
    """The count of each column with its style; a zero is not coloured."""
    found = counts(results)
    return [(f"{found[one]} {one.value}", _STYLES[one] if found[one] else "") for one in columns]


def _joined(parts: Iterable[tuple[str, str]]) -> list[str | tuple[str, str]]:
    line: list[str | tuple[str, str]] = []
    for part in parts:
        line += [", ", part] if line else [part]
    return line
