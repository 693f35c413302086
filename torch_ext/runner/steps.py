"""Selects the test files of a command, and defines the protocols of the executor and the judge of their tests.

The command (``cli``) takes three steps, each with the result of the one before: :func:`select` finds the files that the
patterns mean (a :class:`Request`), :func:`~.choice.name` their tests, by importing them through an executor or from the
cache (a :class:`Collected` each), and :func:`~.choice.choose` those that run (:class:`~.choice.Chosen`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from torch_ext import cache
from torch_ext.results import Sink, TestName, TestResult
from torch_ext.runner.names import Collected, NameCache, TestFile, describe, environment_key, find_test_files
from torch_ext.runner.options import RunOptions, default_root
from torch_ext.runner.schedule import Plan
from torch_ext.runner.selection import Selection, SelectionError, keyword_filter, select_files

# Names of PyTorch's test files; `elastic` uses the second.
_UPSTREAMS = ("test_*.py", "*_test.py")


class Executor(Protocol):
    """The half of the runner that starts processes, for one run. Called on the main thread."""

    def collect(self, files: Sequence[TestFile]) -> Iterator[Collected]:
        """Import ``files``, each in a separate process, and yield one result for each, in any order. May block as long
        as imports take. Also yields a result for a failed import.
        """
        ...

    def run(self, plan: Plan, sink: Sink) -> None:
        """Run ``plan``. Call ``sink``, on the calling thread, when a class or test begins, when a test ends and when a
        class is over. Several classes may run at once.

        Called once per round. Stops after the first failure if ``options.failfast``. Report a skipped class as one
        skipped result for each of its tests: a planned test without a result counts as not run, and fails the command.
        """
        ...

    def close(self) -> None:
        """End every process and remove every file of the run. Idempotent."""
        ...


class Judge(Protocol):
    """Judges the results of files that are not our own."""

    warning: str

    def skipped(self, test: TestName) -> str:
        """Return why ``test`` must not run; empty if it may."""
        ...

    def judged(self, result: TestResult) -> TestResult:
        """Return the result that replaces ``result``."""
        ...

    def out_of_date(self, planned: Sequence[TestName], *, whole: bool) -> list[TestResult]:
        """Return a failure for each known difference that has disappeared. ``whole``: no test was left out."""
        ...


class Upstream(NamedTuple):
    """The runner's only interface to files of a PyTorch checkout, passed by the command."""

    # Modules that a zygote loads before such a file, so that it sees our harness; the root loads the first one too
    harness: tuple[str, ...]
    # Makes a judge from the files of a run, lists of known differences, and the facts for their conditions
    judge: Callable[[Sequence[Path], Sequence[str], Mapping[str, str]], Judge]


@dataclass(frozen=True)
class Request:
    """The test files whose tests are needed, the cache of their names, and the selection."""

    options: RunOptions
    files: Sequence[TestFile]
    names: NameCache
    selection: Selection
    fits: Callable[[TestName], bool]
    upstream: Upstream | None = None


def select(options: RunOptions, upstream: Upstream | None = None) -> Request:
    """Find the test files of ``options`` (a file that was started itself, upstream's files, or those of a root) and
    resolve the patterns and keywords. Raises SelectionError if one matches nothing.
    """
    names = NameCache(None, None)
    if options.script:
        # As __main__ the file may define other tests than when it is imported, so nothing is cached.
        found: Sequence[TestFile] = [replace(describe(Path(options.script).resolve(), options.root), module="__main__")]
    elif options.upstream:
        if upstream is None:
            raise SelectionError("--upstream belongs to python -m torch_ext and run_test.py")
        options = replace(options, harness=upstream.harness)
        found = _upstream_files(options)
    else:
        found = _own_files(options)
        names = NameCache(cache.folder(), environment_key(options.device))
    selection = select_files([file.name for file in found], options.include, options.exclude, _prefixes(options))
    files = [file for file in found if file.name in set(selection.files)]
    fits = keyword_filter(options.keywords)
    return Request(options, files, names, selection, fits, upstream if options.upstream else None)


def _own_files(options: RunOptions) -> Sequence[TestFile]:
    # Leave the tests of torch_ext itself to pytest: a runner that judges itself proves nothing.
    own = options.root / "torch_ext"
    leave_out = own.name if options.root == default_root() and (own / "house").is_dir() else ""
    for pattern in options.include if leave_out else ():
        for place in (Path(pattern.partition("::")[0]), options.root / pattern.partition("::")[0]):
            if place.exists() and place.resolve().is_relative_to(own):
                hint = f"pytest runs: python -m pytest {os.path.relpath(place.resolve())}"
                raise SelectionError(f"{pattern!r} holds tests of torch_ext itself, which {hint}")
    found = find_test_files(options.root, leave_out)
    if not found:
        raise SelectionError(f"nothing selected: no test_*.py below {options.root}")
    return found


def _upstream_files(options: RunOptions) -> list[TestFile]:
    """Return the files that ``--upstream`` names, each a top-level module, as ``python FILE`` imports it."""
    paths: dict[Path, None] = {}
    for path in (Path(typed).resolve() for typed in options.upstream):
        found = [path] if path.is_file() else [file.path for file in find_test_files(path, like=_UPSTREAMS)]
        if not found:
            raise SelectionError(f"nothing selected: no {' or '.join(_UPSTREAMS)} below {path}")
        paths.update(dict.fromkeys(found))
    return [TestFile(path.relative_to(options.root).as_posix(), path, path.stem, path.parent) for path in paths]


def _prefixes(options: RunOptions) -> list[str]:
    """Return the spellings of the root that may begin a pattern, as the shell's completion inserts them."""
    roots = {options.root.name, str(options.root), os.path.relpath(options.root), options.typed_root.rstrip("/")}
    return [f"{options.root.name}.", *(f"{root}/" for root in sorted(roots - {"", "."}))]
