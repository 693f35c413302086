"""How each test ended when it ran last, and how long it took.

Note [The history]
~~~~~~~~~~~~~~~~~~
One JSON file in the cache's folder holds how each of the 20,000 tests that ran last ended, and how long it took. A run
reads it once, and adds its own results at its end, under a lock and by renaming, to what lies there then: so runs side
by side lose nothing of each other's. A history that cannot be read or written costs what is made of it, never a run;
see Note [Trusted folders] for whose it may be. A test that ran in several rounds failed if it failed in any of them.
"""

from __future__ import annotations

import fcntl
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch_ext import cache
from torch_ext.results import Status, TestName, TestResult

__all__ = ["History"]

_FOLDER, _FILE = "history", "tests.json"  # below the cache's
_TESTS = 20_000


class _Record(NamedTuple):
    """How a test ended in the last run that had it."""

    failed: bool
    duration_s: float  # the median of all rounds and attempts


class History:
    """The records of the tests below ``root``, in the cache's ``folder``; None: nothing is remembered."""

    def __init__(self, folder: Path | None, root: Path) -> None:
        place = None if folder is None else folder / _FOLDER
        self._path = place / _FILE if place is not None and not cache.why_not_trusted(place) else None
        self._root = root

    @cached_property
    def _known(self) -> Mapping[str, _Record]:
        return {} if self._path is None else _read(self._path)

    def _key(self, test: TestName) -> str:
        return f"{self._root}/{test.id}"

    def failed(self, test: TestName) -> bool:
        """Whether ``test`` failed in the last run that had it, by itself or with its class or file."""
        found = (self._known.get(self._key(each)) for each in (test, *_above(test)))
        return any(record is not None and record.failed for record in found)

    def expected_s(self, test: TestName) -> float | None:
        """Return how long ``test`` took when it ran last; None if it never has."""
        found = self._known.get(self._key(test))
        return found.duration_s if found is not None else None

    def save(self, results: Iterable[TestResult]) -> None:
        """Add ``results``, all of one run, each the last of its round. Does nothing where no history can be written."""
        of_test: dict[TestName, list[TestResult]] = {}
        for result in results:
            of_test.setdefault(result.test, []).append(result)
        if self._path is None or not of_test:
            return
        with suppress(OSError):
            cache.make(self._path.parent)
            with open(self._path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                known = _read(self._path)
                for test in of_test:
                    for above in _above(test) if test.method else ():  # its file could be imported, and its class begun
                        known.pop(self._key(above), None)
                for test, rounds in of_test.items():  # at the end, where the tests stand that ran last
                    before = known.pop(self._key(test), None)
                    known[self._key(test)] = _record(rounds, before)
                cache.write(self._path, json.dumps({"tests": dict([*known.items()][-_TESTS:])}))


def _above(test: TestName) -> tuple[TestName, ...]:
    return TestName(test.file, test.cls), TestName(test.file)


def _record(rounds: Sequence[TestResult], before: _Record | None) -> _Record:
    failed = any(one.status.counted is Status.FAILED for one in rounds)
    if before is not None and all(one.status is Status.SKIPPED for one in rounds):  # that took no time
        return _Record(failed, before.duration_s)
    times_s = [one.duration_s for result in rounds for one in (*result.earlier, result)]
    return _Record(failed, round(statistics.median(times_s), 4))


def _read(path: Path) -> dict[str, _Record]:
    """Return what lies at ``path``; nothing if it cannot be read or is none of ours."""
    try:
        told: Any = json.loads(path.read_bytes())
        return {str(test): _Record(bool(failed), float(took_s)) for test, (failed, took_s) in told["tests"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
