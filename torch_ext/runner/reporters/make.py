"""The reporters of a run, by its options, as one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.base import AtEnd, Reporter, ReportFile
from torch_ext.runner.reporters.failure import describe_failure
from torch_ext.runner.reporters.ordered import InOrder
from torch_ext.runner.reporters.styled import StyledWriter, is_live
from torch_ext.runner.reporters.text import TextReporter
from torch_ext.runner.reporters.watch import LiveWatch, PlainWatch, Running
from torch_ext.runner.results import Began, Needs, Over, Status, TestName, TestResult, Tick
from torch_ext.runner.schedule import Plan

__all__ = ["GitHubReporter", "Reporters", "annotation"]

# Of one of GitHub's annotations, lines on stdout that it shows beside the code; ten of a step for each level.
_MOST_CHARACTERS = 4000


class GitHubReporter(AtEnd):
    """Prints an ``::error`` for each failure and a ``::warning`` for each flaky test when the run is over, so that no
    other output stands between them.
    """

    def __init__(self, plan: Plan, options: RunOptions, stream: TextIO) -> None:
        super().__init__(plan)
        self._root = os.path.relpath(options.root)
        self._out = StyledWriter(stream)

    def finish(self, *, interrupted: bool = False) -> None:
        """Print the annotations."""
        for result in self.progress.results:
            if result.status.counted in (Status.FAILED, Status.FLAKY):
                self._out.verbatim(self._annotated(result))

    def _annotated(self, result: TestResult) -> str:
        file = os.path.normpath(os.path.join(self._root, result.test.file))
        if result.status is Status.FLAKY:
            text = f"failed {len(result.earlier)} times, then passed:\n{describe_failure(result.earlier[0])}"
            return annotation("warning", file, f"flaky: {result.test.id}", text)
        return annotation("error", file, result.test.id, describe_failure(result))


def annotation(level: str, file: str, title: str, text: str) -> str:
    r"""Return the line that GitHub's runner obeys.

    >>> annotation("error", "a,b.py", "a: 100%", "one\ntwo")
    '::error file=a%2Cb.py,title=a%3A 100%25::one%0Atwo'
    """
    return f"::{level} file={_property(file)},title={_property(title)}::{_escaped(text[:_MOST_CHARACTERS])}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


class Reporters:
    """Every reporter that ``options`` ask for. The text goes to stderr where JSON takes stdout.

    Args:
        plan: what should run.
        options: what was asked for.
        needs: what the tests ask for, as far as that is known.
        expected_s: how long a test should take, if that is known.
        notes: sentences to begin with.

    Raises:
        SetupError: a file cannot be opened.
    """

    def __init__(
        self,
        plan: Plan,
        options: RunOptions,
        needs: Mapping[TestName, Needs] = {},
        expected_s: Callable[[TestName], float | None] = lambda test: None,
        notes: Sequence[str] = (),
    ) -> None:
        files: list[Reporter] = []
        self._overs: list[Callable[[Over], None]] = []
        if options.json:
            from torch_ext.runner.reporters.jsonlines import JsonReporter

            files.append(JsonReporter(plan, options, ReportFile(options.json, "the JSON report"), needs))
        if options.junit:
            from torch_ext.runner.reporters.junit import JUnitReporter

            files.append(JUnitReporter(plan, options, ReportFile(options.junit, "the JUnit report")))
        if options.html:
            from torch_ext.runner.reporters.html import HtmlReporter

            files.append(HtmlReporter(plan, options, ReportFile(options.html, "the HTML page")))
        if options.trace:
            from torch_ext.runner.reporters.trace import TraceReporter

            trace = TraceReporter(ReportFile(options.trace, "the trace"))
            files.append(trace)
            self._overs.append(trace.over)
        if options.github:
            from torch_ext.runner.reporters.make import GitHubReporter

            files.append(GitHubReporter(plan, options, sys.stderr if options.json == "-" else sys.stdout))
        stream = sys.stderr if options.json == "-" else sys.stdout
        if (seed := options.random_order) is not None:
            notes = [*notes, f"Random order of seed {seed}; --random-order={seed} repeats it."]
        live = is_live(stream) and options.verbosity >= 0 and not options.show_output
        text = TextReporter(plan, options, stream, notes, announce=not live)
        running = Running(plan, expected_s, lambda test: expected_s(test) or 1.0, time.monotonic())
        plain = PlainWatch(running, text.writer, often=options.verbosity >= 0)
        self._watch = LiveWatch(running, text.writer, stream) if live else plain
        self._ordered = InOrder(plan, text, failures_at_once=live, waits=plain.wait)
        self._overs += [self._watch.over, self._ordered.over]
        self._all: list[Reporter] = [self._watch, self._ordered, *files]

    def take(self, event: Began | Over | TestResult | Tick) -> None:
        """Hand ``event`` to whom it concerns."""
        if isinstance(event, Tick):
            self._watch.tick()
        elif isinstance(event, Over):
            for over in self._overs:
                over(event)
        else:
            for reporter in self._all:
                if isinstance(event, Began):
                    reporter.begin(event)
                else:
                    reporter.add(event)

    def new_round(self, number: int) -> None:
        """See :class:`Reporter`, as for what follows."""
        for reporter in self._all:
            reporter.new_round(number)

    def finish(self, *, interrupted: bool) -> None:
        for reporter in self._all:
            reporter.finish(interrupted=interrupted)
