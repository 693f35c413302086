"""Writes the events of a run as they happen: one JSON object per line. docs/events.md has the schema."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import torch_ext
from torch_ext.results import (
    Began,
    Died,
    Event,
    Needs,
    Problem,
    Raised,
    RanksFailed,
    RoundBegan,
    RunEnded,
    Status,
    TestName,
    TestResult,
)
from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.tally import COLUMNS, ReportFile, Tally, counts
from torch_ext.runner.reporters.text import describe_failure
from torch_ext.world.outcome import Outcome

# Of the schema. Increment it when a field disappears or changes its meaning, but not for a new event or field.
VERSION = 1


class JsonReporter:
    """Writes each event to ``file`` as it happens; ``needs``: the known needs of the plan's tests."""

    def __init__(
        self, tally: Tally, options: RunOptions, file: ReportFile, needs: Mapping[TestName, Needs] = {}
    ) -> None:
        self._tally = tally
        self._file = file
        self._start_s = time.monotonic()
        self._round = 1
        shard = "/".join(map(str, options.shard)) if options.shard else None
        self._write("start", version=VERSION, torch_ext=torch_ext.__version__, root=str(options.root),
                    device=options.device or None, shard=shard)  # fmt: skip
        self._write("plan", tests=[describe_test(test, needs.get(test)) for test in tally.plan.tests])

    def __call__(self, event: Event) -> None:
        if isinstance(event, Began):
            self._write("begin", round=self._round, **_address(event.test))
        elif isinstance(event, TestResult):
            self._write("result", **_result(event))
        elif isinstance(event, RoundBegan):
            self._round = event.number
        elif isinstance(event, RunEnded):
            found = counts(self._tally.results)
            columns = {one.value: found[one] for one in COLUMNS}
            not_run = [test.id for test in self._tally.missing()]
            duration_s = round(time.monotonic() - self._start_s, 6)
            self._write("end", interrupted=event.interrupted, **columns, not_run=not_run, duration_s=duration_s)
            self._file.close()

    def _write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": kind, "time": round(time.time(), 6), **fields}) + "\n")


def _result(result: TestResult) -> dict[str, Any]:
    return {
        **_address(result.test),
        "status": result.status.value,
        "counts_as": result.status.counted.value,
        "duration_s": round(result.duration_s, 6),
        "round": result.round,
        "attempt": result.attempt,
        "again": result.again,
        "reason": result.reason,
        "warnings": list(result.warnings),
        "text": describe_failure(result) if result.status.counted is Status.FAILED else "",
        "problems": [_problem(problem) for problem in result.problems],
        "output": result.output,
    }


def describe_test(test: TestName, needs: Needs | None) -> dict[str, Any]:
    """Return one test of a plan or a list, with its needs if known."""
    declared = ("world_size", "processes", "devices", "hosts") if needs else ()
    return {**_address(test), **{name: getattr(needs, name) for name in declared}}


def _address(test: TestName) -> dict[str, str]:
    return {"test": test.id, "file": test.file, "class": test.cls, "method": test.method}


def _problem(problem: Problem) -> dict[str, Any]:
    if isinstance(problem, Raised):
        return {"kind": "raised", "summary": problem.sentence, "trace": problem.trace, "where": problem.where}
    if isinstance(problem, RanksFailed):
        verdict = problem.report.verdict
        return {
            "kind": "ranks",
            "summary": verdict.summary,
            "where": problem.where,
            "culprits": list(verdict.culprits),
            "victims": list(verdict.victims),
            "took_s": round(problem.report.took_s, 6),
            "details": list(problem.report.details),
            "ranks": [_rank(outcome) for outcome in problem.report.outcomes],
        }
    if isinstance(problem, Died):
        return {"kind": "died", "summary": problem.sentence, "stacks": problem.stacks}
    return {"kind": "remark", "summary": problem.sentence}


def _rank(outcome: Outcome) -> dict[str, Any]:
    return {
        "rank": outcome.rank,
        "host": outcome.host,
        "ending": outcome.ending.value,
        "says": outcome.describe(),
        "exit_code": outcome.exit_code,
        "trace": outcome.receipt.trace if outcome.receipt else "",
        "stacks": outcome.stacks,
        "waits": [wait.description for wait in outcome.waits],
        "output": outcome.output,
        "left_behind": list(outcome.left_behind),
    }
