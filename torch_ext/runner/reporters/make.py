"""The reporters of a run, by its options."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torch_ext.runner.options import Options
from torch_ext.runner.reporters.base import Reporter
from torch_ext.runner.reporters.report_file import ReportFile
from torch_ext.runner.reporters.text import TextReporter
from torch_ext.runner.results import Needs, TestName
from torch_ext.runner.schedule import Plan

__all__ = ["make_reporters"]


def make_reporters(
    plan: Plan, options: Options, needs: Mapping[TestName, Needs], notes: Sequence[str]
) -> list[Reporter]:
    """Return every reporter that ``options`` ask for. The text goes to stderr where JSON Lines take stdout.

    Raises:
        SetupError: a file cannot be opened.
    """
    made: list[Reporter] = []
    if options.json:
        from torch_ext.runner.reporters.jsonlines import JsonReporter

        made.append(JsonReporter(plan, options, ReportFile(options.json, "the JSON report"), needs))
    if options.junit:
        from torch_ext.runner.reporters.junit import JUnitReporter

        made.append(JUnitReporter(plan, options, ReportFile(options.junit, "the JUnit report")))
    stream = sys.stderr if options.json == "-" else sys.stdout
    if options.random_order is not None:
        seed = options.random_order
        notes = [*notes, f"Random order of seed {seed}; --random-order={seed} repeats it."]
    return [TextReporter(plan, options, stream, notes), *made]
