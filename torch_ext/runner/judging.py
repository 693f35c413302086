"""A second opinion on results: what a run of files that are not our own makes of failures that are known."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from torch_ext.runner.discovery import TestFile
from torch_ext.runner.names import Collected
from torch_ext.runner.options import Options
from torch_ext.runner.results import Status, TestName, TestResult
from torch_ext.runner.schedule import Plan

__all__ = ["Judge", "open_judge", "without_skipped"]


class Judge(Protocol):
    """What a run of files that are not our own makes of results. ``torch_ext.upstream.judge`` has one."""

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


def open_judge(options: Options, files: Sequence[TestFile], collected: Sequence[Collected]) -> Judge | None:
    """Return the judge of this run; None if results count as they are.

    Raises:
        SetupError: a list that the user gave cannot be read.
    """
    if not options.upstream:
        return None
    device = next((one.device for one in collected if one.device), options.device)
    surroundings = {"device": device, "cuda_as_sim": str(options.cuda_as_sim).lower()}
    module = importlib.import_module("torch_ext.upstream.judge")
    return cast(Judge, module.Judge([file.path for file in files], options.differences, surroundings))


def without_skipped(plan: Plan, judge: Judge | None, take: Callable[[TestResult], None]) -> Plan:
    """Return ``plan`` without what ``judge`` lets not run, and ``take`` that as skipped."""
    reasons = {test: reason for test in plan.tests if judge is not None and (reason := judge.skipped(test))}
    for test, reason in reasons.items():
        take(TestResult(test, Status.SKIPPED, 0.0, reason=reason))
    kept = (batch._replace(tests=tuple(test for test in batch.tests if test not in reasons)) for batch in plan)
    return Plan(tuple(batch for batch in kept if batch.tests)) if reasons else plan
