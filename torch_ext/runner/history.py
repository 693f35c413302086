"""How tests ended in earlier runs, and how long they took. Standard library and own layer only.

Note [The history]
~~~~~~~~~~~~~~~~~~
One JSON file for each root lies in the cache's folder, for the last 100 roots. It holds the last 20 records of each
test, at most 20,000 tests, and no record older than 90 days. A run reads it once, and adds its own records at its end,
under a lock and by renaming, to what lies there then: so runs side by side lose nothing of each other's. A history that
cannot be read or written costs what is made of it, never a run; see Note [Trusted folders] for whose it may be.

A run of several rounds adds a record of a test for each, all with the same time, by which they are known to be of one
run: what failed in any of its rounds failed last time. Of more rounds than are kept, those that failed stay.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ext import cache
from torch_ext.runner.results import Status, TestName, TestResult

__all__ = ["History", "Record"]

_FOLDER = "history"  # below the cache's
_ROOTS, _RECORDS, _TESTS, _AGE_S = 100, 20, 20_000, 90 * 24 * 3600.0
# How many of the last records tell how long a test takes.
_RECENT = 5


@dataclass(frozen=True)
class Record:
    """One ending of a test.

    Attributes:
        time_s: when its run told it (``time.time``); the same for all that a run tells.
        device: the device type that was asked for; empty: the machine's best.
        status: the value of its ``Status``.
        duration_s: how long it took.
        attempts: how often it ran for that.
        said: what went wrong, in one line.
    """

    time_s: float
    device: str
    status: str
    duration_s: float
    attempts: int = 1
    said: str = ""


class History:
    """The records of one root.

    Args:
        folder: the cache's folder; None: nothing is remembered.
        root: the root of the suites.
        device: the device type that was asked for.
    """

    def __init__(self, folder: Path | None, root: Path, device: str) -> None:
        place = None if folder is None else folder / _FOLDER
        trusted = place is not None and not cache.why_not_trusted(place)
        digest = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
        self._path = place / f"{root.name}-{digest}.json" if place is not None and trusted else None
        self._device = device
        self._records: dict[str, list[Record]] | None = None
        self._new: list[tuple[str, Record]] = []
        self._cleared: set[str] = set()
        self._now_s: float | None = None

    def records(self, test: str) -> Sequence[Record]:
        """Return the records of the test with this id, the oldest first."""
        return self._known.get(test, ())

    @property
    def tests(self) -> Iterable[str]:
        """The ids of all that has records."""
        return self._known

    def failed(self, test: TestName) -> bool:
        """Whether ``test`` failed in a round of the last run that had it, by itself or with its class or file."""
        ids = (test.id, TestName(test.file, test.cls).id, test.file)
        return any(_failed_last(found) for each in ids if (found := self._known.get(each)))

    def expected_s(self, test: TestName) -> float | None:
        """Return how long ``test`` should take, by its last times on this device, else on any; None if it has none."""
        ran = [record for record in self.records(test.id) if record.status != Status.SKIPPED.value]
        ours = [record for record in ran if record.device == self._device] or ran
        return statistics.median(record.duration_s for record in ours[-_RECENT:]) if ours else None

    def add(self, result: TestResult) -> None:
        """Keep ``result``, the last word on its test in this round, for :meth:`save`."""
        seconds = sum(one.duration_s for one in (*result.earlier, result)) / (len(result.earlier) + 1)
        said = _said((*result.earlier, result)[0])
        if self._now_s is None:
            self._now_s = time.time()
        record = Record(self._now_s, self._device, result.status.value, round(seconds, 4), result.attempt, said)
        self._new.append((result.test.id, record))
        if result.test.method:  # its file could be imported
            self._cleared |= {result.test.file, TestName(result.test.file, result.test.cls).id}

    def save(self) -> None:
        """Write what was added. Does nothing where the history cannot be written."""
        if self._path is None or not self._new:
            return
        with suppress(OSError), self._locked(self._path):
            known = _read(self._path)
            for test in self._cleared:
                known.pop(test, None)
            for test, record in self._new:
                known.setdefault(test, []).append(record)
            _write(self._path, _bounded(known))
            self._new, self._now_s = [], None
            _drop_old_roots(self._path.parent)

    @property
    def _known(self) -> Mapping[str, Sequence[Record]]:
        if self._records is None:
            self._records = {} if self._path is None else _read(self._path)
        return self._records

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        cache.make(path.parent)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


_FAILED = frozenset(status.value for status in Status if status.counted is Status.FAILED)


def _failed_last(records: Sequence[Record]) -> bool:
    """Whether one of the last run's records is of a failure."""
    return any(one.status in _FAILED for one in records if one.time_s == records[-1].time_s)


def _said(result: TestResult) -> str:
    """Return what went wrong in one line.

    >>> from torch_ext.runner.results import Remark
    >>> _said(TestResult(TestName("a"), Status.FAILED, 0.0, (Remark("one\\ntwo"),)))
    'one'
    """
    if not result.problems:
        return result.reason
    problem = result.problems[0]
    report = getattr(problem, "report", None)
    words = report.verdict.summary if report else getattr(problem, "error", "") or getattr(problem, "sentence", "")
    return str(words).strip().partition("\n")[0][:200]


def _read(path: Path) -> dict[str, list[Record]]:
    """Return what lies at ``path``; nothing if it cannot be read or is none of ours."""
    try:
        told: Any = json.loads(path.read_bytes())
        return {str(test): [Record(*fields) for fields in rows] for test, rows in told["tests"].items() if rows}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _bounded(known: Mapping[str, list[Record]]) -> dict[str, list[Record]]:
    oldest_s = time.time() - _AGE_S
    young = {test: [one for one in records if one.time_s >= oldest_s] for test, records in known.items()}
    recent = {test: _last(records) for test, records in young.items()}
    newest = sorted((test for test in recent if recent[test]), key=lambda test: -recent[test][-1].time_s)[:_TESTS]
    kept = set(newest)
    return {test: records for test, records in recent.items() if test in kept}


def _last(records: Sequence[Record]) -> list[Record]:
    """Return the last that are kept. Rounds of one run push out others of it that passed before any that failed.

    >>> rounds = [Record(1.0, "", "failed", 0.0), *[Record(1.0, "", "passed", 0.0)] * 30]
    >>> [one.status for one in _last(rounds)].count("failed"), len(_last(rounds))
    (1, 20)
    """
    surplus = len(records) - _RECORDS
    if surplus <= 0:
        return list(records)
    of_last = [one.time_s == records[-1].time_s for one in records]
    ranked = sorted(
        range(len(records)), key=lambda at: (of_last[at], of_last[at] and records[at].status in _FAILED, at)
    )
    dropped = set(ranked[:surplus])
    return [one for at, one in enumerate(records) if at not in dropped]


def _drop_old_roots(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-_ROOTS]:
        for each in (path, path.with_suffix(".lock")):
            each.unlink(missing_ok=True)


def _write(path: Path, known: Mapping[str, list[Record]]) -> None:
    rows = {
        test: [(one.time_s, one.device, one.status, one.duration_s, one.attempts, one.said) for one in records]
        for test, records in known.items()
    }
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump({"tests": rows}, stream)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise
