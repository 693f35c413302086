"""Failures as annotations of GitHub's: lines on stdout that its runner shows beside the code."""

from __future__ import annotations

import os
from typing import TextIO

from torch_ext.runner.options import Options
from torch_ext.runner.reporters.base import AtEnd
from torch_ext.runner.reporters.failure import describe_failure
from torch_ext.runner.reporters.styled import StyledWriter
from torch_ext.runner.results import Status, TestResult
from torch_ext.runner.schedule import Plan

__all__ = ["GitHubReporter", "annotation"]

# GitHub shows ten annotations of a step for each level.
_MOST_CHARACTERS = 4000


class GitHubReporter(AtEnd):
    """Prints an ``::error`` for each failure and a ``::warning`` for each flaky test when the run is over, so that no
    other output stands between them.
    """

    def __init__(self, plan: Plan, options: Options, stream: TextIO) -> None:
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
