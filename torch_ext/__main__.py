"""``python -m torch_ext``: the same command as ``python run_test.py``, with these subcommands:

=====================================  =============================================================
``python -m torch_ext run``            runs your own program on several ranks, each with a simulated device
``python -m torch_ext serve``          keeps torch loaded for the programs that follow
``python -m torch_ext demo``           shows a race and its report in ten seconds
``python -m torch_ext doctor``         shows this machine's features on one screen, for a bug report or for CI
``python -m torch_ext conformance``    compares a device with the host's kernels and with upstream's contracts
``python -m torch_ext export``         writes work of this tree as a patch for a PyTorch checkout
``python -m torch_ext build``          builds the simulated accelerator, ahead of its first use
=====================================  =============================================================
"""

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

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # No process has started yet, and a traceback through imports is no help.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

# Commands that parse their own arguments -> the module whose `main` runs them.
_PROGRAMS = {
    "run": "torch_ext.program.run",
    "demo": "torch_ext.program.demo",
    "doctor": "torch_ext.program.doctor",
    "conformance": "torch_ext.conformance.command",
    "serve": "torch_ext.program.serve",
    "export": "torch_ext.upstream.export.command",
}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run the command that this process's arguments name, by default tests, and return its exit code. Raises SystemExit
    with 2 for a usage error of a subcommand, with 0 after its ``--help``.

    ``build`` returns 0, or 1 if the simulator cannot be built or loaded.
    """
    demote_unbuilt()
    command, *rest = sys.argv[1:] or [""]
    if command in _PROGRAMS:
        _open_standard_streams()
        return _run(command, rest)
    if command != "build":
        from torch_ext.runner.cli import main as run_tests

        return run_tests(upstream=upstream())
    argparse.ArgumentParser("torch_ext build", description="Build the simulated accelerator.").parse_args(rest)
    try:
        from torch_ext.sim import build  # on use: the import builds the simulator

        print(build.ensure_built())
    except (ImportError, OSError, RuntimeError) as error:
        print(f"error: {error.__cause__ or error}", file=sys.stderr)  # torch's autoload error has a cause
        return 1
    return 0


def upstream() -> Upstream:
    """Return the runner's interface to PyTorch checkouts; the runner never imports ``torch_ext.upstream`` itself."""
    from torch_ext.runner.steps import Upstream

    def judge(*arguments: Any) -> Judge:
        from torch_ext.upstream.judge import Judge  # on use: runs of other files do not need it

        return Judge(*arguments)

    return Upstream(("torch_ext.upstream.bridge", "torch_ext.upstream.file"), judge)


def _run(command: str, rest: list[str]) -> int:
    """Run one of ``_PROGRAMS``; report an output that cannot be written in a sentence."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background
            signal.signal(number, _end)
    try:
        found: int = importlib.import_module(_PROGRAMS[command]).main(rest)
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
