"""Children of multiprocessing that are fresh interpreters: in them, too, CUDA means the simulated accelerator.

Such a child runs the program's file again, under another name, before it does anything else. Its parent sends it what
it is to prepare; unpickling that is the first thing that happens there. The standard library only.
"""

from __future__ import annotations

import multiprocessing.spawn
import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch_ext.cuda_as_sim import loader

__all__ = ["begin", "install"]

_ABOVE = str(Path(__file__).resolve().parents[2])
# The child may have another search path than its parent until it has read this.
_FIRST = """
import sys
sys.path.append({above!r})
from torch_ext.cuda_as_sim import spawned
spawned.begin({roots!r}, {packages!r})
"""


class _Message:
    """Unpickles by running the first lines of a child."""

    def __init__(self, roots: tuple[str, ...], packages: tuple[str, ...]) -> None:
        self._text = _FIRST.format(above=_ABOVE, roots=roots, packages=packages)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._text, {})


def install(roots: Sequence[str], packages: Sequence[str]) -> None:
    """Rewrite what is imported from now on, here and in the children that this process spawns; see
    :func:`loader.install`.
    """
    loader.install(roots, packages)
    spawn: Any = multiprocessing.spawn
    original, message = spawn.get_preparation_data, _Message(tuple(roots), tuple(packages))

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "torch_ext": message}

    spawn.get_preparation_data = get_preparation_data


def begin(roots: tuple[str, ...], packages: tuple[str, ...]) -> None:
    """Rewrite, in this child, what is imported, and the program's file when it is run again."""
    install(roots, packages)
    spawn: Any = multiprocessing.spawn
    spawn.runpy = SimpleNamespace(run_path=_run_path, run_module=runpy.run_module)


def _run_path(path: str, run_name: str) -> dict[str, Any]:
    if not path.endswith(".py"):
        return runpy.run_path(path, run_name=run_name)
    run: Any = getattr(runpy, "_run_module_code")  # noqa: B009 - what run_path itself calls
    found: dict[str, Any] = run(loader.code_of(path), None, run_name, pkg_name="", script_name=path)
    return found
