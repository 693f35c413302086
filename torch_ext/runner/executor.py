"""What the command asks of the half of the runner that starts processes, and of what judges results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch_ext.results import Sink, TestName, TestResult
from torch_ext.runner.discovery import TestFile
from torch_ext.runner.names import Collected
from torch_ext.runner.schedule import Plan

__all__ = ["Executor", "Judge", "Upstream"]


class Executor(Protocol):
    """The half of the runner that starts processes, for one run. ``torch_ext.runner.execute`` opens one."""

    def collect(self, files: Sequence[TestFile]) -> Iterator[Collected]:
        """Import ``files``, each in a process of its own, and yield one answer for each, in any order.

        Called on the main thread. May block as long as imports take. A file that cannot be imported is an answer.
        """
        ...

    def run(self, plan: Plan, sink: Sink) -> None:
        """Run ``plan``. Tell ``sink``, on the calling thread, of each class and test that begins and of each class that
        is over, and hand it each result as soon as its test has ended. Several classes may run at once.

        Called on the main thread, as often as there are rounds; the processes of the last one end with :meth:`close`.
        Stops after the first failure if ``options.failfast``. A class that is skipped as a whole is one
        skipped result for each of its tests: a planned test without a result counts as not run, and fails the command.
        """
        ...

    def close(self) -> None:
        """End every process and remove every file of the run. Idempotent."""
        ...


class Judge(Protocol):
    """What a run of files that are not our own makes of results."""

    told: str

    def skipped(self, test: TestName) -> str:
        """Return why ``test`` must not run; empty if it may."""
        ...

    def judged(self, result: TestResult) -> TestResult:
        """Return what counts in the place of ``result``."""
        ...

    def out_of_date(self, planned: Sequence[TestName], *, whole: bool) -> list[TestResult]:
        """Return a failure for each known difference that no longer is one. ``whole``: no test was left out."""
        ...


class Upstream(NamedTuple):
    """How files of a PyTorch checkout run, as the command passes it to the runner, which knows nothing else of them.

    Attributes:
        harness: modules that a zygote loads before such a file, so that it sees our harness; the first of them, the
            root zygote loads as well.
        judge: makes a judge of the files of a run, lists of known differences, and what their conditions ask for.
    """

    harness: tuple[str, ...]
    judge: Callable[[Sequence[Path], Sequence[str], Mapping[str, str]], Judge]
