"""The reporters of a run, by its options, as one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch_ext.results import Began, Needs, Over, Stalled, Status, TestName, TestResult, Tick
from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.base import Reporter, ReportFile, Tally
from torch_ext.runner.reporters.failure import describe_failure
from torch_ext.runner.reporters.text import StyledWriter, TextReporter, is_live
from torch_ext.runner.reporters.watch import LiveWatch, PlainWatch, Running
from torch_ext.runner.schedule import Plan

__all__ = ["InOrder", "Reporters", "annotate", "annotation"]

_Key = tuple[str, str]


class InOrder:
    """A reporter that hands everything on to another, class after class.

    The first class of the plan that is not over passes through as it happens. What comes of the others waits for their
    turn, or for the end of the run; with ``failures_at_once`` their failures do not. That a class begins is told at
    once, since it says that the run goes on.

    Args:
        plan: what runs.
        reporter: who is told.
        failures_at_once: failures do not wait.
        waits: called with each failure that does.
    """

    def __init__(
        self,
        plan: Plan,
        reporter: Reporter,
        *,
        failures_at_once: bool = False,
        waits: Callable[[TestResult], None] = lambda result: None,
    ) -> None:
        self._reporter = reporter
        self._waits = waits
        self._failures_at_once = failures_at_once
        self._held: dict[_Key, list[Began | TestResult]] = {}
        self._over: set[_Key] = set()
        self._order = [batch.key for batch in plan]
        self._place = {key: place for place, key in reversed(list(enumerate(self._order)))}
        self._at = 0

    def begin(self, began: Began) -> None:
        """Take note that a class or a test has begun."""
        if began.test.method:
            self._take(began)
        else:
            self._reporter.begin(began)

    def add(self, result: TestResult) -> None:
        """Take one result."""
        if self._failures_at_once and result.status.counted is Status.FAILED:
            self._reporter.add(result)
        else:
            self._take(result)

    def over(self, over: Over) -> None:
        """Take note that nothing more comes of a class, or, with an empty class, of a file."""
        file, cls = over.test.file, over.test.cls
        self._over.update(key for key in self._order if key[0] == file and cls in ("", key[1]))
        self._pass_on()

    def new_round(self, number: int) -> None:
        """Hand on what still waits, and begin anew."""
        self._hand_on_all()
        self._over.clear()
        self._at = 0
        self._reporter.new_round(number)

    def finish(self, *, interrupted: bool = False) -> None:
        """Hand on what still waits, then the end."""
        self._hand_on_all()
        self._reporter.finish(interrupted=interrupted)

    def _hand_on_all(self) -> None:
        for key in sorted(self._held, key=lambda key: self._place.get(key, -1)):
            self._hand_on(key)

    def _take(self, event: Began | TestResult) -> None:
        key = self._key(event.test)
        self._held.setdefault(key, []).append(event)
        if self._place.get(key, -1) <= self._at:
            self._hand_on(key)
        elif isinstance(event, TestResult) and event.status.counted is Status.FAILED and not event.again:
            self._waits(event)

    def _key(self, test: TestName) -> _Key:
        """The class to which ``test`` belongs; for a file its first class, which its failure precedes."""
        if test.cls:
            return test.file, test.cls
        return next((key for key in self._order if key[0] == test.file), (test.file, ""))

    def _pass_on(self) -> None:
        while self._at < len(self._order):
            self._hand_on(self._order[self._at])
            if self._order[self._at] not in self._over:
                return
            self._at += 1

    def _hand_on(self, key: _Key) -> None:
        for event in self._held.pop(key, ()):
            if isinstance(event, Began):
                self._reporter.begin(event)
            else:
                self._reporter.add(event)


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
        plan: what should run.
        options: what was asked for.
        needs: what the tests ask for, as far as that is known.
        expected_s: how long a test should take, if that is known.
        notes: sentences to begin with.

    Attributes:
        tally: what has come of the plan.

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
        self._overs: list[Callable[[Over], None]] = []
        self._at_end: list[Callable[[Tally, bool], None]] = []
        if options.json:
            from torch_ext.runner.reporters.jsonlines import JsonReporter

            files.append(JsonReporter(self.tally, options, ReportFile(options.json, "the JSON report"), needs))
        if options.trace:
            from torch_ext.runner.reporters.trace import TraceReporter

            trace = TraceReporter(ReportFile(options.trace, "the trace"))
            files.append(trace)
            self._overs.append(trace.over)
        if options.junit:
            from torch_ext.runner.reporters.junit import write_junit

            file = ReportFile(options.junit, "the JUnit report")
            self._at_end.append(partial(write_junit, options=options, file=file, start_s=start_s))
        if options.html:
            from torch_ext.runner.reporters.html import write_page

            file = ReportFile(options.html, "the HTML page")
            self._at_end.append(partial(write_page, options=options, file=file, start_s=start_s))
        if options.github:
            self._at_end.append(partial(annotate, root=os.path.relpath(options.root), out=StyledWriter(stream)))
        if (seed := options.random_order) is not None:
            notes = [*notes, f"Random order of seed {seed}; --random-order={seed} repeats it."]
        live = is_live(stream) and options.verbosity >= 0 and not options.show_output
        text = TextReporter(plan, options, stream, notes, announce=not live)
        self._say = text.writer.verbatim
        running = Running(plan, expected_s, lambda test: expected_s(test) or 1.0, time.monotonic())
        plain = PlainWatch(running, text.writer, often=options.verbosity >= 0)
        self._watch = LiveWatch(running, text.writer, stream) if live else plain
        self._ordered = InOrder(plan, text, failures_at_once=live, waits=plain.wait)
        self._overs += [self._watch.over, self._ordered.over]
        self._all: list[Reporter] = [self._watch, self._ordered, *files]

    def take(self, event: Began | Over | TestResult | Tick | Stalled) -> None:
        """Hand ``event`` to whom it concerns."""
        if isinstance(event, TestResult):
            self.tally.add(event)
        if isinstance(event, Tick):
            self._watch.tick()
        elif isinstance(event, Stalled):
            self._say(f"{event.test.id}: {event.text}")
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
        self.tally.new_round()
        for reporter in self._all:
            reporter.new_round(number)

    def finish(self, *, interrupted: bool) -> None:
        for reporter in self._all:
            reporter.finish(interrupted=interrupted)
        for write in self._at_end:
            write(self.tally, interrupted)
