"""Runs a program as ``__main__``, as ``python SCRIPT`` and ``python -m MODULE`` do, and ends it as Python does.

Loads the standard library only; the program itself may import more.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import runpy
import sys
import threading
import zipfile
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType


@dataclass(frozen=True)
class Program:
    """A program, and its settings in a rank."""

    target: str  # a file, a folder or archive with a `__main__`, or the name of a module
    is_module: bool = False
    arguments: tuple[str, ...] = ()  # the program's `sys.argv[1:]`
    path: tuple[str, ...] = ()  # `sys.path` without the program's own entry
    simulated: bool = True  # run on the simulated accelerator
    cuda_as_sim: bool = False  # register the accelerator as CUDA's device
    races: str = "off"  # the check for races: `error`, `report` or `off`
    clock: str = ""  # the model of virtual time, if any
    events: str = ""  # the folder for the ranks' events in virtual time, and the hashes of their replicas
    check_replicas: bool = False  # whether to write these hashes
    assumed: tuple[str, ...] | None = None  # values that a dry run gives to reads; None: no dry run


def run_main(program: Program) -> None:
    """Run ``program`` as this process's ``__main__``, without restoring the former one. Propagates its exceptions.

    Sets ``__name__``, ``__file__``, ``sys.argv`` and ``sys.path[0]`` as Python does.
    """
    sys.path[:] = program.path
    sys.modules["__main__"] = ModuleType("__main__")
    if program.is_module:
        sys.argv[:] = ["-m", *program.arguments]
        _put_in_front(os.getcwd())
        runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]  # what -m itself calls
        return
    sys.argv[:] = [program.target, *program.arguments]
    if os.path.isdir(program.target) or zipfile.is_zipfile(program.target):
        sys.path.insert(0, program.target)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # what Python calls
        return
    _put_in_front(os.path.dirname(os.path.realpath(program.target)))
    _run_file(os.path.abspath(program.target))


def _run_file(path: str) -> None:
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = path, SourceFileLoader("__main__", path)
    vars(module).update({"__builtins__": __builtins__, "__cached__": None})
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))


def _put_in_front(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # -P, PYTHONSAFEPATH
        sys.path.insert(0, folder)


_FILES = frozenset((io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom))


def finalize(harness_thread: str) -> None:
    """Drop the globals of ``__main__`` and flush open files, as Python does at its end.

    A rank ends by ``os._exit()``, since finalizing the interpreter would cost half a second. Programs rely on
    ``__del__`` of their globals, and on writes to files that they never close. Keeps the globals if a thread of the
    program besides ``harness_thread`` still runs: Python would have stopped daemon threads before.
    """
    main = sys.modules.get("__main__")
    own = {threading.current_thread().name, harness_thread}
    if main is not None and own.issuperset(thread.name for thread in threading.enumerate()):
        names = vars(main)
        # In Python's order: names with one leading underscore first, then all others.
        for name in sorted(names, key=lambda name: not re.match("_(?!_)", name)):
            names[name] = names[name] if name == "__builtins__" else None
    for found in gc.get_objects():
        if type(found) in _FILES:  # isinstance() would access __class__, and some objects warn about that
            with contextlib.suppress(Exception):  # the file is closed, or its reader is gone
                found.flush()
