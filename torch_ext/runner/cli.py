"""The command ``run_test.py``, also behind ``python some_test_file.py``: from arguments to an exit code.

Exit codes: 0 everything passed, was skipped with a reason, or is flaky (unless ``--fail-on-flaky``); 1 a test failed or
has no result, or a report could not be written; 2 a usage error (or a closed stdout, a missing working directory, a
report that cannot be opened), or nothing selected; 130 interrupted, by the keyboard or by a reader that closed the
pipe; 143 or 129 by SIGTERM or SIGHUP. An interrupted run reports the results so far.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch_ext.compat import untested_torch
from torch_ext.results import FAILED, INTERRUPTED, OK, USAGE, OutputError, SetupError
from torch_ext.runner.arguments import parse
from torch_ext.runner.choice import Chosen, choose, name
from torch_ext.runner.interrupts import Interrupts
from torch_ext.runner.options import RunOptions
from torch_ext.runner.steps import Executor, Upstream, select

_BY_SIGNAL = 128
# Errors of the runner itself when it runs out of files, processes or memory.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


def main(argv: Sequence[str] | None = None, upstream: Upstream | None = None) -> int:
    """Run the command with ``argv`` (default: those of this process) and return its exit code. ``upstream`` runs files
    of a PyTorch checkout; without it, ``--upstream`` is an error.
    """
    arguments = sys.argv[1:] if argv is None else argv
    return _exit_code(lambda: _execute(parse(arguments), upstream))


def main_for_file(
    path: str | os.PathLike[str],
    argv: Sequence[str] | None = None,
    load_device: Callable[[str], None] = lambda device: None,
) -> int:
    """Run the tests of the file ``path``, which was started itself, with ``argv`` (default: this process's arguments),
    and return the exit code. Calls ``load_device`` with the requested device type, or an empty string, before this
    process forks; a RuntimeError from it is a usage error.
    """
    arguments = sys.argv[1:] if argv is None else argv

    def run_file() -> int:
        options = parse(arguments, Path(path).resolve())
        try:
            load_device(options.device)
        except RuntimeError as error:
            raise SetupError(str(error)) from error
        return _execute(options)

    return _exit_code(run_file)


def _exit_code(command: Callable[[], int]) -> int:
    _fill_standard_streams()
    if problem := _environment_problem():
        return _usage_error(problem)
    _escape_unencodable()
    interrupts = Interrupts(once=True, signals=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

    def interrupted() -> int:
        return INTERRUPTED if interrupts.number in (0, signal.SIGINT) else _BY_SIGNAL + interrupts.number

    try:
        code = command()
        return interrupted() if code == INTERRUPTED else code
    except SystemExit:  # --help, --version and --show-config have printed their text
        return OK
    except SetupError as error:
        return _usage_error(str(error))
    except KeyboardInterrupt:
        _print_error("interrupted")
        return interrupted()
    except BrokenPipeError:
        _silence_stdout()
        return INTERRUPTED
    except OutputError as error:
        _silence_stdout()
        _print_error(f"error: {error}")
        return FAILED
    except OSError as error:
        if error.errno not in _EXHAUSTED:
            raise
        advice = "raise it (ulimit -n, -u or -v), or run fewer classes at once (-j 1)"
        return _usage_error(f"the runner reached a limit of this machine or shell: {error}; {advice}")
    finally:
        interrupts.restore()


def _environment_problem() -> str:
    """Return a sentence about why no test can run here; empty if tests can run."""
    if sys.stdout is None:
        return "stdout is closed, but the report needs it; redirect it, such as > /dev/null"
    try:
        os.getcwd()
    except OSError:
        return "the working directory is gone; change to one that exists"
    return ""


def _fill_standard_streams() -> None:
    """Open descriptors 0 to 2 if they are closed; otherwise a channel to a process would get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _escape_unencodable() -> None:
    """Escape characters that the locale cannot encode, in names and output, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _silence_stdout() -> None:
    """Discard stdout: the interpreter flushes it at exit, and would report the same error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(text: str) -> None:
    """Print on stderr, unless stderr is closed."""
    if sys.stderr is not None:
        from torch_ext.world.wording import printable  # on use: importing this module must not load the world

        print(printable(text), file=sys.stderr)


def _usage_error(text: str) -> int:
    _print_error(f"error: {text}")
    return USAGE


def _execute(options: RunOptions, upstream: Upstream | None = None) -> int:
    """Execute the steps of a command; see ``steps``."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def executor() -> Executor:
            # On use: a list of cached names starts no process, and must not load the modules that do.
            execute = importlib.import_module("torch_ext.runner.execute")
            opened: Executor = stack.enter_context(contextlib.closing(execute.open_executor(request.options)))
            return opened

        request = select(options, upstream)
        _warn(untested_torch())  # before any process starts, which would print the warning too
        chosen = choose(request, name(request, executor))
        _warn(request.names.refused, *chosen.warnings)
        if options.list_only:
            return _list(chosen)
        from torch_ext.runner.rounds import Rounds  # on use: a list needs no reporter

        rounds = Rounds(chosen, executor)
        _warn(rounds.warning)
        return rounds.run()


def _warn(*sentences: str) -> None:
    for sentence in filter(None, sentences):
        _print_error(f"warning: {sentence}")


def _list(chosen: Chosen) -> int:
    from torch_ext.runner.reporters.tally import ReportFile
    from torch_ext.world.wording import printable

    tests, path = chosen.plan.tests, chosen.request.options.json
    lines = [printable(test.id) for test in tests]
    if path:
        from torch_ext.runner.reporters.jsonlines import describe_test

        lines = [json.dumps(describe_test(test, chosen.needs.get(test))) for test in tests]
    file = ReportFile(path or "-", "the list")
    file.write("".join(f"{line}\n" for line in lines))
    file.close()
    for failure in chosen.failures:
        from torch_ext.runner.reporters.text import describe_failure  # on use: most lists have no failure to describe

        reason = f" cannot be imported:\n{describe_failure(failure)}" if failure.problems else f": {failure.reason}"
        _print_error(f"{failure.test.id}{reason}")
    _print_error(f"{len(tests)} test{'s' * (len(tests) != 1)}{chosen.request.names.cache_note(chosen.cached)}")
    return FAILED if any(failure.problems for failure in chosen.failures) else OK
