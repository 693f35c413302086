"""What ran when, as a trace for https://ui.perfetto.dev: a row for each class that runs at a time, with its tests, and
below it one for each of its ranks, with start, body and teardown and, within the body, the making of its first group.

The format is Chrome's trace events: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import time
from typing import Any

from torch_ext.results import Began, Over, RanksFailed, TestName, TestResult
from torch_ext.runner.reporters.base import ReportFile
from torch_ext.world.outcome import Outcome

__all__ = ["TraceReporter"]

_Key = tuple[str, str]
# Rows of ranks are numbered apart from rows of classes, and at most so many of them belong to one class.
_RANKS = 1000


class TraceReporter:
    """Writes the trace to ``file`` when the run is over. A class takes the lowest row that is free when it begins."""

    def __init__(self, file: ReportFile) -> None:
        self._file = file
        self._start_s = time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._rows: dict[_Key, int] = {}
        self._open: dict[_Key, tuple[float, float]] = {}  # when a class began, and when its last test ended
        self._tests: dict[TestName, float] = {}
        self._rank_rows: set[int] = set()

    def begin(self, began: Began) -> None:
        """Note when it began."""
        now_s = time.monotonic()
        key = began.test.file, began.test.cls
        if began.test.method:
            self._tests[began.test] = now_s
            return
        self._end_class(key)
        taken = {self._rows[other] for other in self._open}
        self._rows[key] = next(row for row in range(len(taken) + 1) if row not in taken)
        self._open[key] = now_s, now_s

    def add(self, result: TestResult) -> None:
        """Draw a test from its beginning to now, or, if it never began, nothing."""
        now_s = time.monotonic()
        key = result.test.file, result.test.cls
        if key in self._open:
            self._open[key] = self._open[key][0], now_s
        began_s = self._tests.pop(result.test, None)
        if began_s is not None:
            told: dict[str, Any] = {"status": result.status.value, "round": result.round, "attempt": result.attempt}
            for problem in result.problems:
                if isinstance(problem, RanksFailed):
                    told["ranks"] = {str(one.rank): one.describe() for one in problem.report.outcomes}
            self._draw(result.test.method, key, began_s, now_s, told)
            for each in result.ranks:
                self._draw_rank(each, self._rows.get(key, 0))

    def over(self, over: Over) -> None:
        """End the row of a class of which nothing more comes."""
        self._end_class((over.test.file, over.test.cls))

    def new_round(self, number: int) -> None:
        """End what the last round left open."""
        for key in list(self._open):
            self._end_class(key)

    def finish(self, *, interrupted: bool = False) -> None:
        """Write the trace."""
        self.new_round(0)
        rows = {row * _RANKS: f"row {row}" for row in range(max(self._rows.values(), default=0) + 1)}
        rows |= {row: f"row {row // _RANKS} rank {row % _RANKS - 1}" for row in self._rank_rows}
        names = [
            {"ph": "M", "pid": 1, "tid": row, "name": kind, "args": told}
            for row, name in sorted(rows.items())
            for kind, told in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": row}))
        ]
        title = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "torch_ext"}}
        self._file.write(json.dumps({"traceEvents": [title, *names, *self._events]}) + "\n")
        self._file.close()

    def _end_class(self, key: _Key) -> None:
        if key in self._open:
            began_s, ended_s = self._open.pop(key)
            self._draw(f"{key[0]}::{key[1]}", key, began_s, ended_s, {})

    def _draw_rank(self, rank: Outcome, row: int) -> None:
        """Draw the start, body, rendezvous and teardown of ``rank``, in a row below that of its class."""
        place = row * _RANKS + 1 + min(rank.rank, _RANKS - 2)
        self._rank_rows.add(place)
        receipt = rank.receipt
        end_s = max(rank.ended_s, receipt.time_s if receipt else 0.0) or time.monotonic()
        told = {"rank": rank.rank, "ending": rank.describe()}
        self._slice("start", "rank", place, rank.started_s, receipt.began_s if receipt else end_s, told)
        if receipt is None:
            return
        self._slice("body", "rank", place, receipt.began_s, receipt.time_s, told)
        if receipt.met_s[1]:
            self._slice("rendezvous", "rank", place, *receipt.met_s, told)
        self._slice("teardown", "rank", place, receipt.time_s, end_s, told)

    def _draw(self, name: str, key: _Key, began_s: float, ended_s: float, told: dict[str, Any]) -> None:
        self._slice(name, "test" if told else "class", self._rows.get(key, 0) * _RANKS, began_s, ended_s, told)

    def _slice(self, name: str, kind: str, row: int, began_s: float, ended_s: float, told: dict[str, Any]) -> None:
        # Both ends are rounded alike: Perfetto drops a slice that begins before the one in front of it has ended.
        start_us, end_us = (round((each_s - self._start_s) * 1e6) for each_s in (began_s, ended_s))
        place = {"pid": 1, "tid": row, "ts": start_us, "dur": max(0, end_us - start_us)}
        self._events.append({"ph": "X", "name": name, "cat": kind, **place, "args": told})
