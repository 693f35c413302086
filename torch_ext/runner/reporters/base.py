"""What every reporter of results can do, and what those share that write when the run is over."""

from __future__ import annotations

from typing import Protocol

from torch_ext.runner.progress import Progress
from torch_ext.runner.results import Began, TestResult
from torch_ext.runner.schedule import Plan

__all__ = ["AtEnd", "Reporter"]


class Reporter(Protocol):
    """Takes the results of one run. Called in the supervisor, on the main thread, never at once from two places.

    Whatever writes raises ``results.OutputError`` where it cannot, in words for users; the run then ends.
    """

    def begin(self, began: Began) -> None:
        """Take note that a class or a test has begun. Several may be under way at once. Must not block either."""
        ...

    def add(self, result: TestResult) -> None:
        """Take one result, as soon as its test has ended. Must not block on anything but its own output.

        A result with ``again`` is followed by another of the same test and round, which counts in its place.
        """
        ...

    def new_round(self, number: int) -> None:
        """Take note that the whole plan runs once more. ``number`` is 2 for the first repetition."""
        ...

    def finish(self, *, interrupted: bool = False) -> None:
        """Take note that no more results come. Called once, also after an interrupt."""
        ...


class AtEnd:
    """A reporter that keeps what comes, and has only :meth:`Reporter.finish` to write.

    Args:
        plan: what should run.

    Attributes:
        progress: what has come, of all rounds.
    """

    def __init__(self, plan: Plan) -> None:
        self.progress = Progress(plan)
        self._plan = plan

    def begin(self, began: Began) -> None:
        """Nothing is kept of it."""

    def add(self, result: TestResult) -> None:
        """Keep ``result``, in the place of an earlier attempt."""
        self.progress.add(result)

    def new_round(self, number: int) -> None:
        """Miss every test once more."""
        self.progress.new_round()
