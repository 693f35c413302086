"""The command ``run_test.py``, and what ``python some_test_file.py`` does: from arguments to an exit code.

Exit codes: 0 everything passed or was skipped with a reason; 1 a test failed, or was planned and has no result, or the
report could not be written; 2 a usage error (a closed stdout and a working directory that is gone are two), or nothing
selected; 130 interrupted, by the keyboard or by a reader that closed the pipe.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from torch_ext import cache
from torch_ext.compat import untested_torch
from torch_ext.runner.discovery import TestFile, describe, find_test_files
from torch_ext.runner.interrupts import Interrupts
from torch_ext.runner.keywords import keyword_filter
from torch_ext.runner.names import Collected, NameCache, collect_names, describe_difference, surroundings
from torch_ext.runner.options import Options, default_root, parse, parse_for_file
from torch_ext.runner.results import (
    Began,
    OutputError,
    Over,
    Raised,
    SetupError,
    Sink,
    Status,
    TestName,
    TestResult,
    Tick,
)
from torch_ext.runner.schedule import Batch, Plan, make_plan
from torch_ext.runner.selection import SelectionError, fitting_tests, select_files, select_tests

if TYPE_CHECKING:
    from torch_ext.runner.reporters.base import Reporter

__all__ = ["INTERRUPTED", "Executor", "main", "main_for_file"]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class Executor(Protocol):
    """The half of the runner that starts processes, for one run. ``torch_ext.runner.execute`` opens one."""

    def collect(self, files: Sequence[TestFile]) -> Iterator[Collected]:
        """Yield the tests of each of ``files``; see ``names.Collector``. Called on the main thread."""
        ...

    def run(
        self,
        plan: Plan,
        sink: Sink,
        renew: Callable[[Collected], Sequence[Batch]],
    ) -> None:
        """Run ``plan``. Tell ``sink``, on the calling thread, of each class and test that begins and of each class that
        is over, and hand it each result as soon as its test has ended. Several classes may run at once.

        Before the first test of a file that :meth:`collect` was not asked for, ``renew`` is told what the file holds,
        and returns what of it is to run in the place of what was planned.

        Called on the main thread, as often as there are rounds; the processes of the last one end with :meth:`close`.
        Stops after the first failure if ``options.failfast``. A class that is skipped as a whole is one
        skipped result for each of its tests: a planned test without a result counts as not run, and fails the command.
        """
        ...

    def close(self) -> None:
        """End every process and remove every file of the run. Idempotent."""
        ...


class Judge(Protocol):
    """What a run of files that are not our own makes of results. ``torch_ext.upstream.judge`` has one."""

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the arguments of this process) and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return _exit_code(lambda: _discover_and_run(parse(arguments)))


def main_for_file(
    path: str | os.PathLike[str],
    argv: Sequence[str] | None = None,
    load_device: Callable[[str], None] = lambda device: None,
) -> int:
    """Run the tests of one file that was started by itself, and return the exit code.

    Args:
        path: the file; it need not be called ``test_*.py``.
        argv: arguments behind the file's name, in unittest's spellings; default: those of this process.
        load_device: called with the argument of ``--device``, or an empty string, before this process is forked. A
            RuntimeError of its is a usage error.
    """
    arguments = sys.argv[1:] if argv is None else argv
    return _exit_code(lambda: _run_file(Path(path).resolve(), arguments, load_device))


def _exit_code(command: Callable[[], int]) -> int:
    _fill_standard_streams()
    if problem := _hostile_surroundings():
        return _usage_error(problem)
    interrupts = Interrupts(once=True)
    try:
        return command()
    except SystemExit as ending:  # argparse, which has printed what it has to say
        return OK if not ending.code else USAGE
    except (SelectionError, SetupError) as error:
        return _usage_error(str(error))
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return INTERRUPTED
    except OutputError as error:
        _silence_stdout()
        _complain(f"error: {error}")
        return FAILED
    finally:
        interrupts.give_back()


def _hostile_surroundings() -> str:
    """Return why nothing can run here, in a sentence; empty if it can."""
    if sys.stdout is None:
        return "stdout is closed, and the report goes there; give one, such as > /dev/null"
    try:
        os.getcwd()
    except OSError:
        return "the working directory is gone; change to one that exists"
    return ""


def _fill_standard_streams() -> None:
    """Open what is closed of the descriptors 0 to 2, or a channel to a process would take their place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _silence_stdout() -> None:
    """The interpreter flushes stdout once more on its way out, and would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(text: str) -> None:
    """Print on stderr, unless that is closed."""
    if sys.stderr is not None:
        from torch_ext.world.phrases import printable

        print(printable(text), file=sys.stderr)


def _usage_error(text: str) -> int:
    _complain(f"error: {text}")
    return USAGE


def _open_executor(options: Options) -> Executor:
    # Not imported above: a list of remembered names starts no process, and must not pay for what does.
    return cast(Executor, importlib.import_module("torch_ext.runner.execute").open_executor(options))


def _discover_and_run(options: Options) -> int:
    if options.upstream:
        return _select_and_run(options, _upstream_files(options), NameCache(None, None))
    # The tests of torch_ext itself are left to pytest: a runner that judges itself proves nothing.
    files = find_test_files(options.root, leave_out="torch_ext" if options.root == default_root() else "")
    if not files:
        return _usage_error(f"nothing selected: no test_*.py below {options.root}")
    device = options.device or os.environ.get("TORCH_EXT_DEVICE", "")
    return _select_and_run(options, files, NameCache(cache.folder(), surroundings(device), options.environment()))


def _upstream_files(options: Options) -> list[TestFile]:
    """Return the files that ``--upstream`` names, each a module of its own, as ``python FILE`` would import it."""
    paths = [Path(typed).resolve() for typed in options.upstream]
    found = [[path] if path.is_file() else [file.path for file in find_test_files(path)] for path in paths]
    for path, files in zip(options.upstream, found, strict=True):
        if not files:
            raise SelectionError(f"nothing selected: no test_*.py below {path}")
    return [
        TestFile(path.relative_to(options.root).as_posix(), path, path.stem, path.parent)
        for path in dict.fromkeys(path for files in found for path in files)
    ]


def _run_file(path: Path, arguments: Sequence[str], load_device: Callable[[str], None]) -> int:
    options = parse_for_file(path, arguments)
    try:
        load_device(options.device)
    except RuntimeError as error:
        raise SetupError(str(error)) from error
    file = describe(path, options.root)
    # As __main__ the file may define other tests than when it is imported, so nothing is remembered.
    return _select_and_run(options, [file], NameCache(None, None))


def _select_and_run(options: Options, files: Sequence[TestFile], names: NameCache) -> int:
    with contextlib.ExitStack() as stack:

        @functools.cache
        def executor() -> Executor:
            return stack.enter_context(contextlib.closing(_open_executor(options)))

        return _select_and_run_with(executor, options, files, names)


def _select_and_run_with(
    executor: Callable[[], Executor], options: Options, files: Sequence[TestFile], names: NameCache
) -> int:
    if told := untested_torch():  # before any process starts, which would say it as well
        _complain(f"warning: {told}")
    keywords = _keywords(options)
    selection = select_files([file.name for file in files], options.include, options.exclude, _prefixes(options))
    wanted = [file for file in files if file.name in set(selection.files)]
    collected = collect_names(wanted, names, executor)
    if names.refused:
        _complain(f"warning: {names.refused}")
    broken = {one.file.name: one for one in collected if one.error}
    known = [test for one in collected if not one.error for test in one.tests]
    selected = select_tests(selection, known, broken)
    tests = [test for test in selected.tests if keywords(test)]
    failures = [_import_failure(broken[name]) for name in selected.broken]
    if not tests and not failures:
        return _usage_error(_nothing_selected(options, wanted, selected.tests))
    if options.list_only:
        return _list(tests, failures)
    judge = _judge(options, wanted, collected)
    for one in collected:
        _tell_difference(one.file, one.before, one)
    before = {one.file.name: one.tests for one in collected if one.remembered}

    def renew(found: Collected) -> list[TestName] | None:
        """Return the tests of a file to run, now that it is imported; None if they are those that were remembered."""
        if not found.error and set(found.tests) == set(before[found.file.name]):
            return None
        names.forget(found.file)
        _tell_difference(found.file, before[found.file.name], found)
        return [] if found.error else [test for test in fitting_tests(selection, found.tests) if keywords(test)]

    needs = {test: need for one in collected for test, need in zip(one.tests, one.needs, strict=False)}
    return _run(executor, options, make_plan(wanted, tests, needs), failures, renew, judge)


def _judge(options: Options, files: Sequence[TestFile], collected: Sequence[Collected]) -> Judge | None:
    if not options.upstream:
        return None
    device = next((one.device for one in collected if one.device), options.device)
    surroundings = {"device": device, "cuda_as_sim": str(options.cuda_as_sim).lower()}
    module = importlib.import_module("torch_ext.upstream.judge")
    judge = cast(Judge, module.Judge([file.path for file in files], options.differences, surroundings))
    if judge.told:
        _complain(f"warning: {judge.told}")
    return judge


def _tell_difference(file: TestFile, before: Sequence[TestName] | None, found: Collected) -> None:
    if before is not None and not found.error and (told := describe_difference(file, before, found.tests)):
        _complain(f"warning: {told}")


def _keywords(options: Options) -> Callable[[TestName], bool]:
    try:
        return keyword_filter(options.keywords)
    except ValueError as error:
        raise SelectionError(str(error)) from None


def _prefixes(options: Options) -> list[str]:
    """How a pattern may spell the root before it spells what lies below, as completion by the shell does."""
    roots = {options.root.name, str(options.root), os.path.relpath(options.root), options.typed_root.rstrip("/")}
    return [f"{options.root.name}.", *(f"{root}/" for root in sorted(roots - {"", "."}))]


def _nothing_selected(options: Options, files: Sequence[TestFile], tests: Sequence[TestName]) -> str:
    if not files:
        return "nothing selected: -x excludes every file that -i selects"
    if not tests:
        return f"nothing selected: no test in {', '.join(file.name for file in files[:5])}{', ...' * (len(files) > 5)}"
    from torch_ext.runner.nearest import nearest, spellings

    typed = " ".join(options.keywords)
    near = nearest(typed, spellings((), tests))
    advice = f"; nearest: {', '.join(near)}" if near else ""
    return f"nothing selected: none of {len(tests)} tests fits -k {typed!r}{advice}"


def _import_failure(collected: Collected) -> TestResult:
    if collected.left:
        return TestResult(TestName(collected.file.name), Status.SKIPPED, 0.0, reason=collected.left)
    trace = collected.error.rstrip()
    problem = Raised(trace.rpartition("\n")[2], trace)
    return TestResult(TestName(collected.file.name), Status.FAILED, 0.0, (problem,))


def _list(tests: Sequence[TestName], failures: Sequence[TestResult]) -> int:
    from torch_ext.world.phrases import printable

    try:
        sys.stdout.writelines(f"{printable(test.id)}\n" for test in tests)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the list cannot be written: {error}") from error
    from torch_ext.runner.reporters.failure import describe_failure

    for failure in failures:
        said = f" cannot be imported:\n{describe_failure(failure)}" if failure.problems else f": {failure.reason}"
        _complain(f"{failure.test.id}{said}")
    _complain(f"{len(tests)} test{'s' * (len(tests) != 1)}")
    return FAILED if any(failure.problems for failure in failures) else OK


def _run(
    executor: Callable[[], Executor],
    options: Options,
    plan: Plan,
    failures: Sequence[TestResult],
    tests_now: Callable[[Collected], list[TestName] | None],
    judge: Judge | None = None,
) -> int:
    from torch_ext.runner.progress import Progress
    from torch_ext.runner.reporters.ordered import InOrder
    from torch_ext.runner.reporters.running import Running
    from torch_ext.runner.reporters.styled import is_live
    from torch_ext.runner.reporters.text import TextReporter
    from torch_ext.runner.reporters.watch import LiveWatch, PlainWatch

    progress = Progress(plan)
    stream = sys.stderr if options.json else sys.stdout
    text = TextReporter(plan, options, stream)
    live = is_live(stream) and options.verbosity >= 0 and not options.show_output
    running = Running(plan, lambda test: None, lambda test: 1.0, time.monotonic())
    watch = LiveWatch(running, text.writer, stream) if live else PlainWatch(running, text.writer)
    ordered = InOrder(plan, text, failures_at_once=live)
    reporters: list[Reporter] = [watch, ordered]
    if options.coverage:
        from torch_ext.runner.reporters.coverage import CoverageReporter

        reporters.append(CoverageReporter(plan, sys.stdout, as_json=options.json))

    def take(result: Began | Over | TestResult | Tick) -> None:
        if isinstance(result, Tick):
            watch.tick()
            return
        if isinstance(result, Over):
            watch.over(result)
            ordered.over(result)
            return
        if isinstance(result, Began):
            for reporter in reporters:
                reporter.begin(result)
            return
        result = judge.judged(result) if judge is not None else result
        progress.add(result)
        for reporter in reporters:
            reporter.add(result)

    def renew(found: Collected) -> Sequence[Batch]:
        nonlocal plan
        tests = tests_now(found)
        if found.error:
            take(_import_failure(found))
            take(Over(TestName(found.file.name)))
            return ()
        if tests is not None:
            needs = dict(zip(found.tests, found.needs, strict=False))
            plan = plan.replaced(found.file, make_plan([found.file], tests, needs).batches)
            progress.replan(plan)
            for reporter in reporters:
                reporter.replan(plan)
        return [batch for batch in plan if batch.file == found.file]

    interrupted = False
    for failure in failures:
        take(failure)
    to_run = _without_skipped(plan, judge, take)
    try:
        if to_run.batches and not (options.failfast and any(one.problems for one in failures)):
            try:
                executor().run(to_run, take, renew)
            finally:
                executor().close()
    except KeyboardInterrupt:
        interrupted = True
    if judge is not None and not interrupted:
        whole = not (options.include or options.exclude or options.keywords)
        for stale in judge.out_of_date(plan.tests, whole=whole):
            take(stale)
    for reporter in reporters:
        reporter.finish(interrupted=interrupted)
    return INTERRUPTED if interrupted else OK if progress.passed else FAILED


def _without_skipped(plan: Plan, judge: Judge | None, take: Callable[[TestResult], None]) -> Plan:
    """Return ``plan`` without what ``judge`` lets not run, and ``take`` that as skipped."""
    if judge is None:
        return plan
    reasons = {test: reason for test in plan.tests if (reason := judge.skipped(test))}
    for test, reason in reasons.items():
        take(TestResult(test, Status.SKIPPED, 0.0, reason=reason))
    return plan.without(reasons)
