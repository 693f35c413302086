"""How much of what was found passed, and why the rest did not, by reason: ``--coverage``, as text or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import TextIO

from torch_ext.runner.progress import Progress
from torch_ext.runner.reporters.base import AtEnd
from torch_ext.runner.reporters.styled import StyledWriter
from torch_ext.runner.results import Status, TestResult
from torch_ext.runner.schedule import Plan

__all__ = ["CoverageReporter"]


class CoverageReporter(AtEnd):
    """Sums up the last round of a run; :meth:`finish` writes it.

    Args:
        plan: what should run.
        stream: where to write.
        as_json: write one JSON object rather than lines.
    """

    def __init__(self, plan: Plan, stream: TextIO, *, as_json: bool) -> None:
        super().__init__(plan)
        self._out = StyledWriter(stream)
        self._as_json = as_json

    def new_round(self, number: int) -> None:
        """Forget the rounds before."""
        self.progress = Progress(self._plan)

    def finish(self, *, interrupted: bool = False) -> None:
        """Write the sum."""
        results, missing = self.progress.results, self.progress.missing()
        files = sorted({result.test.file for result in results} | {test.file for test in self._plan.tests})
        total = _sums(results, len(missing))
        why_not = Counter(_why_not(result) for result in results if result.status is not Status.PASSED) + Counter(
            {"not run": len(missing)}
        )
        by_file = {
            file: _sums(
                [result for result in results if result.test.file == file],
                sum(test.file == file for test in missing),
            )
            for file in files
        }
        if self._as_json:
            data = {**total, "why_not": dict(why_not.most_common()), "files": by_file}
            self._out.verbatim(json.dumps(data, indent=1))
            return
        self._out.line("Coverage:")
        width = max(map(len, [*files, "all"]), default=0)
        for file, sums in [*by_file.items(), ("all", total)]:
            self._out.line(
                f"  {file:{width}}  ",
                ", ".join(f"{number} {name}" for name, number in sums.items() if number or name != "flaky"),
            )
        if why_not:
            self._out.line("Why not:")
        for reason, number in why_not.most_common():
            self._out.line(f"{number:6}  {reason}")


def _sums(results: list[TestResult], missing: int) -> dict[str, int]:
    counted = Counter(result.status for result in results)
    failed = counted[Status.FAILED] + counted[Status.UNEXPECTED_SUCCESS]
    return {
        "found": len(results) + missing,
        "run": counted[Status.PASSED] + counted[Status.XFAIL] + counted[Status.FLAKY] + failed,
        "passed": counted[Status.PASSED],
        "failed": failed,
        "flaky": counted[Status.FLAKY],
        "expected failures": counted[Status.XFAIL],
        "skipped": counted[Status.SKIPPED],
    }


def _why_not(result: TestResult) -> str:
    if result.reason:
        return result.reason
    if result.status is Status.FLAKY:
        return "flaky"
    return "expected failure" if result.status is Status.XFAIL else "failed" if result.problems else "no reason given"
