"""The command ``run_test.py``, and what ``python some_test_file.py`` does: from arguments to an exit code.

Exit codes: 0 everything passed, was skipped with a reason, or is flaky (unless ``--fail-on-flaky``); 1 a test failed,
or was planned and has no result, or a report could not be written; 2 a usage error (a closed stdout, a working
directory that is gone and a report that cannot be opened are three), or nothing selected; 130 interrupted, by the
keyboard or by a reader that closed the pipe; 143 or 129 by SIGTERM or SIGHUP. What was done by then is reported.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch_ext import cache
from torch_ext.compat import untested_torch
from torch_ext.runner.advice import left_out, refuse_own_tests, why_nothing
from torch_ext.runner.arguments import parse, parse_for_file
from torch_ext.runner.choice import Choice, changed_files
from torch_ext.runner.discovery import TestFile, describe, find_test_files
from torch_ext.runner.executor import Executor, Judge, Upstream
from torch_ext.runner.history import History
from torch_ext.runner.interrupts import Interrupts
from torch_ext.runner.keywords import keyword_filter
from torch_ext.runner.names import Collected, NameCache, collect_names, describe_difference, surroundings
from torch_ext.runner.options import Options, default_root
from torch_ext.runner.results import (
    WITHOUT_TESTS,
    Needs,
    OutputError,
    SetupError,
    Status,
    TestName,
    TestResult,
    import_failure,
)
from torch_ext.runner.schedule import Plan, make_plan
from torch_ext.runner.selection import SelectionError, fitting_tests, select_files, select_tests

if TYPE_CHECKING:
    from torch_ext.runner.rounds import Rounds

__all__ = ["INTERRUPTED", "main", "main_for_file"]

# So many files take a while to import, of which nobody would otherwise know what it is.
_MANY_FILES = 5
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_BY_SIGNAL = 128
# The folder of our checkout's suites that holds the tests of torch_ext itself.
OWN_TESTS = "torch_ext"
# What to do where the runner itself gets no more of something.
_FEWER = "or run fewer classes at once (-j 1)"
_EXHAUSTED = {
    errno.EMFILE: f"let it open more files (ulimit -n), {_FEWER}",
    errno.ENFILE: f"close programs that have many files open, {_FEWER}",
    errno.EAGAIN: f"let it start more processes (ulimit -u), {_FEWER}",
    errno.ENOMEM: f"give it more memory (ulimit -v), {_FEWER}",
}
# What PyTorch calls its test files; the second is `elastic`'s way.
_UPSTREAMS = ("test_*.py", "*_test.py")


def main(argv: Sequence[str] | None = None, upstream: Upstream | None = None) -> int:
    """Run the command with ``argv`` (default: the arguments of this process) and return its exit code.

    Args:
        upstream: how files of a PyTorch checkout run; None: ``--upstream`` is refused.
    """
    arguments = sys.argv[1:] if argv is None else argv
    return _exit_code(lambda: _discover_and_run(parse(arguments), upstream))


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
    _spell_out_what_cannot_be_encoded()
    interrupts = Interrupts(once=True, signals=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

    def interrupted() -> int:
        return INTERRUPTED if interrupts.number in (0, signal.SIGINT) else _BY_SIGNAL + interrupts.number

    try:
        code = command()
        return interrupted() if code == INTERRUPTED else code
    except SystemExit as ending:  # argparse, which has printed what it has to say
        return OK if not ending.code else USAGE
    except (SelectionError, SetupError) as error:
        return _usage_error(str(error))
    except KeyboardInterrupt:
        _complain("interrupted")
        return interrupted()
    except BrokenPipeError:
        _silence_stdout()
        return INTERRUPTED
    except OutputError as error:
        _silence_stdout()
        _complain(f"error: {error}")
        return FAILED
    except OSError as error:
        if error.errno not in _EXHAUSTED:
            raise
        return _usage_error(f"the runner is at a limit of this machine or shell: {error}; {_EXHAUSTED[error.errno]}")
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


def _spell_out_what_cannot_be_encoded() -> None:
    """A name or a line of output that the locale has no letters for is to be seen, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


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
    # Not imported above: a list of cached names starts no process, and must not pay for what does.
    return cast(Executor, importlib.import_module("torch_ext.runner.execute").open_executor(options))


def _discover_and_run(options: Options, upstream: Upstream | None) -> int:
    if options.upstream:
        if upstream is None:
            raise SelectionError("--upstream belongs to python -m torch_ext and run_test.py")
        options = replace(options, harness=upstream.harness)
        return _select_and_run(options, _upstream_files(options), NameCache(None, None), upstream)
    # The tests of torch_ext itself are left to pytest: a runner that judges itself proves nothing.
    leave_out = OWN_TESTS if options.root == default_root() and (options.root / OWN_TESTS / "house").is_dir() else ""
    files = find_test_files(options.root, leave_out)
    if not files:
        return _usage_error(f"nothing selected: no test_*.py below {options.root}")
    if leave_out:
        refuse_own_tests(options, leave_out)
    return _select_and_run(options, files, NameCache(cache.folder(), surroundings(_device(options))))


def _device(options: Options) -> str:
    """The device type that was asked for; empty if the machine decides."""
    return options.device or os.environ.get("TORCH_EXT_DEVICE", "")


def _upstream_files(options: Options) -> list[TestFile]:
    """Return the files that ``--upstream`` names, each a module of its own, as ``python FILE`` would import it."""
    paths = [Path(typed).resolve() for typed in options.upstream]
    found = [
        [path] if path.is_file() else [file.path for file in find_test_files(path, like=_UPSTREAMS)] for path in paths
    ]
    for path, files in zip(options.upstream, found, strict=True):
        for file in [file for file in files if not file.is_file() or "." in file.stem]:
            why = (
                "its name has one dot too many to import it"
                if file.is_file()
                else "it is no file, or a link to nothing"
            )
            _complain(f"warning: {file} is left out: {why}")
            files.remove(file)
        if not files:
            raise SelectionError(f"nothing selected: no {' or '.join(_UPSTREAMS)} below {path}")
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
    # As __main__ the file may define other tests than when it is imported, so nothing is cached.
    return _select_and_run(options, [file], NameCache(None, None))


def _select_and_run(
    options: Options, files: Sequence[TestFile], names: NameCache, upstream: Upstream | None = None
) -> int:
    with contextlib.ExitStack() as stack:

        @functools.cache
        def executor() -> Executor:
            return stack.enter_context(contextlib.closing(_open_executor(options)))

        return _select_and_run_with(executor, options, files, names, upstream)


def _select_and_run_with(
    executor: Callable[[], Executor],
    options: Options,
    files: Sequence[TestFile],
    names: NameCache,
    upstream: Upstream | None,
) -> int:
    if told := untested_torch():  # before any process starts, which would say it as well
        _complain(f"warning: {told}")
    keywords = _keywords(options)
    history = History(cache.folder(), options.root, _device(options))
    choice = Choice(options, history, lambda: changed_files(options.root, options.changed))
    include = [options.history] if options.history else options.include
    selection = select_files([file.name for file in files], include, options.exclude, _prefixes(options))
    wanted = [file for file in files if file.name in set(selection.files)]
    collected = collect_names(wanted, names, executor, functools.partial(_tell_of_imports, options))
    if names.refused:
        _complain(f"warning: {names.refused}")
    broken = {one.file.name: one for one in collected if one.error}
    known = [test for one in collected if not one.error for test in one.tests]
    selected = select_tests(selection, known, broken)
    fitting = [test for test in selected.tests if keywords(test)]
    tests = _said(choice.choose, fitting, collected)
    failures = [import_failure(name, broken[name].error, broken[name].left) for name in selected.broken]
    if options.upstream and not options.narrowed:
        empty = [one.file.name for one in collected if not one.tests and not one.error]
        failures += [import_failure(name, "", WITHOUT_TESTS) for name in empty]
    if not tests and not failures:
        why = choice.why_none() if fitting else why_nothing(options, wanted, selected.tests)
        return _usage_error(f"nothing selected: {why}")
    if selected.tests and not fitting:  # else only files whose names nobody knows would be told
        _complain(f"warning: {why_nothing(options, wanted, selected.tests)}")
    for told in left_out(selection, selected, () if options.upstream else collected):
        _complain(f"warning: {told}")
    needs = {test: need for one in collected for test, need in zip(one.tests, one.needs, strict=False)}
    if options.history or options.list_only:
        if options.failed_first or options.random_order is not None:
            tests = list(make_plan(*choice.arrange(wanted, tests), needs).tests)
        cached = sum(one.cached for one in collected)
        return _list(options, tests, needs, failures, history, names.told(cached))
    judge = _judge(upstream, options, wanted, collected) if upstream is not None else None
    before = {one.file.name: one.tests for one in collected if one.cached}
    chosen = set(tests)

    def renewed(found: Collected) -> Plan | None:
        """Return what of a file runs, now that it is imported; None if it holds the tests that were cached."""
        if set(found.tests) == set(before[found.file.name]):
            return None
        names.forget(found.file)
        _tell_difference(found.file, before[found.file.name], found)
        now = [test for test in fitting_tests(selection, found.tests) if keywords(test)]
        if options.last_failed or options.shard:  # what was chosen was chosen by name
            now = [test for test in now if test in chosen]
        needs.update(zip(found.tests, found.needs, strict=False))
        return make_plan(*choice.arrange([found.file], now), needs, expected_s)

    def expected_s(test: TestName) -> float:
        return history.expected_s(test) or 1.0

    from torch_ext.runner.reporters.make import Reporters  # on use: a list pays for none of them
    from torch_ext.runner.rounds import Rounds

    plan = make_plan(*choice.arrange(wanted, tests), needs, expected_s)
    reporters = Reporters(plan, options, needs, history.expected_s, choice.notes)
    skipped = judge.skipped if judge is not None else lambda test: ""
    rounds = Rounds(plan, options, reporters, renewed, judge.judged if judge is not None else lambda one: one, skipped)
    return _run(executor, options, rounds, failures, history, judge)


def _tell_of_imports(options: Options, number: int) -> None:
    if number >= _MANY_FILES and options.verbosity >= 0:
        from torch_ext.world.notices import PREFIX  # on use: a list of cached names does not pay for it

        _complain(f"{PREFIX}imports {number} files to name their tests")


def _said(choose: Callable[..., list[TestName]], *arguments: object) -> list[TestName]:
    try:
        return choose(*arguments)
    except ValueError as error:
        raise SelectionError(str(error)) from None


def _judge(upstream: Upstream, options: Options, files: Sequence[TestFile], collected: Sequence[Collected]) -> Judge:
    device = next((one.device for one in collected if one.device), options.device)
    surroundings = {"device": device, "cuda_as_sim": str(options.cuda_as_sim).lower()}
    judge = upstream.judge([file.path for file in files], options.differences, surroundings)
    if judge.told:
        _complain(f"warning: {judge.told}")
    return judge


def _tell_difference(file: TestFile, before: Sequence[TestName], found: Collected) -> None:
    if not found.error and (told := describe_difference(file, before, found.tests)):
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


def _list(
    options: Options,
    tests: Sequence[TestName],
    needs: Mapping[TestName, Needs],
    failures: Sequence[TestResult],
    history: History,
    cached: str,
) -> int:
    from torch_ext.runner.listing import list_as_json, list_ids, show_history

    if options.history and tests:
        for test in tests:
            show_history(test, history.records(test.id))
        return OK
    if options.json and not options.history:
        list_as_json(tests, needs, options.json)
    else:
        list_ids(tests)
    if failures:
        from torch_ext.runner.reporters.failure import describe_failure
    for failure in failures:
        said = f" cannot be imported:\n{describe_failure(failure)}" if failure.problems else f": {failure.reason}"
        _complain(f"{failure.test.id}{said}")
    _complain(f"{len(tests)} test{'s' * (len(tests) != 1)}{cached}")
    return FAILED if any(failure.problems for failure in failures) else OK


def _run(
    executor: Callable[[], Executor],
    options: Options,
    rounds: Rounds,
    failures: Sequence[TestResult],
    history: History,
    judge: Judge | None,
) -> int:
    interrupted = False
    for failure in failures:
        rounds.take(failure)
    try:
        if rounds.plan.batches and not (options.failfast and any(one.problems for one in failures)):
            try:
                rounds.run(executor)
            finally:
                executor().close()
    except KeyboardInterrupt:
        interrupted = True
    if judge is not None and not interrupted:
        whole = not (options.include or options.exclude or options.keywords or options.shard or options.last_failed)
        for stale in judge.out_of_date(rounds.plan.tests, whole=whole):
            rounds.take(stale)
    for result in rounds.progress.results:
        history.add(result)
    history.save()
    rounds.finish(interrupted=interrupted)
    if interrupted:
        return INTERRUPTED
    flaky = any(result.status is Status.FLAKY for result in rounds.progress.results)
    return OK if rounds.progress.passed and not (flaky and options.fail_on_flaky) else FAILED
