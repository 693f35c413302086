"""Which of the tests that patterns select run, and in which order: what failed, what changed, a part, at random.

Note [Parts]
~~~~~~~~~~~~
``--shard I/N`` runs on N machines that must agree, or tests would be lost in silence. So parts follow from the names of
the selected tests and from ``--times`` alone, never from what one machine happens to remember, and the report names the
plan that was divided: parts of one run show the same name. Classes stay whole, since their tests share fixtures. The
class that takes longest goes to the part with the least to do so far.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch_ext.runner.discovery import TestFile
from torch_ext.runner.history import History
from torch_ext.runner.names import Collected
from torch_ext.runner.options import Options
from torch_ext.runner.results import TestName

__all__ = ["arrange", "divide", "narrow", "why_none"]


def narrow(
    options: Options, history: History, tests: Sequence[TestName], collected: Iterable[Collected]
) -> tuple[Sequence[TestName], str]:
    """Return those of ``tests`` that ``--changed``, ``--last-failed`` and ``--shard`` leave, and a sentence about them.

    Raises:
        ValueError: an option has nothing to go by; the message is for users.
    """
    if options.changed:
        files = _changed_files(options.root, options.changed)
        affected = {one.file.name for one in collected if _depends(one, files)}
        tests = [test for test in tests if test.file in affected]
    if options.last_failed:
        tests = [test for test in tests if history.failed(test)]
    return _part(options, tests, *options.shard) if options.shard else (tests, "")


def why_none(options: Options) -> str:
    """Say why :func:`narrow` leaves nothing to run."""
    if options.shard:
        return "this part has no tests; divide by fewer"
    if options.last_failed:
        return "none of these tests failed when it last ran"
    return f"no test's file, nor a module that one imports, differs from {options.changed}"


def arrange(
    options: Options, files: Sequence[TestFile], tests: Sequence[TestName]
) -> tuple[Sequence[TestFile], Sequence[TestName]]:
    """Return files and tests in the order in which they run."""
    if (seed := options.random_order) is not None:
        files = sorted(files, key=lambda file: _random(seed, file.name))
        tests = sorted(tests, key=lambda test: (_random(seed, f"{test.file}::{test.cls}"), _random(seed, test.id)))
    return files, tests


def _part(options: Options, tests: Sequence[TestName], part: int, parts: int) -> tuple[list[TestName], str]:
    times = _read_times(options.times) if options.times else {}
    known = [times[test.id] for test in tests if test.id in times]
    usual = statistics.median(known) if known else 1.0
    weights = {test: times.get(test.id, usual) for test in tests}
    chosen = divide(weights, parts)[part - 1]
    plan = hashlib.sha256("\0".join(f"{test.id} {weights[test]}" for test in tests).encode()).hexdigest()[:8]
    about = f", {sum(map(weights.__getitem__, chosen)):.0f} of {sum(weights.values()):.0f} s" if known else ""
    return chosen, f"Part {part} of {parts}: {len(chosen)} of {len(tests)} tests{about}, of plan {plan}."


def _depends(collected: Collected, files: frozenset[Path]) -> bool:
    paths = {str(collected.file.path), *collected.imported}
    return bool(collected.error) or any(Path(path).resolve() in files for path in paths)


def _random(seed: int, name: str) -> bytes:
    """A number for ``name`` that depends on nothing else, so that a selection keeps the order of the whole."""
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def divide(weights: Mapping[TestName, float], parts: int) -> list[list[TestName]]:
    """Divide tests into ``parts`` of about equal weight, each in the order given, without dividing a class.

    >>> tests = {TestName("a.py", cls, "test_1"): weight for cls, weight in (("A", 3), ("B", 2), ("C", 1.5))}
    >>> [[test.cls for test in part] for part in divide(tests, 2)]
    [['A'], ['B', 'C']]
    """
    classes: dict[tuple[str, str], float] = {}
    for test, weight in weights.items():
        classes[test.file, test.cls] = classes.get((test.file, test.cls), 0.0) + weight
    sums = [0.0] * parts
    place: dict[tuple[str, str], int] = {}
    for cls in sorted(classes, key=lambda cls: (-classes[cls], cls)):
        place[cls] = min(range(parts), key=lambda part: sums[part])
        sums[place[cls]] += classes[cls]
    divided: list[list[TestName]] = [[] for _ in range(parts)]
    for test in weights:
        divided[place[test.file, test.cls]].append(test)
    return divided


def _read_times(path: str) -> dict[str, float]:
    """Return the seconds of each test in a file that ``--json`` wrote, by id; of several results the last.

    Raises:
        ValueError: the file cannot be read, or holds no result.
    """
    times: dict[str, float] = {}
    try:
        with open(path, encoding="utf-8") as stream:
            for line in stream:
                event = json.loads(line)
                if event.get("event") == "result" and event["method"] and event["status"] != "skipped":
                    times[event["test"]] = float(event["duration_s"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"got --times {path}, which is no file that --json wrote: {error}") from None
    if not times:
        raise ValueError(f"got --times {path}, which holds no result of a test")
    return times


def _changed_files(folder: Path, revision: str) -> frozenset[Path]:
    """Return the files that differ from ``revision`` in the working tree of ``folder``: changed, new or gone.

    Raises:
        ValueError: git cannot tell, for a reason that the message has.
    """
    top = Path(_git(folder, "rev-parse", "--show-toplevel").rstrip("\n"))
    if revision.startswith("-"):
        raise ValueError(f"got --changed {revision}, which is no revision")
    try:
        _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except ValueError:
        advice = "write --changed=REV, and patterns apart from it"
        if _git(top, "rev-parse", "--is-shallow-repository").strip() == "true":
            advice = "this clone is shallow and may lack it; fetch more of it first: git fetch --unshallow"
        raise ValueError(f"git knows no revision {revision!r}; {advice}") from None
    differing = _git(top, "diff", "--name-only", "--no-renames", "-z", revision, "--")
    new = _git(top, "ls-files", "--others", "--exclude-standard", "-z")
    return frozenset((top / name).resolve() for name in f"{differing}{new}".split("\0") if name)


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False)
    except OSError as error:
        raise ValueError(f"--changed asks git, which cannot be run: {error}") from error
    if done.returncode:
        said = os.fsdecode(done.stderr).strip().removeprefix("fatal: ") or f"exit code {done.returncode}"
        raise ValueError(f"--changed asks git, which says of {folder}: {said}")
    return os.fsdecode(done.stdout)
