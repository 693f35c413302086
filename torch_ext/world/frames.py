"""Reads the frames of threads that run meanwhile.

Note [Frames that run]
~~~~~~~~~~~~~~~~~~~~~~
``sys._current_frames()``, ``f_back`` and ``f_locals`` follow pointers into another thread's stack and allocate objects
between. Before Python 3.12 an allocation may collect garbage, a destructor may release the GIL, the thread may leave
the frame, and the process dies of a dangling pointer, or hangs (python/cpython#106883). So each runs as one step of C
code, without collections: :func:`_at_once`.

Before Python 3.13 ``f_locals`` copies a function's variables to a dictionary that the frame keeps. The copies would
keep objects alive that the program drops, and the next copy would destroy them amid the frame's variables.
:func:`variables` empties a dictionary that the frame alone has, and makes none where the function could see it.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

# Names by which a function reads the dictionary of its variables.
_READERS = frozenset({"locals", "vars", "dir", "eval", "exec", "f_locals"})

# Bound now, because a test may replace them.
_disable, _enable, _is_enabled = gc.disable, gc.enable, gc.isenabled
_current_frames = sys._current_frames

_call = operator.methodcaller("__call__")
_is_frame = functools.partial(operator.is_not, None)


def _at_once(step: Callable[[], T]) -> T:
    """Return ``step()``, C code alone, during which no garbage is collected and no other thread runs."""
    if not _is_enabled():
        return step()
    try:
        # A single expression in C: the interpreter switches threads between its own instructions only.
        _, found, _ = map(_call, (_disable, step, _enable))
    except BaseException:
        _enable()
        raise
    return found


def frames_of_threads() -> dict[int, FrameType]:
    """Return the innermost frames of all other threads, by ``threading.get_ident()``."""
    frames = _at_once(_current_frames)
    # The caller's frame would refer to itself and live until the next garbage collection, with all frames here and the
    # objects in their variables.
    frames.pop(threading.get_ident(), None)
    return frames


def stack_of(frame: FrameType) -> list[FrameType]:
    """Return ``frame`` and its callers, the innermost first."""
    chain: Any = itertools.accumulate(itertools.repeat("f_back"), getattr, initial=frame)
    return _at_once(functools.partial(list, itertools.takewhile(_is_frame, chain)))


def variables(frame: FrameType, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the variables ``names`` that ``frame`` has; none of a function that may read its ``locals()``.

    The thread of ``frame`` must not be in a function of ``sys.settrace`` for it: that writes the variables back.
    """
    code = frame.f_code
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    if is_function:
        known = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        if known.isdisjoint(names) or not _READERS.isdisjoint(code.co_names):
            return {}
    found = _at_once(functools.partial(getattr, frame, "f_locals"))
    values = {name: found[name] for name in names if name in found}
    # References: the frame's, this function's and the argument's.
    if is_function and isinstance(found, dict) and sys.getrefcount(found) == 3:
        found.clear()
    return values
