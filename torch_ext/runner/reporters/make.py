"""The reporters of a run, by its options, as one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch_ext.results import Event, Needs, RunEnded, Status, TestName
from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.tally import InOrder, Reporter, ReportFile, Tally
from torch_ext.runner.reporters.text import TextReporter, Writer, describe_failure, is_live
from torch_ext.runner.reporters.watch import LiveWatch, PlainWatch
from torch_ext.runner.schedule import Plan

__all__ = ["Reporters", "annotate", "annotation"]

# Of one of GitHub's annotations, lines on stdout that it shows beside the code; ten of a step for each level.
_MOST_CHARACTERS = 4000


def annotate(tally: Tally, interrupted: bool, *, root: str, out: Writer) -> None:
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
        stream = sys.stderr if options.json == "-" else sys.stdout
        out, files = Writer(stream), list[Reporter]()
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
        often = options.verbosity >= 0
        live = is_live(stream) and often and not options.show_output
        text = TextReporter(self.tally, options, out, notes, announce=not live)
        make_watch = LiveWatch if live else partial(PlainWatch, often=often)
        watch = make_watch(self.tally, expected_s, out)
        self._all: list[Reporter] = [self.tally, watch, InOrder(plan, text), *files]

    def __call__(self, event: Event) -> None:
        for reporter in self._all:
            reporter(event)
        if isinstance(event, RunEnded):
            for write in self._at_end:
                write(self.tally, event.interrupted)
