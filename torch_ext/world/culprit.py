"""Which line of a module started the threads that keep its zygote from forking. Standard library and own layer only.

A running thread does not tell who started it. So the module is imported once more, in a fresh interpreter whose only
task is to count its threads after each line of module-level code. That takes as long as the import and repeats its side
effects, and so is done only where forking has failed already and fresh interpreters serve anyhow.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import linecache
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict
from types import FrameType
from typing import Any

from torch_ext.world import _os
from torch_ext.world.interpreter import Preparation, compute_on_one_thread

__all__ = ["find_culprit", "main"]

_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from torch_ext.world.culprit import main; main()"
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def find_culprit(preparation: Preparation, environment: Mapping[str, str], timeout_s: float = 60.0) -> str:
    """Return the module-level line that first starts a thread, as ``"file:line: source"``; empty if none is found.

    Never raises for what the modules do. Blocks while they are imported, at most ``timeout_s`` seconds.

    Args:
        preparation: what to import, in a fresh interpreter.
        environment: of that interpreter.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(root=_PACKAGE_ROOT)],
            input=json.dumps(asdict(preparation)),
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def main() -> None:
    """Program of the interpreter: read a preparation from stdin, print the line that :func:`find_culprit` returns."""
    preparation = Preparation(**json.load(sys.stdin))
    report = os.dup(1)
    os.dup2(2, 1)  # what the modules print is no answer
    _load_torch()
    tracer = _Tracer(report)
    sys.settrace(tracer.enter)
    try:
        preparation.apply()
    finally:
        os._exit(0)


def _load_torch() -> None:
    """As in a zygote: torch is there, and computes on one thread, before a test module is."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
        compute_on_one_thread()


class _Tracer:
    """Watches module-level code outside the installed packages; ends the process at the first thread."""

    def __init__(self, report: int) -> None:
        self._report = report
        self._tasks = _os.tasks()
        paths = sysconfig.get_paths()
        self._installed = tuple(os.path.realpath(paths[name]) + os.sep for name in ("stdlib", "purelib", "platlib"))
        self._own = os.path.join(_PACKAGE_ROOT, "torch_ext") + os.sep

    def enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Have the lines of a module followed, and those of no function: they are charged to the line that called."""
        file = frame.f_code.co_filename
        if frame.f_code.co_name != "<module>" or file.startswith(("<", self._own)):
            return None
        if os.path.realpath(file).startswith(self._installed):
            return None
        line = frame.f_lineno

        def follow(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal line
            if _os.tasks() > self._tasks:
                self._tell(file, line)
            line = frame.f_lineno
            return follow

        return follow

    def _tell(self, file: str, line: int) -> None:
        os.write(self._report, f"{file}:{line}: {linecache.getline(file, line).strip()}".encode())
        os._exit(0)
