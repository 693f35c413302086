"""Gives functions other code. Runs in zygotes; standard library only.

Note [Swapped code]
~~~~~~~~~~~~~~~~~~~
The root zygote imports the mutated modules, and finds every function object that runs code of theirs: also those behind
a decorator, in a hook that is registered, or held by another module. A copy of a test file's zygote then sets the
``__code__`` of those that a mutant changes, and forks the class process and the ranks of one test, which inherit it. So
nothing is imported twice, and no process runs two mutants.

A function whose code is swapped before it runs is seen by every thread of C++ too. So the lines that a test reaches are
marked by statements in the swapped code, and not by a trace function, which autograd's threads would lack.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import mmap
import os
import sys
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
    """What a zygote's copy changes before it starts a test. ``marks``: a file with a byte for each line of the modules,
    one after another, whose offsets and sizes are ``parts``; empty: no lines are marked.
    """

    codes: tuple[Code, ...]
    marks: str = ""
    parts: tuple[tuple[str, int, int], ...] = ()


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
        if type(each) is FunctionType and each.__globals__.get("__name__") in modules:
            module = each.__globals__["__name__"]
            _functions.setdefault((module, each.__code__.co_firstlineno, each.__code__.co_name), []).append(each)
    gc.freeze()
    return tuple(problems)


def apply(swap: Swap) -> str:
    """Change this process; return what is wrong, in words, or an empty text."""
    if not _functions:
        return "the ranks of this test start in fresh interpreters, which have no mutants"
    if swap.marks:
        opened = os.open(swap.marks, os.O_RDWR)
        pages = memoryview(mmap.mmap(opened, 0))  # shared with every fork
        os.close(opened)
        for module, offset, size in swap.parts:
            if module in sys.modules:
                setattr(sys.modules[module], REACH, pages[offset : offset + size])
    for code in swap.codes:
        for function in _functions.get((code.module, code.line, code.name), ()):
            function.__code__ = marshal.loads(code.code)
    return ""
