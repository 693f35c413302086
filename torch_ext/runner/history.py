"""How tests ended in earlier runs, and how long they took. Standard library and own layer only.

Note [The history]
~~~~~~~~~~~~~~~~~~
One JSON file for each root lies in the cache's folder, for the last 100 roots. It holds the last 5 records of each
test, at most 20,000 tests, and no record older than 90 days. A run reads it once, and adds its own records at its end,
under a lock and by renaming, to what lies there then: so runs side by side lose nothing of each other's. A history that
cannot be read or written costs what is made of it, never a run; see Note [Trusted folders] for whose it may be.

A run adds one record of a test, whatever the number of its rounds: failed if the test failed in any of them.
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
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from torch_ext import cache
from torch_ext.runner.results import Status, TestName, TestResult

__all__ = ["History"]

_FOLDER = "history"  # below the cache's
_ROOTS, _RECORDS, _TESTS, _AGE_S = 100, 5, 20_000, 90 * 24 * 3600.0


@dataclass(frozen=True)
class RunRecord:
    """How one test ended in one run.

    Attributes:
        time_s: when the run ended (``time.time``).
        device: the device type that was asked for; empty: the machine's best.
        status: the value of its ``Status``: of several rounds the first failure, else the last.
        duration_s: how long it took; the median of all rounds and attempts.
    """

    time_s: float
    device: str
    status: str
    duration_s: float


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
        self._records: dict[str, list[RunRecord]] | None = None

    def failed(self, test: TestName) -> bool:
        """Whether ``test`` failed in the last run that had it, by itself or with its class or file."""
        ids = (test.id, TestName(test.file, test.cls).id, test.file)
        return any(found[-1].status in _FAILED for each in ids if (found := self._known.get(each)))

    def expected_s(self, test: TestName) -> float | None:
        """Return how long ``test`` should take, by its last times on this device, else on any; None if it has none."""
        ran = [record for record in self._known.get(test.id, ()) if record.status != Status.SKIPPED.value]
        ours = [record for record in ran if record.device == self._device] or ran
        return statistics.median(record.duration_s for record in ours) if ours else None

    def save(self, results: Iterable[TestResult]) -> None:
        """Add ``results``, all of one run, each the last of its round. Does nothing where no history can be written."""
        of_test: dict[TestName, list[TestResult]] = {}
        for result in results:
            of_test.setdefault(result.test, []).append(result)
        if self._path is None or not of_test:
            return
        with suppress(OSError), self._locked(self._path):
            known = _read(self._path)
            for test in of_test:
                if test.method:  # its file could be imported, and its class begun
                    for above in (test.file, TestName(test.file, test.cls).id):
                        known.pop(above, None)
            for test, rounds in of_test.items():
                known.setdefault(test.id, []).append(self._record(rounds))
            _write(self._path, _bounded(known))
            _drop_old_roots(self._path.parent)

    def _record(self, rounds: Sequence[TestResult]) -> RunRecord:
        told = next((one for one in rounds if one.status.value in _FAILED), rounds[-1])
        times_s = [one.duration_s for result in rounds for one in (*result.earlier, result)]
        return RunRecord(time.time(), self._device, told.status.value, round(statistics.median(times_s), 4))

    @property
    def _known(self) -> Mapping[str, Sequence[RunRecord]]:
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


def _read(path: Path) -> dict[str, list[RunRecord]]:
    """Return what lies at ``path``; nothing if it cannot be read or is none of ours."""
    try:
        told: Any = json.loads(path.read_bytes())
        return {str(test): [RunRecord(*fields) for fields in rows] for test, rows in told["tests"].items() if rows}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _bounded(known: Mapping[str, list[RunRecord]]) -> dict[str, list[RunRecord]]:
    oldest_s = time.time() - _AGE_S
    young = {test: [one for one in records if one.time_s >= oldest_s] for test, records in known.items()}
    kept = sorted((test for test in young if young[test]), key=lambda test: -young[test][-1].time_s)[:_TESTS]
    return {test: young[test][-_RECORDS:] for test in kept}


def _drop_old_roots(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-_ROOTS]:
        for each in (path, path.with_suffix(".lock")):
            each.unlink(missing_ok=True)


def _write(path: Path, known: Mapping[str, list[RunRecord]]) -> None:
    rows = {test: [astuple(one) for one in records] for test, records in known.items()}
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump({"tests": rows}, stream)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise
