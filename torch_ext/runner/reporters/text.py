"""The text report of a run: progress, each failure as it happens, and the summary; also annotations for GitHub."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import TextIO

from torch_ext.results import (
    Began,
    Died,
    Event,
    Over,
    Problem,
    Raised,
    RanksFailed,
    RoundBegan,
    RunEnded,
    Stalled,
    Status,
    TestName,
    TestResult,
    Tick,
)
from torch_ext.runner.options import TABLE, RunOptions
from torch_ext.runner.reporters.tally import COLUMNS, Tally, counts, writing
from torch_ext.runner.schedule import Batch
from torch_ext.world.verdict import end_of_output, render
from torch_ext.world.wording import LEFT_BEHIND, printable

# Options that a command for a rerun repeats.
_CONDITIONS = {
    "typed_root", "upstream", "cuda_as_sim", "device", "timeout_s", "races", "schedule", "clock", "memory_bytes",
    "check_leaks", "start_method", "cluster",
}  # fmt: skip


def describe_failure(result: TestResult) -> str:
    """Return the problems of ``result``, then the end of its parent half's output; empty if there are neither.

    >>> from torch_ext.results import Remark
    >>> test = TestName("test_a.py", "TestA", "test_b")
    >>> print(describe_failure(TestResult(test, Status.FAILED, 0.1, (Remark("It is gone."),), output="hello\\n")))
    It is gone.
    <BLANKLINE>
    Output of the parent half:
        hello
    """
    parts = [_describe(problem) for problem in result.problems]
    if result.status is Status.UNEXPECTED_SUCCESS:
        parts.append("The test is marked as an expected failure and passed: remove the mark.")
    if lines := end_of_output(result.output, died=result.died):
        parts.append("\n".join(["Output of the parent half:", *(f"    {line}".rstrip() for line in lines)]))
    return "\n\n".join(part for part in parts if part)


def _describe(problem: Problem) -> str:
    if isinstance(problem, (Raised, RanksFailed)):
        text = problem.trace if isinstance(problem, Raised) else render(problem.report)
        return f"in {problem.where}\n{text}" if problem.where else text
    if isinstance(problem, Died):
        return f"{problem.sentence}\n{problem.stacks.rstrip()}" if problem.stacks else problem.sentence
    return problem.sentence


def rerun_command(options: RunOptions, test: TestName) -> str:
    """Return the command that runs ``test`` (or its class, or its file) again under the same conditions.

    >>> from pathlib import Path
    >>> rerun_command(RunOptions(Path("test"), memory_bytes=1 << 20), TestName("a/test_b.py", "TestC", "test_d"))
    'python run_test.py -i a/test_b.py::TestC::test_d --memory 1048576'
    """
    words = ["python", options.script, ".".join(part for part in (test.cls, test.method) if part)]
    if not options.script:
        words = [*options.command.split(), "-i", test.id]
    for row in TABLE:
        value = getattr(options, row.field)
        if row.field in _CONDITIONS and value != getattr(RunOptions, row.field):
            words += row.flags[-1:]
            words += map(str, value if isinstance(value, tuple) else [value] if row.metavar else [])
    return shlex.join(filter(None, words))


# Terminal codes of the styles in a report.
_CODES = {"green": "32", "yellow": "33", "dim": "2", "bold red": "1;31", "bold yellow": "1;33"}
_COLORS = frozenset(("green", "yellow", "bold red", "bold yellow"))
_STYLES = {Status.PASSED: "green", Status.FAILED: "bold red", Status.SKIPPED: "yellow", Status.FLAKY: "bold yellow"}


class Writer:
    """Writes lines to ``stream``, with styles if it is a terminal.

    Escapes control characters, so that no test controls the terminal, which wraps long lines itself, so that a test's
    name can be copied. Methods raise :class:`OutputError`, or ``BrokenPipeError`` if the reader has closed the pipe.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_styles = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        self.wrote_s = time.monotonic()  # `time.monotonic` of the last line

    def line(self, *parts: str | tuple[str, str]) -> None:
        """Write a line, or several. A part is a text, or a text with its style on a terminal."""
        pairs = [(part, "") if isinstance(part, str) else part for part in parts]
        line = "".join(self._styled(self._encodable(text), style) for text, style in pairs).removesuffix("\n")
        self.wrote_s = time.monotonic()
        with writing("the report cannot be written"):
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def _encodable(self, text: str) -> str:
        # In the C locale Python's stdout refuses a lone surrogate whatever its encoding.
        encoding = self._stream.encoding or "utf-8"
        return printable(text).encode(encoding, "backslashreplace").decode(encoding)

    def _styled(self, text: str, style: str) -> str:
        """Return ``text`` with the terminal's codes for ``style``; unchanged without a terminal or colors."""
        if not self._has_styles or not style or (style in _COLORS and os.environ.get("NO_COLOR")):
            return text
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


class TextReporter:
    """Prints ``notes``, a line when a class begins unless the report is quiet, results as they arrive, and a summary at
    the end of the run. ``tally`` counts each event before.
    """

    def __init__(self, tally: Tally, options: RunOptions, out: Writer, notes: Sequence[str] = ()) -> None:
        self._tally = tally
        self._options = options
        self._out = out
        self._begun: set[TestName] = set()
        self._printed: set[Batch] = set()
        self._start_s = time.monotonic()
        for note in notes:
            self._out.line(note)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Began):
            self._begin(event)
        elif isinstance(event, TestResult):
            self._add(event)
        elif isinstance(event, Over):
            batch = self._tally.batch_of(event.test)
            if batch and not (self._options.failfast and self._missing(batch)):  # the run may go on after a flake
                self._class_line(batch)
        elif isinstance(event, Stalled):
            self._out.line(f"{event.test.id}: {event.text}")
        elif isinstance(event, RoundBegan):
            self._begun.clear()
            self._printed.clear()
            self._out.line(f"Round {event.number} of {self._options.repeat}")
        elif isinstance(event, RunEnded):
            self._finish(event.interrupted)

    def _begin(self, began: Began) -> None:
        """Print a line when a class begins, with its number."""
        if began.test.method or began.test in self._begun or self._options.verbosity < 0:
            return
        self._begun.add(began.test)
        total = len(self._tally.plan.batches)
        number = f"[{len(self._begun):>{len(str(total))}}/{total}]"
        self._out.line((number, "dim"), f" {began.test.id}")

    def _add(self, result: TestResult) -> None:
        if self._options.verbosity > 0:
            word = (result.status.value, _STYLES[result.status.counted])
            times = f"  {result.duration_s:.2f} s"
            self._out.line(result.test.id, "  ", word, times, f"  {result.reason}" if result.reason else "")
        if result.status is Status.FLAKY:
            times = "once" if len(result.earlier) == 1 else f"{len(result.earlier)} times"
            self._out.line(("FLAKY", _STYLES[Status.FLAKY]), f" {result.test.id}: it failed {times}, then passed")
        elif result.status.counted is Status.FAILED:
            self._failure(result)
        for warning in result.warnings:
            if LEFT_BEHIND in warning:
                self._out.line(("LEAK", _STYLES[Status.FLAKY]), f" {result.test.id}: {warning}")

    def _finish(self, interrupted: bool) -> None:
        """Print the rest, and the summary, with ``N passed, N failed, N skipped``, maybe ``, N flaky``, last."""
        for batch in self._tally.plan:
            if self._tally.results_of(batch):
                self._class_line(batch)
        results = self._tally.results
        skipped = [result for result in results if result.status is Status.SKIPPED]
        self._block("Skipped:", _grouped(result.reason or "no reason given" for result in skipped))
        if skipped and len(skipped) == len(results):
            self._out.line(("Nothing ran: every test was skipped.", "yellow"))
        self._block("Warnings:", _grouped(text for result in results for text in result.warnings))
        for title, status in (("Flaky:", Status.FLAKY), ("Failed:", Status.FAILED)):
            named = [f"  {result.test.id}" for result in results if result.status.counted is status]
            if len(results) > 1:  # the report of a single test is just above
                self._block(title, named, _STYLES[status])
        if interrupted:
            running = ", ".join(name.id for name, _ in self._tally.running.values())
            self._out.line((f"Interrupted{' in ' if running else ''}{running}.", "bold yellow"))
        if not results:
            self._out.line(("Nothing ran.", "bold yellow"))
        if missing := self._tally.missing():
            self._out.line((f"Not run: {_tests(len(missing))}, the first of them {missing[0].id}", "bold yellow"))
        self._out.line(f"{self._ran()} in {time.monotonic() - self._start_s:.2f} s")
        self._out.line(*_counted(results, (Status.PASSED, Status.FAILED, Status.SKIPPED)))

    def _ran(self) -> str:
        whole = Counter[tuple[str, str]]()
        for result in self._tally.results:
            if not result.test.method:
                verb = "skipped" if result.status is Status.SKIPPED else "failed"
                whole["class" if result.test.cls else "file", verb] += 1
        parts = [f"Ran {_tests(len(self._tally.results) - whole.total())}"]
        for (kind, verb), number in sorted(whole.items(), reverse=True):
            parts.append(f"{number} {kind}{('es' if kind == 'class' else 's') * (number > 1)} {verb} as a whole")
        return "; ".join(parts)

    def _failure(self, result: TestResult) -> None:
        attempt = f"  attempt {result.attempt} of {self._options.reruns + 1}" if result.again or result.earlier else ""
        self._out.line()
        self._out.line(("FAILED", _STYLES[Status.FAILED]), f" {result.test.id}  {result.duration_s:.2f} s{attempt}")
        if text := describe_failure(result):
            self._out.line(text)
        example = re.findall(r"^ +(TORCH_EXT_EXAMPLE=\S+)$", text, re.MULTILINE)[-1:]  # of a property-based test
        self._out.line(" ".join(["rerun:", *example, rerun_command(self._options, result.test)]))
        self._out.line()

    def _missing(self, batch: Batch) -> int:
        return sum(test in self._tally.waiting for test in batch.tests)

    def _class_line(self, batch: Batch) -> None:
        if self._options.verbosity != 0 or batch in self._printed:
            return
        self._printed.add(batch)
        results = self._tally.results_of(batch)
        columns = _counted(results, missing=self._missing(batch))
        duration_s = sum(result.duration_s for result in results)
        self._out.line(f"{batch.name.id}  ", *columns, f"  {duration_s:.2f} s")

    def _block(self, title: str, lines: Sequence[str], style: str = "") -> None:
        if lines:
            self._out.line((title, style))
        for line in lines:
            self._out.line(line)


def _grouped(texts: Iterable[str]) -> list[str]:
    return [f"{number:6}  {text}" for text, number in Counter(texts).most_common()]


def _tests(number: int) -> str:
    return f"{number} test{'s' * (number != 1)}"


def _counted(
    results: Iterable[TestResult], always: Collection[Status] = (), missing: int = 0
) -> list[str | tuple[str, str]]:
    """Return the count of each status, with its style; a zero only for those in ``always``."""
    found = counts(results)
    shown = [one for one in COLUMNS if found[one] or one in always]
    parts = [(f"{found[one]} {one.value}", _STYLES[one] if found[one] else "") for one in shown]
    parts += [(f"{missing} not run", "yellow")] * bool(missing)
    return [each for part in parts for each in (", ", part)][1:]


# Seconds without a line after which to write one, so that the run does not look dead; the same with --quiet.
_SILENCE_S, _QUIET_S = 20.0, 60.0


class ProgressLines:
    """Adds a progress line to a report after a while without output, three times a minute if ``often``, else once.
    ``expected_s``: the expected duration of a test; None if unknown.
    """

    def __init__(
        self, tally: Tally, expected_s: Callable[[TestName], float | None], out: Writer, *, often: bool = True
    ) -> None:
        self._tally = tally
        self._expected_s = expected_s
        self._out = out
        self._silence_s = _SILENCE_S if often else _QUIET_S

    def __call__(self, event: Event) -> None:
        now_s = time.monotonic()
        if isinstance(event, Tick) and now_s - self._out.wrote_s > self._silence_s:
            self._out.line(self.summary(now_s))
            for line in self.under_way(now_s):
                self._out.line(f"  running: {line}")

    def summary(self, now_s: float) -> str:
        """Return the progress of the run in one line, with an estimate of the remaining time at the present pace."""
        planned, waiting = self._tally.plan.tests, self._tally.waiting
        done, took_s = len(planned) - len(waiting), now_s - self._tally.began_s
        found, parts = counts(self._tally.results), [f"[{done}/{len(planned)}]"]
        parts += [f"{found[one]} {one.value}" for one in COLUMNS if found[one]]
        parts.append(_format_duration(took_s))
        waiting_s, planned_s = (sum(self._expected_s(test) or 1.0 for test in tests) for tests in (waiting, planned))
        if done and waiting:
            parts.append(f"about {_format_duration(waiting_s * took_s / (planned_s - waiting_s))} left")
        return "  ".join(parts)

    def under_way(self, now_s: float) -> list[str]:
        """Return a line for each running class, the longest-running test first."""
        lines = []
        for name, since_s in sorted(self._tally.running.values(), key=lambda one: one[1]):
            batch = self._tally.batch_of(name)
            ranks = batch.need.processes if batch is not None else 1
            where = name.id + ("" if name.method else " (between tests)")
            lines.append(f"{where}  {ranks} rank{'s' * (ranks != 1)}  {_format_duration(now_s - since_s)}")
        return lines


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else str(timedelta(seconds=int(seconds)))


# Length limit of a GitHub annotation: a line on stdout that GitHub shows beside the code, ten per step and level.
_MAX_CHARACTERS = 4000


def annotate(tally: Tally, interrupted: bool, *, root: str, out: Writer) -> None:
    """Print an ``::error`` for each failure and a ``::warning`` for each flaky test, at the end of the run."""
    for result in tally.results:
        file = os.path.normpath(os.path.join(root, result.test.file))
        if result.status is Status.FLAKY:
            text = f"failed {len(result.earlier)} times, then passed:\n{describe_failure(result.earlier[0])}"
            out.line(annotation("warning", file, f"flaky: {result.test.id}", text))
        elif result.status.counted is Status.FAILED:
            out.line(annotation("error", file, result.test.id, describe_failure(result)))


def annotation(level: str, file: str, title: str, text: str) -> str:
    r"""Return an annotation in the syntax of GitHub's runner.

    >>> annotation("error", "a,b.py", "a: 100%", "one\ntwo")
    '::error file=a%2Cb.py,title=a%3A 100%25::one%0Atwo'
    """
    return f"::{level} file={_property(file)},title={_property(title)}::{_escaped(text[:_MAX_CHARACTERS])}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
