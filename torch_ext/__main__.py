"""``python -m torch_ext``: the same command as ``python run_test.py``, and these:

==============================  ====================================================================
``python -m torch_ext run``     runs your own program on several ranks, each with a simulated device
``python -m torch_ext serve``   keeps torch loaded for the programs that follow
``python -m torch_ext demo``    shows in ten seconds what that is good for
``python -m torch_ext doctor``  says on one screen what this machine has, for a bug report or for CI
``python -m torch_ext export``  writes work of this tree as a patch for a PyTorch checkout
``python -m torch_ext drift``   says which names of our test helpers differ from upstream's
``python -m torch_ext build``   builds the simulated accelerator, ahead of its first use
==============================  ====================================================================
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from torch_ext.unbuilt import look_there_last

if TYPE_CHECKING:
    from torch_ext.runner.steps import Judge, Upstream

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # No process has started yet, and a traceback of imports helps no user.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

__all__ = ["main", "upstream"]

# Commands that parse their arguments themselves, and the module whose `main` gets these.
_PROGRAMS = {
    "run": "torch_ext.program.run",
    "demo": "torch_ext.program.demo",
    "doctor": "torch_ext.program.doctor",
    "serve": "torch_ext.program.serve",
    "export": "torch_ext.upstream.export.command",
    "drift": "torch_ext.upstream.drift",
}


def main() -> int:
    """Run the command that the arguments of this process name, and return its exit code: tests, where they name none.

    ``build`` returns 0, 1 where the simulator cannot be built or loaded, and 2 for a usage error.
    """
    look_there_last()
    command, *rest = sys.argv[1:] or [""]
    if command in _PROGRAMS:
        _open_standard_streams()
        return _run(command, rest)
    if command != "build":
        from torch_ext.runner.cli import main as run_tests

        return run_tests(upstream=upstream())
    if rest:
        print(f"error: {command} takes no arguments, but got: {' '.join(rest)}", file=sys.stderr)
        return 2
    try:
        from torch_ext.sim import build  # on use: importing it builds

        print(build.ensure_built())
    except (ImportError, OSError, RuntimeError) as error:
        print(f"error: {error.__cause__ or error}", file=sys.stderr)  # torch's error of an autoload has one
        return 1
    return 0


def upstream() -> Upstream:
    """Return how the runner, which imports nothing of ``torch_ext.upstream``, runs files of a PyTorch checkout."""
    from torch_ext.runner.steps import Upstream

    def judge(*arguments: Any) -> Judge:
        from torch_ext.upstream.judge import Judge  # on use: runs of other files do not pay for the import

        return Judge(*arguments)

    return Upstream(("torch_ext.upstream.bridge", "torch_ext.upstream.file"), judge)


def _run(command: str, rest: list[str]) -> int:
    """Run one of ``_PROGRAMS``; say in a sentence if what it prints cannot be written."""
    try:
        found: int = importlib.import_module(_PROGRAMS[command]).main(rest)
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries again at its end
        if error.errno == errno.EPIPE:  # the reader has seen enough
            return 128 + signal.SIGPIPE
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return found


def _open_standard_streams() -> None:
    """Open those that this process was started without (``>&-``): the next file to be opened would take their place."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for good


if __name__ == "__main__":
    raise SystemExit(main())
