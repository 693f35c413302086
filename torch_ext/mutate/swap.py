"""Gives functions other code. Runs in zygotes; standard library only.

Note [Swapped code]
~~~~~~~~~~~~~~~~~~~
The root zygote imports the mutated modules and finds every function object with code of theirs: also behind a
decorator, in a registered hook, or held by another module. A copy of a test file's zygote sets the ``__code__`` of
those that a mutant changes, then forks the class process and the ranks of one test. So nothing is imported twice, and
no process runs two mutants. Statements in swapped code mark the lines that a test reaches; a trace function would miss
the threads of autograd.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import mmap
from dataclasses import dataclass
from types import FunctionType

# The name by which swapped code finds the marks of its module.
REACH = "__torch_ext_reach__"


@dataclass(frozen=True)
class Code:
    """Code for the function ``name`` that begins in ``line`` of ``module``, its decorators included."""

    module: str
    line: int
    name: str
    code: bytes  # by `marshal`


@dataclass(frozen=True)
class Swap:
    """What a zygote's copy changes. ``marks``: a file with a byte for each line of the modules, if lines are marked."""

    codes: tuple[Code, ...]
    marks: str = ""


_functions: dict[tuple[str, int, str], list[FunctionType]] = {}


def prepare(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Import ``modules`` and find their functions; return a sentence for each that cannot be imported."""
    problems = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            problems.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
    gc.unfreeze()  # a zygote has frozen what it has loaded
    for each in gc.get_objects():
        if type(each) is FunctionType and (name := str(each.__globals__.get("__name__"))) in modules:
            _functions.setdefault((name, each.__code__.co_firstlineno, each.__code__.co_name), []).append(each)
    gc.freeze()
    return tuple(problems)


def apply(swap: Swap) -> str:
    """Change this process; return what is wrong, in words, or an empty text."""
    if not _functions:
        return "the ranks of this test start in fresh interpreters, which have no mutants"
    pages = memoryview(b"")
    if swap.marks:
        with open(swap.marks, "r+b") as stream:
            pages = memoryview(mmap.mmap(stream.fileno(), 0))  # shared with every fork
    for code in swap.codes:
        for function in _functions.get((code.module, code.line, code.name), ()):
            function.__code__ = marshal.loads(code.code)
            function.__globals__[REACH] = pages
    return ""
