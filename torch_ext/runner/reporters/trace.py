"""What ran when, as a trace for https://ui.perfetto.dev: a row for each class that runs at a time, with its tests, and
below it one for each of its ranks, with start, body and teardown and, within the body, the making of its first group.

The format is Chrome's trace events: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch_ext.results import Began, Event, Over, RoundBegan, TestName, TestResult
from torch_ext.runner.reporters.base import ReportFile
from torch_ext.world.outcome import Outcome

__all__ = ["write_trace"]

# Rows of ranks are numbered apart from rows of classes, and at most so many of them belong to one class.
_RANKS = 1000


def write_trace(events: Sequence[tuple[float, Event]], file: ReportFile) -> None:
    """Write the trace of ``events``, each with its time, of which the first is the beginning of the run."""
    slices = list(_slices(events))
    shown = {row for row, *_ in slices} | {0}
    names = [
        {"ph": "M", "pid": 1, "tid": row, "name": kind, "args": told}
        for row in sorted(shown)
        for kind, told in (("thread_name", {"name": _name(row)}), ("thread_sort_index", {"sort_index": row}))
    ]
    title = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "torch_ext"}}
    zero_s = events[0][0] if events else 0.0
    file.write(json.dumps({"traceEvents": [title, *names, *(_drawn(zero_s, each) for each in slices)]}) + "\n")
    file.close()


def _name(row: int) -> str:
    place, rank = divmod(row, _RANKS)
    return f"row {place} rank {rank - 1}" if rank else f"row {place}"


# A slice: its row, name, category, beginning, end and arguments.
_Slice = tuple[int, str, str, float, float, dict[str, Any]]


def _slices(events: Sequence[tuple[float, Event]]) -> Iterator[_Slice]:
    """Yield the slices of classes, tests and ranks."""
    classes, tests = _Classes(), dict[TestName, float]()
    for time_s, event in events:
        if isinstance(event, Began) and event.test.method:
            tests[event.test] = time_s
        elif isinstance(event, Began):
            yield from classes.begin(event.test, time_s)
        elif isinstance(event, TestResult):
            row = classes.row_of(event.test, time_s)
            if (began_s := tests.pop(event.test, None)) is not None:
                yield row * _RANKS, event.test.method, "test", began_s, time_s, _said(event)
                for rank in event.ranks:
                    yield from _of_rank(rank, row)
        elif isinstance(event, Over):
            yield from classes.end((event.test.file, event.test.cls))
        elif isinstance(event, RoundBegan):
            yield from classes.end_all()
    yield from classes.end_all()


class _Classes:
    """The classes that run. Each takes the lowest row that is free when it begins."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], int] = {}
        self._running: dict[tuple[str, str], tuple[float, float]] = {}  # its beginning, and the end of its last test

    def begin(self, cls: TestName, time_s: float) -> Iterator[_Slice]:
        key = cls.file, cls.cls
        yield from self.end(key)
        taken = {self._rows[other] for other in self._running}
        self._rows[key] = next(row for row in range(len(taken) + 1) if row not in taken)
        self._running[key] = time_s, time_s

    def row_of(self, test: TestName, time_s: float) -> int:
        """Return the row of the class of ``test``, which has ended."""
        key = test.file, test.cls
        if key in self._running:
            self._running[key] = self._running[key][0], time_s
        return self._rows.get(key, 0)

    def end(self, key: tuple[str, str]) -> Iterator[_Slice]:
        if key in self._running:
            yield (self._rows[key] * _RANKS, "::".join(key), "class", *self._running.pop(key), {})

    def end_all(self) -> Iterator[_Slice]:
        for key in list(self._running):
            yield from self.end(key)


def _said(result: TestResult) -> dict[str, Any]:
    told: dict[str, Any] = {"status": result.status.value, "round": result.round, "attempt": result.attempt}
    if result.failed_ranks:
        told["ranks"] = {str(one.rank): one.describe() for one in result.failed_ranks}
    return told


def _of_rank(rank: Outcome, row: int) -> Iterator[_Slice]:
    """Yield the start, body, rendezvous and teardown of ``rank``, in a row below its class."""
    place = row * _RANKS + 1 + min(rank.rank, _RANKS - 2)
    receipt = rank.receipt
    end_s = max(rank.ended_s, receipt.time_s if receipt else 0.0) or time.monotonic()
    told = {"rank": rank.rank, "ending": rank.describe()}
    yield place, "start", "rank", rank.started_s, receipt.began_s if receipt else end_s, told
    if receipt is None:
        return
    yield place, "body", "rank", receipt.began_s, receipt.time_s, told
    if receipt.met_s[1]:
        yield (place, "rendezvous", "rank", *receipt.met_s, told)
    yield place, "teardown", "rank", receipt.time_s, end_s, told


def _drawn(zero_s: float, drawn: _Slice) -> dict[str, Any]:
    row, name, kind, *ends, told = drawn
    # Both ends are rounded alike: Perfetto drops a slice that begins before the one in front of it has ended.
    start_us, end_us = (round((each_s - zero_s) * 1e6) for each_s in ends)
    place = {"pid": 1, "tid": row, "ts": start_us, "dur": max(0, end_us - start_us)}
    return {"ph": "X", "name": name, "cat": kind, **place, "args": told}
