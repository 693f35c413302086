"""Which line of a module started the threads that keep its zygote from forking. Standard library and own layer only.

Note [Origin of a thread]
~~~~~~~~~~~~~~~~~~~~~~~~~
A running thread does not tell who started it. So the modules are imported once more, in a fresh interpreter that counts
its threads after each line of module-level code. That takes as long as the import and repeats its side effects, and the
zygote serves nobody meanwhile. It is done once per zygote, only where forking has failed already, and gives up after
``TORCH_EXT_THREAD_ORIGIN`` seconds (default 60; 0: it is not done, and the message names no line).
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
from torch_ext.world.interpreter import PACKAGE_ROOT
from torch_ext.world.preparation import compute_on_one_thread, load
from torch_ext.world.protocol import Preparation

__all__ = ["find_thread_origin", "main"]

_PROGRAM = f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); from torch_ext.world.thread_origin import main; main()"


def find_thread_origin(preparation: Preparation, environment: Mapping[str, str], timeout_s: float) -> str:
    """Return the module-level line that first starts a thread, as ``"file:line: source"``; empty if none is found.

    Never raises for what the modules do. Blocks while they are imported, for at most ``timeout_s`` seconds; with 0 it
    looks for nothing.

    Args:
        preparation: what to import, in a fresh interpreter.
        environment: the interpreter's environment.
    """
    if not timeout_s:
        return ""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
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
    """Program of the interpreter: read a preparation from stdin and print what :func:`find_thread_origin` returns."""
    preparation = Preparation(**json.load(sys.stdin))
    report = os.dup(1)
    os.dup2(2, 1)  # what the modules print is no answer
    _load_torch()
    tracer = _Tracer(report)
    sys.settrace(tracer.enter)
    try:
        load(preparation)
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
        self._own = os.path.join(PACKAGE_ROOT, "torch_ext") + os.sep

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
