"""Runs a program as ``__main__``, as ``python SCRIPT`` and ``python -m MODULE`` would. The standard library only, until
the program itself imports something.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType

from torch_ext.program.spec import Program
from torch_ext.world import frames

__all__ = ["run_main"]

frames.hide(r"/torch_ext/program/main_module\.py")
frames.hide(r"/torch_ext/program/main_module\.py", "run_main", "_run_file", outwards=True)
frames.hide(r"/torch_ext/cuda_as_sim/loader\.py")
frames.hide(r"/ast\.py", "parse")
frames.hide(r"(?:<frozen runpy>|/runpy\.py)")
frames.hide(r"(?:<frozen runpy>|/runpy\.py)", "_run_code", outwards=True)


def run_main(program: Program) -> None:
    """Run ``program`` in this process, whose ``__main__`` it becomes for good. Raises whatever it raises.

    ``__name__``, ``__file__``, ``sys.argv`` and ``sys.path[0]`` are as Python sets them.
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
    _run_file(os.path.abspath(program.target), program.cuda_as_sim)


def _run_file(path: str, cuda_as_sim: bool) -> None:
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = path, SourceFileLoader("__main__", path)
    vars(module).update({"__builtins__": __builtins__, "__cached__": None})
    sys.modules["__main__"] = module
    exec(_code_of(path, cuda_as_sim), vars(module))


def _code_of(path: str, cuda_as_sim: bool) -> CodeType:
    if cuda_as_sim:
        from torch_ext.cuda_as_sim.loader import code_of

        return code_of(path)
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _put_in_front(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # -P, PYTHONSAFEPATH
        sys.path.insert(0, folder)
