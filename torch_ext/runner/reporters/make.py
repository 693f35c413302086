"""The reporters of a run, by its options, as one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch_ext.results import (
    Began,
    Event,
    Needs,
    Over,
    RoundBegan,
    RunEnded,
    Stalled,
    Status,
    TestName,
    TestResult,
    Tick,
)
from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.base import Reporter, ReportFile, Tally
from torch_ext.runner.reporters.text import StyledWriter, TextReporter, describe_failure, is_live
from torch_ext.runner.reporters.watch import LiveWatch, PlainWatch, Running
from torch_ext.runner.schedule import Plan

__all__ = ["InOrder", "Reporters", "annotate", "annotation"]

_Key = tuple[str, str]


class InOrder:
    """A reporter that hands all events on to another, class after class.

    The first class of the plan that is not over passes through as it happens. Events of later classes wait for their
    turn, or for the end of the run. A failure is reported at once, and so is the beginning of a class, since it says
    that the run goes on.
    """

    def __init__(self, plan: Plan, reporter: Reporter) -> None:
        self._reporter = reporter
        self._held: dict[_Key, list[Event]] = {}
        self._over: set[_Key] = set()
        self._order = [batch.key for batch in plan]
        self._place = {key: place for place, key in reversed(list(enumerate(self._order)))}
        self._at = 0

    def __call__(self, event: Event) -> None:
        failed = isinstance(event, TestResult) and event.status.counted is Status.FAILED
        if not failed and isinstance(event, (Began, TestResult)) and event.test.method:
            self._take(event)
        elif isinstance(event, (Began, TestResult, Stalled)):
            self._reporter(event)
        elif isinstance(event, Over):
            self._end(event.test)
        elif isinstance(event, (RoundBegan, RunEnded)):
            for key in sorted(self._held, key=lambda key: self._place.get(key, -1)):
                self._hand_on(key)
            self._over.clear()
            self._at = 0
            self._reporter(event)

    def _take(self, event: Began | TestResult) -> None:
        key = event.test.file, event.test.cls
        self._held.setdefault(key, []).append(event)
        if self._place.get(key, -1) <= self._at:
            self._hand_on(key)

    def _end(self, test: TestName) -> None:
        """Nothing more comes of a class: hand on the classes whose turn it is."""
        self._over.add((test.file, test.cls))
        while self._at < len(self._order):
            self._hand_on(self._order[self._at])
            if self._order[self._at] not in self._over:
                return
            self._at += 1

    def _hand_on(self, key: _Key) -> None:
        for event in self._held.pop(key, ()):
            self._reporter(event)


# Of one of GitHub's annotations, lines on stdout that it shows beside the code; ten of a step for each level.
_MOST_CHARACTERS = 4000


def annotate(tally: Tally, interrupted: bool, *, root: str, out: StyledWriter) -> None:
    """Print an ``::error`` for each failure and a ``::warning`` for each flaky test. At the end of the run, no other
    output stands between them.
    """
    for result in tally.results:
        file = os.path.normpath(os.path.join(root, result.test.file))
        if result.status is Status.FLAKY:
            text = f"failed {len(result.earlier)} times, then passed:\n{describe_failure(result.earlier[0])}"
            out.verbatim(annotation("warning", file, f"flaky: {result.test.id}", text))
        elif result.status.counted is Status.FAILED:
            out.verbatim(annotation("error", file, result.test.id, describe_failure(result)))


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
        self.tally = Tally(plan)
        stream, start_s = sys.stderr if options.json == "-" else sys.stdout, time.time()
        files: list[Reporter] = []
        self._at_end: list[Callable[[Tally, bool], None]] = []
        if options.json:
            from torch_ext.runner.reporters.jsonlines import JsonReporter

            files.append(JsonReporter(self.tally, options, ReportFile(options.json, "the JSON report"), needs))
        if options.trace:
            from torch_ext.runner.reporters.trace import write_trace

            file = ReportFile(options.trace, "the trace")
            log: list[tuple[float, Event]] = [(time.monotonic(), Tick())]
            files.append(lambda event: log.append((time.monotonic(), event)))
            self._at_end.append(lambda tally, interrupted: write_trace(log, file))
        if options.junit:
            from torch_ext.runner.reporters.junit import write_junit

            junit = ReportFile(options.junit, "the JUnit report")
            self._at_end.append(partial(write_junit, options=options, file=junit, start_s=start_s))
        if options.html:
            from torch_ext.runner.reporters.html import write_page

            page = ReportFile(options.html, "the HTML page")
            self._at_end.append(partial(write_page, options=options, file=page, start_s=start_s))
        if options.github:
            self._at_end.append(partial(annotate, root=os.path.relpath(options.root), out=StyledWriter(stream)))
        live = is_live(stream) and options.verbosity >= 0 and not options.show_output
        text = TextReporter(plan, options, stream, notes, announce=not live)
        running = Running(self.tally, expected_s, time.monotonic())
        often = options.verbosity >= 0
        watch = LiveWatch(running, text.writer) if live else PlainWatch(running, text.writer, often=often)
        self._all: list[Reporter] = [self.tally, watch, InOrder(plan, text), *files]

    def __call__(self, event: Event) -> None:
        for reporter in self._all:
            reporter(event)
        if isinstance(event, RunEnded):
            for write in self._at_end:
                write(self.tally, event.interrupted)
