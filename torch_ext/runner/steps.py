"""The steps of a command, from its options to a plan. Each takes what the one before it returned.

====================  =======================  =========================================================
step                  returns                  decides
====================  =======================  =========================================================
:func:`find`          :class:`FoundFiles`           which test files there are
:func:`resolve`       :class:`Asked`         which of them the patterns mean
:func:`name`          :class:`Named`           the tests of these files, from the cache or by importing them
:func:`import_files`  :class:`Named`           the same, with every file imported that has a selected test
:func:`choose`        :class:`Chosen`          which tests run, and what to warn of
:func:`schedule`      :class:`Plan`            in which order
====================  =======================  =========================================================

:func:`name` and :func:`import_files` start processes, through the executor that they are given; the others start none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from torch_ext import cache
from torch_ext.results import WITHOUT_TESTS, Needs, Sink, TestName, TestResult, import_failure
from torch_ext.runner.choice import History, arrange, narrow, why_none
from torch_ext.runner.discovery import TestFile, describe, find_test_files
from torch_ext.runner.keywords import keyword_filter, nearest, parts, spellings, words_without_match
from torch_ext.runner.names import Collected, NameCache, collect_names, surroundings
from torch_ext.runner.options import RunOptions, default_root
from torch_ext.runner.schedule import Plan, make_plan
from torch_ext.runner.selection import Selected, Selection, SelectionError, select_files, select_tests

__all__ = [
    "Asked",
    "Chosen",
    "Executor",
    "FoundFiles",
    "Judge",
    "Named",
    "Upstream",
    "choose",
    "find",
    "import_files",
    "name",
    "resolve",
    "schedule",
]

# So many files take a while to import, and a user wonders what the run does.
_MANY_FILES = 5
# The folder of our checkout's suites that holds the tests of torch_ext itself.
_OWN_TESTS = "torch_ext"
# What PyTorch calls its test files; the second is `elastic`'s way.
_UPSTREAMS = ("test_*.py", "*_test.py")


class Executor(Protocol):
    """The half of the runner that starts processes, for one run. ``torch_ext.runner.execute`` opens one."""

    def collect(self, files: Sequence[TestFile]) -> Iterator[Collected]:
        """Import ``files``, each in a process of its own, and yield one answer for each, in any order.

        Called on the main thread. May block as long as imports take. A file that cannot be imported is an answer.
        """
        ...

    def run(self, plan: Plan, sink: Sink) -> None:
        """Run ``plan``. Tell ``sink``, on the calling thread, of each class and test that begins and of each class that
        is over, and hand it each result as soon as its test has ended. Several classes may run at once.

        Called on the main thread, as often as there are rounds; the processes of the last one end with :meth:`close`.
        Stops after the first failure if ``options.failfast``. A class that is skipped as a whole is one
        skipped result for each of its tests: a planned test without a result counts as not run, and fails the command.
        """
        ...

    def close(self) -> None:
        """End every process and remove every file of the run. Idempotent."""
        ...


class Judge(Protocol):
    """What a run of files that are not our own makes of results."""

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


class Upstream(NamedTuple):
    """How files of a PyTorch checkout run, as the command passes it to the runner, which knows nothing else of them.

    Attributes:
        harness: modules that a zygote loads before such a file, so that it sees our harness; the first of them, the
            root zygote loads as well.
        judge: makes a judge of the files of a run, lists of known differences, and what their conditions ask for.
    """

    harness: tuple[str, ...]
    judge: Callable[[Sequence[Path], Sequence[str], Mapping[str, str]], Judge]


@dataclass(frozen=True)
class FoundFiles:
    """The test files below the root, and where their names are cached."""

    options: RunOptions
    files: Sequence[TestFile]
    names: NameCache
    upstream: Upstream | None = None
    warnings: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The device type that was asked for; empty if the machine decides."""
        return _device(self.options)


def _device(options: RunOptions) -> str:
    return options.device or os.environ.get("TORCH_EXT_DEVICE", "")


def find(options: RunOptions, upstream: Upstream | None = None) -> FoundFiles:
    """Find the test files that ``options`` mean: one that was started by itself, upstream's, or those of a root.

    Raises:
        SelectionError: there are none, or their tests are not ours to run.
    """
    if options.script:
        # As __main__ the file may define other tests than when it is imported, so nothing is cached.
        path = Path(options.script).resolve()
        return FoundFiles(options, [describe(path, options.root)], NameCache(None, None))
    if options.upstream:
        if upstream is None:
            raise SelectionError("--upstream belongs to python -m torch_ext and run_test.py")
        files, warnings = _upstream_files(options)
        return FoundFiles(replace(options, harness=upstream.harness), files, NameCache(None, None), upstream, warnings)
    # The tests of torch_ext itself are left to pytest: a runner that judges itself proves nothing.
    leave_out = _OWN_TESTS if options.root == default_root() and (options.root / _OWN_TESTS / "house").is_dir() else ""
    found = find_test_files(options.root, leave_out)
    if not found:
        raise SelectionError(f"nothing selected: no test_*.py below {options.root}")
    if leave_out:
        _refuse_own_tests(options, leave_out)
    return FoundFiles(options, found, NameCache(cache.folder(), surroundings(_device(options))))


def _upstream_files(options: RunOptions) -> tuple[list[TestFile], tuple[str, ...]]:
    """Return the files that ``--upstream`` names, each a module by itself as ``python FILE`` imports it; and warnings
    of those that cannot be imported.
    """
    paths: dict[Path, None] = {}
    warnings = []
    for typed in options.upstream:
        path = Path(typed).resolve()
        found = [path] if path.is_file() else [file.path for file in find_test_files(path, like=_UPSTREAMS)]
        left = [file for file in found if file.is_file() and "." not in file.stem]
        for file in [file for file in found if file not in left]:
            dots = "its name has one dot too many to import it"
            why = dots if file.is_file() else "it is no file, or a link to nothing"
            warnings.append(f"{file} is left out: {why}")
        if not left:
            raise SelectionError(f"nothing selected: no {' or '.join(_UPSTREAMS)} below {typed}")
        paths.update(dict.fromkeys(left))
    files = [TestFile(path.relative_to(options.root).as_posix(), path, path.stem, path.parent) for path in paths]
    return files, tuple(warnings)


@dataclass(frozen=True)
class Asked:
    """The files whose tests are needed, and what is asked of their names."""

    found: FoundFiles
    files: Sequence[TestFile]
    selection: Selection
    fits: Callable[[TestName], bool]
    history: History


def resolve(found: FoundFiles) -> Asked:
    """Resolve the patterns and keywords of the options.

    Raises:
        SelectionError: one of them means nothing.
    """
    options = found.options
    try:
        fits = keyword_filter(options.keywords)
    except ValueError as error:
        raise SelectionError(str(error)) from None
    names = [file.name for file in found.files]
    selection = select_files(names, options.include, options.exclude, _prefixes(options))
    files = [file for file in found.files if file.name in set(selection.files)]
    return Asked(found, files, selection, fits, History(cache.folder(), options.root, found.device))


def _prefixes(options: RunOptions) -> list[str]:
    """How a pattern may spell the root before it spells what lies below, as completion by the shell does."""
    roots = {options.root.name, str(options.root), os.path.relpath(options.root), options.typed_root.rstrip("/")}
    return [f"{options.root.name}.", *(f"{root}/" for root in sorted(roots - {"", "."}))]


@dataclass(frozen=True)
class Named:
    """The tests of each file of a request."""

    request: Asked
    collected: Sequence[Collected]


def name(request: Asked, executor: Callable[[], Executor]) -> Named:
    """Return the tests of every file, from the cache where it has them; see Note [Cached names]."""
    collect = _collector(request.found.options, executor)
    return Named(request, collect_names(request.files, request.found.names, collect))


def import_files(named: Named, executor: Callable[[], Executor]) -> Named:
    """Import the files whose cached names hold a selected test. Parts are chosen after that: machines must agree."""
    found = named.request.found
    undivided = replace(found, options=replace(found.options, shard=None))
    chosen = choose(replace(named, request=replace(named.request, found=undivided)))
    wanted = {test.file for test in chosen.tests}
    stale = [one.file for one in named.collected if one.cached and one.file.name in wanted]
    collect = _collector(found.options, executor)
    fresh = {one.file: one for one in collect_names(stale, found.names, collect, cached=False)}
    return replace(named, collected=[fresh.get(one.file, one) for one in named.collected])


def _collector(
    options: RunOptions, executor: Callable[[], Executor]
) -> Callable[[Sequence[TestFile]], Iterator[Collected]]:
    def collect(files: Sequence[TestFile]) -> Iterator[Collected]:
        if len(files) >= _MANY_FILES and options.verbosity >= 0 and sys.stderr is not None:
            from torch_ext.world.wording import PREFIX  # on use: a list of cached names does not pay for it

            print(f"{PREFIX}imports {len(files)} files to name their tests", file=sys.stderr)
        return executor().collect(files)

    return collect


@dataclass(frozen=True)
class Chosen:
    """The tests that run, and what the user should know of the choice.

    Attributes:
        tests: in the order of their files.
        failures: results of files that cannot be imported.
        needs: of tests, as far as they are known.
        note: a sentence for the report about a part of the tests; empty if all run.
        warnings: a sentence for each pattern or file that was asked for and does not run.
        device: the device type that the files test, as far as it is known.
        cached: how many files have cached names.
    """

    request: Asked
    tests: Sequence[TestName]
    failures: Sequence[TestResult]
    needs: Mapping[TestName, Needs]
    note: str
    warnings: Sequence[str]
    device: str
    cached: int

    @property
    def options(self) -> RunOptions:
        return self.request.found.options


def choose(named: Named) -> Chosen:
    """Apply patterns, keywords, and the options that choose by history, by git or in parts.

    Raises:
        SelectionError: nothing is left, or a pattern fits no test.
    """
    request, collected = named.request, named.collected
    options = request.found.options
    broken = {one.file.name: one for one in collected if one.error}
    known = [test for one in collected if not one.error for test in one.tests]
    selected = select_tests(request.selection, known, broken)
    fitting = [test for test in selected.tests if request.fits(test)]
    try:
        tests, note = narrow(options, request.history, fitting, collected)
    except ValueError as error:
        raise SelectionError(str(error)) from None
    failures = [import_failure(file, broken[file].error, broken[file].left) for file in selected.broken]
    if options.upstream and not options.narrowed:
        empty = [one.file.name for one in collected if not one.tests and not one.error]
        failures += [import_failure(file, "", WITHOUT_TESTS) for file in empty]
    nothing = "" if fitting else _why_nothing(options, request.files, selected.tests)
    if not tests and not failures:
        raise SelectionError(f"nothing selected: {nothing or why_none(options)}")
    warnings = [nothing] if nothing and selected.tests else []  # without any test, failures say enough
    warnings += _left_out(request.selection, selected, () if options.upstream else collected)
    needs = {test: need for one in collected for test, need in zip(one.tests, one.needs, strict=False)}
    device = next((one.device for one in collected if one.device), options.device)
    return Chosen(request, tests, failures, needs, note, warnings, device, sum(one.cached for one in collected))


def schedule(chosen: Chosen) -> Plan:
    """Return the plan of the chosen tests, by class, in the order that the options ask for."""
    expected_s = chosen.request.history.expected_s
    files, tests = arrange(chosen.options, chosen.request.files, chosen.tests)
    return make_plan(files, tests, chosen.needs, lambda test: expected_s(test) or 1.0)


def _refuse_own_tests(options: RunOptions, folder: str) -> None:
    """Raise SelectionError if a pattern means a test in ``folder`` below the root, which is left to pytest."""
    own = options.root / folder
    for pattern in options.include:
        path = pattern.partition("::")[0]
        for place in (Path(path), options.root / path):
            if place.exists() and place.resolve().is_relative_to(own):
                shown = os.path.relpath(place.resolve())
                raise SelectionError(
                    f"{pattern!r} holds tests of torch_ext itself, which pytest runs: python -m pytest {shown}"
                )


def _why_nothing(options: RunOptions, files: Sequence[TestFile], tests: Sequence[TestName]) -> str:
    """Say why nothing is selected of ``tests``, those that patterns select of ``files``."""
    if not files:
        return "-x excludes every file that -i selects"
    if not tests:
        told = f"no test in {', '.join(file.name for file in files[:5])}{', ...' * (len(files) > 5)}"
        return told + (_written_for_pytest(files[0]) if len(files) == 1 else "")
    typed = " ".join(options.keywords)
    names = [*spellings((), tests), *parts(tests)]
    near = [name for word in words_without_match(options.keywords, tests) for name in nearest(word, names)]
    advice = f"; nearest: {', '.join(dict.fromkeys(near))}" if near else ""
    return f"none of {len(tests)} tests fits -k {typed!r}{advice}"


def _left_out(selection: Selection, selected: Selected, collected: Iterable[Collected]) -> list[str]:
    """Say what was asked for and does not run though other tests do: patterns that fit no test that is known, files of
    pytest's, and files that a pattern names alone and that hold no test.
    """
    known = "no test that is known fits it, and some files cannot be imported"
    said = [f"{text!r}: {known}{'; ' * bool(advice)}{advice}" for text, advice in selected.unseen]
    folders = [target.files for target in selection.include if not target.names]
    asked = {file for files in folders for file in files}
    alone = {file for files in folders if len(files) == 1 for file in files}
    theirs = []
    for one in collected:
        if one.tests or one.error or (selection.include and one.file.name not in asked):
            continue
        if why := _written_for_pytest(one.file):
            theirs.append(f"no test in {one.file.name}{why}")
        elif one.file.name in alone:
            said.append(f"no test in {one.file.name}")
    others = f" ({len(theirs) - 1} more files are like it)" if len(theirs) > 1 else ""
    return said + [f"{told}{others}" for told in theirs[:1]]


def _written_for_pytest(file: TestFile) -> str:
    """Say so if the file has tests in a style that is pytest's alone."""
    from ast import AsyncFunctionDef, ClassDef, FunctionDef, parse

    try:
        body = parse(file.path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    functions = [each.name for each in body if isinstance(each, (FunctionDef, AsyncFunctionDef))]
    classes = [each.name for each in body if isinstance(each, ClassDef) and not each.bases]
    for what, names in (("functions", functions), ("classes without a base", classes)):
        if found := [name for name in names if name.lower().startswith("test")]:
            return (
                f": its tests are {what} such as {found[0]}, which pytest runs and unittest does not; "
                f"run python -m pytest {os.path.relpath(file.path)}"
            )
    return ""
