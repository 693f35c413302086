"""Chooses the tests of a run: by patterns and keywords, and of these only failed tests, changed files or one part.

Note [Parts]
~~~~~~~~~~~~
``--shard I/N`` runs on N machines that must agree, or tests would be lost silently. So parts depend on the names of the
selected tests and on ``--times`` alone, never on one machine's history, and the report names the divided plan: all
parts of one run show the same name. Classes stay whole, since their tests share fixtures. The longest class goes to the
part with the least work so far.

Note [The history]
~~~~~~~~~~~~~~~~~~
One JSON file in the cache's folder records result and duration of the 50,000 tests that ran last. A run reads it once,
and at its end adds its results to the current content under a lock, so concurrent runs lose none. A history that cannot
be read or written never fails a run; see Note [Trusted folders] for its permissions. A test that ran in several rounds
failed if it failed in any.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch_ext import cache
from torch_ext.results import WITHOUT_TESTS, Needs, Status, TestName, TestResult, import_failure
from torch_ext.runner.names import Collected, TestFile, collect_names
from torch_ext.runner.options import RunOptions
from torch_ext.runner.schedule import Plan, make_plan
from torch_ext.runner.selection import Selection, SelectionError, select_tests
from torch_ext.runner.steps import Executor, Request

_MANY_FILES = 5  # whose import takes so long that a message comes first


def name(request: Request, executor: Callable[[], Executor]) -> Sequence[Collected]:
    """Return the tests of every file: for a list cached if possible, see Note [Cached names]."""

    def collect(files: Sequence[TestFile]) -> Iterator[Collected]:
        if len(files) >= _MANY_FILES and request.options.verbosity >= 0 and sys.stderr is not None:
            from torch_ext.world.wording import PREFIX  # on use: keeps a list of cached names fast

            print(f"{PREFIX}imports {len(files)} files to name their tests", file=sys.stderr)
        return executor().collect(files)

    collected = collect_names(request.files, request.names, collect)
    if request.options.list_only or not any(one.cached for one in collected):
        return collected
    # Divide after the import, not by cached names: all machines must agree.
    undivided = replace(request, options=replace(request.options, shard=None))
    wanted = {test.file for test in choose(undivided, collected).plan.tests}
    stale = [one.file for one in collected if one.cached and one.file.name in wanted]
    fresh = {one.file: one for one in collect_names(stale, request.names, collect, cached=False)}
    return [fresh.get(one.file, one) for one in collected]


@dataclass(frozen=True)
class Chosen:
    """The tests that run, and notes for the user about the choice."""

    request: Request
    history: History
    plan: Plan
    failures: Sequence[TestResult]  # results of files that cannot be imported
    needs: Mapping[TestName, Needs]  # of the tests, where known
    note: str  # a sentence for the report if only a part of the tests runs; else empty
    warnings: Sequence[str]  # a sentence for each requested pattern or file that does not run
    device: str  # the device type that the files test, if known
    cached: int  # number of files with cached names


def choose(request: Request, collected: Sequence[Collected]) -> Chosen:
    """Apply patterns, keywords, and the options that select by history, by git or in parts. Raises SelectionError if no
    test is left, or a pattern matches none.
    """
    options = request.options
    broken = {one.file.name: one for one in collected if one.error}
    known = [test for one in collected if not one.error for test in one.tests]
    selected, suspects, unmatched = select_tests(request.selection, known, broken)
    fitting = [test for test in selected if request.fits(test)]
    failures = [import_failure(file, broken[file].error, broken[file].left) for file in suspects]
    empty = [one.file.name for one in collected if not one.tests and not one.error]
    if options.upstream and not options.narrowed:
        failures += [import_failure(file, "", WITHOUT_TESTS) for file in empty]
    warnings = [] if options.upstream else _without_tests(request.selection, empty)
    if not fitting:
        why = f"none of {len(selected)} tests fits -k {' '.join(options.keywords)!r}"
        if not selected:
            why = warnings.pop() if warnings else "-x excludes every test that -i selects"
        if not failures:
            raise SelectionError(f"nothing selected: {why}")
        warnings += [why] if selected else []  # without any test, the failures are enough
    history = History(cache.folder(), options.root)
    tests, note = _narrow(options, history, fitting, collected)
    needs = {test: need for one in collected for test, need in zip(one.tests, one.needs, strict=False)}
    device = next((one.device for one in collected if one.device), options.device)
    plan = make_plan(request.files, tests, needs, lambda test: history.expected_s(test) or 1.0)
    cached = sum(one.cached for one in collected)
    return Chosen(request, history, plan, failures, needs, note, unmatched + warnings, device, cached)


def _without_tests(selection: Selection, empty: Sequence[str]) -> list[str]:
    """Return a warning about requested files that hold no test, if any."""
    targets = [target.files for target in selection.include if not target.names]
    requested = [file for file in empty if not selection.include or any(file in files for files in targets)]
    if not requested:
        return []
    more = f" and {len(requested) - 1} more files" if len(requested) > 1 else ""
    return [f"no test in {requested[0]}{more}; pytest runs functions and classes without a base: python -m pytest FILE"]


def _narrow(
    options: RunOptions, history: History, tests: Sequence[TestName], collected: Iterable[Collected]
) -> tuple[Sequence[TestName], str]:
    """Return the tests that ``--changed``, ``--last-failed`` and ``--shard`` keep, and a sentence about the choice."""
    chosen, note, why = tests, "", ""
    if options.changed:
        files = _changed_files(options.root, options.changed)
        paths_of = {one.file.name: (one.file.path, *map(Path, one.imported)) for one in collected if not one.error}
        affected = {name for name, paths in paths_of.items() if any(path.resolve() in files for path in paths)}
        chosen = [test for test in tests if test.file in affected]
        why = f"no test file, nor a module that it imports, differs from {options.changed}"
    if options.last_failed:
        failed = [test for test in chosen if history.failed(test)]
        note = "" if failed else "None of these tests failed when it last ran, so all run."
        chosen = failed or chosen
    if options.shard:
        chosen, part = _part(options, chosen, *options.shard)
        note = f"{note} {part}".lstrip()
        why = "this part has no tests; divide by fewer"
    if tests and not chosen:
        raise SelectionError(f"nothing selected: {why}")
    return chosen, note


def _part(options: RunOptions, tests: Sequence[TestName], part: int, parts: int) -> tuple[list[TestName], str]:
    times = _read_times(options.times) if options.times else {}
    known = [times[test.id] for test in tests if test.id in times]
    usual = statistics.median(known) if known else 1.0
    weights = {test: times.get(test.id, usual) for test in tests}
    chosen = divide(weights, parts)[part - 1]
    plan = hashlib.sha256("\0".join(f"{test.id} {weights[test]}" for test in tests).encode()).hexdigest()[:8]
    about = f", {sum(map(weights.__getitem__, chosen)):.0f} of {sum(weights.values()):.0f} s" if known else ""
    return chosen, f"Part {part} of {parts}: {len(chosen)} of {len(tests)} tests{about}, of plan {plan}."


def divide(weights: Mapping[TestName, float], parts: int) -> list[list[TestName]]:
    """Divide tests into ``parts`` parts of about equal weight, in the given order, without dividing a class.

    >>> tests = {TestName("a.py", cls, "test_1"): weight for cls, weight in (("A", 3), ("B", 2), ("C", 1.5))}
    >>> [[test.cls for test in part] for part in divide(tests, 2)]
    [['A'], ['B', 'C']]
    """
    classes: dict[tuple[str, str], float] = defaultdict(float)
    for test, weight in weights.items():
        classes[test.file, test.cls] += weight
    sums, part_of = [0.0] * parts, {}
    for cls in sorted(classes, key=lambda cls: (-classes[cls], cls)):
        part_of[cls] = sums.index(min(sums))
        sums[part_of[cls]] += classes[cls]
    return [[test for test in weights if part_of[test.file, test.cls] == part] for part in range(parts)]


def _read_times(path: str) -> dict[str, float]:
    """Return the seconds of each test in a file that ``--json`` wrote, by id; the last result counts."""
    times: dict[str, float] = {}
    try:
        with open(path, encoding="utf-8") as stream:
            for line in stream:
                event = json.loads(line)
                if event.get("event") == "result" and event["method"] and event["status"] != "skipped":
                    times[event["test"]] = float(event["duration_s"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SelectionError(f"got --times {path}, which is not a file that --json wrote: {error}") from None
    if not times:
        raise SelectionError(f"got --times {path}, which has no test results")
    return times


def _changed_files(folder: Path, revision: str) -> frozenset[Path]:
    """Return the files that differ from ``revision`` in the working tree of ``folder``: changed, new or removed."""
    top = Path(_git(folder, "rev-parse", "--show-toplevel").rstrip("\n"))
    commit = _git(top, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").split()[-1]
    differing = _git(top, "diff", "--name-only", "--no-renames", "-z", commit, "--")
    new = _git(top, "ls-files", "--others", "--exclude-standard", "-z")
    return frozenset((top / name).resolve() for name in f"{differing}{new}".split("\0") if name)


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False)
    except OSError as error:
        raise SelectionError(f"--changed needs git, which cannot be run: {error}") from error
    if done.returncode:
        requested, message = " ".join(arguments), os.fsdecode(done.stderr).strip()
        raise SelectionError(f"--changed needs git, which fails in {folder} at 'git {requested}': {message}")
    return os.fsdecode(done.stdout)


_TESTS = 50_000


class _Record(NamedTuple):
    """The result of a test in its last run."""

    failed: bool
    duration_s: float  # the median of all rounds and attempts


class History:
    """The records of the tests below ``root``, in the cache's ``folder``; None: no history."""

    def __init__(self, folder: Path | None, root: Path) -> None:
        place = None if folder is None else folder / "history"
        self._path = place / "tests.json" if place is not None and not cache.why_not_trusted(place) else None
        self._root = root

    @cached_property
    def _known(self) -> Mapping[str, _Record]:
        return {} if self._path is None else _read(self._path)

    def _key(self, test: TestName) -> str:
        return f"{self._root}/{test.id}"

    def failed(self, test: TestName) -> bool:
        """Whether ``test`` failed in its last run, by itself or with its class or file."""
        found = (self._known.get(self._key(each)) for each in (test, *_above(test)))
        return any(record and record.failed for record in found)

    def expected_s(self, test: TestName) -> float | None:
        """Return the duration of ``test`` in its last run, in seconds; None if it has never run."""
        found = self._known.get(self._key(test))
        return found.duration_s if found else None

    def save(self, results: Iterable[TestResult]) -> None:
        """Add the results of one run, each the last of its round. Does nothing if the history cannot be written."""
        of_test: dict[TestName, list[TestResult]] = defaultdict(list)
        for result in results:
            of_test[result.test].append(result)
        if self._path is None or not of_test:
            return
        with suppress(OSError):
            cache.make(self._path.parent)
            with open(self._path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                known = _read(self._path)
                for test in of_test:
                    for above in _above(test) if test.method else ():  # its file and class did not fail
                        known.pop(self._key(above), None)
                for test, rounds in of_test.items():  # append: the file keeps the last _TESTS entries
                    before = known.pop(self._key(test), None)
                    known[self._key(test)] = _record(rounds, before)
                cache.write(self._path, json.dumps({"tests": dict([*known.items()][-_TESTS:])}))


def _above(test: TestName) -> tuple[TestName, ...]:
    return TestName(test.file, test.cls), TestName(test.file)


def _record(rounds: Sequence[TestResult], before: _Record | None) -> _Record:
    failed = any(one.status.counted is Status.FAILED for one in rounds)
    if before is not None and all(one.status is Status.SKIPPED for one in rounds):  # a skip is no measurement
        return _Record(failed, before.duration_s)
    times_s = [one.duration_s for result in rounds for one in (*result.earlier, result)]
    return _Record(failed, round(statistics.median(times_s), 4))


def _read(path: Path) -> dict[str, _Record]:
    """Return the records at ``path``; empty if the file cannot be read or has another format."""
    try:
        stored: Any = json.loads(path.read_bytes())
        return {str(test): _Record(bool(failed), float(took_s)) for test, (failed, took_s) in stored["tests"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
