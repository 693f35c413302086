"""``torch_ext`` and ``python -m torch_ext``: runs tests, as ``python run_test.py`` does, or one of ``COMMANDS``."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from torch_ext.unbuilt import demote_unbuilt

if TYPE_CHECKING:
    from torch_ext.runner.steps import Judge, Upstream

# Command -> the module whose `main` parses its arguments (empty: this one), and its line in --help.
COMMANDS = {
    "test": ("", "runs distributed tests: also without this word"),
    "run": ("torch_ext.program.run", "runs your own program on several ranks, each with a simulated device"),
    "serve": ("torch_ext.program.serve", "keeps torch loaded for the programs that follow"),
    "demo": ("torch_ext.program.demo", "shows a race and its report in ten seconds"),
    "doctor": ("torch_ext.program.doctor", "shows what this machine has, for a bug report or for CI"),
    "build": ("", "builds the simulated accelerator, ahead of its first use"),
    "conformance": (
        "torch_ext.conformance.command",
        "compares a device with the host and upstream's contracts",
    ),
    "mutate": ("torch_ext.mutate.command", "makes small faults in a package and shows those that no test notices"),
    "calibrate": ("torch_ext.program.calibrate", "measures a cost model for run --clock on this machine"),
    "export": ("torch_ext.upstream.export.command", "writes tests of this tree as a patch for a PyTorch checkout"),
}
_HELP = """\
usage: torch_ext [PATTERN ...] [options]    runs tests below this folder: folders, files, classes, tests
       torch_ext COMMAND ...                each has --help

{commands}

  torch_ext                                 every test_*.py in test, in tests or here
  torch_ext test_a.py TestA.test_b          one test; also test_a.py::TestA::test_b
  torch_ext -k "unshard and not error"      by name; -x PATTERN leaves out
  torch_ext --last-failed -v                what failed last time, a line each
  torch_ext --device cpu -j 1               on plain cpu, a class at a time
  torch_ext --list                          names only
  torch_ext test --help                     all options

pytest runs functions in ranks: @pytest.mark.ranks(4), see docs/pytest.md.
"""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run the command that this process's arguments name, by default tests, and return its exit code. Raises SystemExit
    with 2 for a usage error of a subcommand, with 0 after its ``--help``.

    ``build`` returns 0, or 1 if the simulator cannot be built or loaded.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # No process has started yet, and a traceback through imports is no help.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    demote_unbuilt()
    command, *rest = sys.argv[1:] or [""]
    if command in ("-h", "--help"):
        print(_HELP.format(commands="\n".join(f"  {name:<13}{text}" for name, (_, text) in COMMANDS.items())), end="")
        return 0
    if COMMANDS.get(command, ("",))[0]:
        _open_standard_streams()
        return _run(command, rest)
    if command != "build":
        from torch_ext.runner.cli import main as run_tests

        if near := _misspelt(command):
            print(f"error: there is no command {command!r}; nearest: {near}", file=sys.stderr)
            return 2
        return run_tests(rest if command == "test" else None, upstream())
    argparse.ArgumentParser("torch_ext build", description="Build the simulated accelerator.").parse_args(rest)
    try:
        from torch_ext.sim import build  # on use: the import builds the simulator

        print(build.ensure_built())
    except (ImportError, OSError, RuntimeError) as error:
        print(f"error: {error.__cause__ or error}", file=sys.stderr)  # torch's autoload error has a cause
        return 1
    return 0


def _misspelt(word: str) -> str:
    """Return the command that ``word`` misspells; empty if it is one, or may be a pattern of tests."""
    if word in COMMANDS or not word.isalpha() or os.path.exists(word):
        return ""
    from difflib import get_close_matches  # on use: a list of cached names must be fast

    return "".join(get_close_matches(word, COMMANDS, 1, 0.6))


def upstream() -> Upstream:
    """Return the runner's interface to PyTorch checkouts; the runner never imports ``torch_ext.upstream`` itself."""
    from torch_ext.runner.steps import Upstream

    def judge(*arguments: Any) -> Judge:
        from torch_ext.upstream.judge import Judge  # on use: runs of other files do not need it

        return Judge(*arguments)

    return Upstream(("torch_ext.upstream.bridge", "torch_ext.upstream.file"), judge)


def _run(command: str, rest: list[str]) -> int:
    """Run one of ``COMMANDS``; report an output that cannot be written in a sentence."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background
            signal.signal(number, _end)
    try:
        found: int = importlib.import_module(COMMANDS[command][0]).main(rest)
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter flushes again at exit
        if error.errno == errno.EPIPE:  # the reader has ended
            return 128 + signal.SIGPIPE
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return found


def _end(number: int, frame: object) -> None:
    """Raise SystemExit for a signal, so that cleanups run, and ignore further ones."""
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _open_standard_streams() -> None:
    """Open missing standard streams (``>&-``); otherwise the next opened file would get their descriptors."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - stays open


if __name__ == "__main__":
    raise SystemExit(main())
