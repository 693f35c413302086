"""Words for users: phrases of reports, lines that the harness prints, and tracebacks and stacks without its frames.
Standard library and own layer only.

Note [Hidden frames]
~~~~~~~~~~~~~~~~~~~~
Between the start of a rank and the body of its test lie frames of the harness, the same in every failure. ``_HIDDEN``
lists those of all layers, because the supervisor trims stacks and loads none of these layers. Only tracebacks leave out
whole files: a rank may hang in any function of these files, so stacks leave out only the functions that are named.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from torch_ext.world import _os

_Key = TypeVar("_Key")

# Reported for a rank whose processes outlive it.
LEFT_BEHIND = "left a process behind"

# Characters that a terminal interprets: control characters but tab and newline, and those that change the direction.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# The parts of a message that differ between ranks that failed in the same way.
_RANK_DEPENDENT = re.compile(
    r"0x[0-9a-f]+|(?<=rank )\d+|(?<=rank=)\d+|(?<=process )\d+|(?<=pid )\d+|(?<=:)\d{4,5}\b"
    r"|(?<= [a-z]{3}:)\d+|(?<= [a-z]{4}:)\d+",  # devices: each rank has another
    re.IGNORECASE,
)


def printable(text: str) -> str:
    r"""Return ``text`` with each control character but tab and newline escaped, so that a terminal can show it.

    >>> printable("\x1b[2Jgone\0\tstays\n")
    '\\x1b[2Jgone\\x00\tstays\n'
    """
    return _OBEYED.sub(lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\u0100" else ascii(found[0])[1:-1], text)


def left_behind(command: str) -> str:
    """Return the line for a rank that left the process ``command`` behind.

    >>> left_behind("sleep 600")
    'left a process behind, which was ended: sleep 600'
    """
    return f"{LEFT_BEHIND}, which was ended: {_os.short_command(command)}"


def own_message(trace: str) -> str:
    """Return the message of an error of this project, which needs no traceback; empty for any other error.

    >>> own_message("Traceback ...\\ntorch_ext.sim.build.BuildError: no compiler")
    'no compiler'
    >>> own_message("Traceback ...\\nValueError: no compiler")
    ''
    """
    kind, _, message = trace.rstrip().rpartition("\n")[2].partition(": ")
    return message if kind.startswith("torch_ext.") else ""


def ranks_phrase(ranks: Sequence[int]) -> str:
    """Return a phrase that names ``ranks``.

    >>> ranks_phrase([2])
    'rank 2'
    >>> ranks_phrase([0, 1, 2, 3, 6])
    'ranks 0-3, 6'
    """
    words = []
    for _, numbered in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        run = [str(rank) for _, rank in numbered]  # of consecutive ranks
        words.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(run))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}"


def ranks_by(pairs: Iterable[tuple[_Key, int]]) -> dict[_Key, list[int]]:
    """Return the ranks of each key, in the order of ``pairs``."""
    found: dict[_Key, list[int]] = {}
    for key, rank in pairs:
        found.setdefault(key, []).append(rank)
    return found


def without_ranks(text: str) -> str:
    """Return ``text`` without the parts that depend on the rank.

    >>> without_ranks("rank 3 has no memory left on sim:3") == without_ranks("rank 0 has no memory left on sim:0")
    True
    """
    return _RANK_DEPENDENT.sub("*", text)


# Marks these lines in the output of a process; the runner repeats them in its summary.
PREFIX = "torch_ext: "

_told: set[tuple[int, str]] = set()
_shown_by: list[Callable[[str], object]] = []


def announce(message: str) -> None:
    """Print ``message`` on stderr, once per process."""
    key = (_os.getpid(), message)
    if key not in _told:
        _told.add(key)
        print(f"{PREFIX}{printable(message)}", file=sys.stderr, flush=True)


def show_by(show: Callable[[str], object]) -> None:
    """Replace the printing of :func:`show` by ``show``."""
    _shown_by[:] = [show]


def show(text: str) -> None:
    """Show ``text``, of one or more lines, at once: on stderr, or by :func:`show_by`."""
    if _shown_by:
        _shown_by[0](text)
    else:
        print(f"{PREFIX}{printable(text)}", file=sys.stderr, flush=True)


def add_note(error: BaseException, note: str) -> None:
    """Add ``note`` to ``error``, once. Errors have no notes before Python 3.11.

    >>> error = ValueError("x")
    >>> for _ in range(2):
    ...     add_note(error, "in the subtest with a=1")
    >>> getattr(error, "__notes__", [])[1:]
    []
    """
    if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


# Files that are not the user's. Their frames show the operation, and the user's frame below them shows the place.
_TORCHS = (
    r"/(?:site|dist)-packages/torch/|/torch/_\w+\.py"
    r"|/torch/(?:distributed|testing|nn|autograd|utils|optim|futures|multiprocessing|_\w+)/"
)
_NOT_THE_USERS = re.compile(rf"/(?:site|dist)-packages/|{_TORCHS}|/testing/_internal/|(?<!/test)/torch_ext/faults/|^<")
_FOLDERS_BETWEEN = tuple(
    os.path.dirname(path) + os.sep for path in (os.path.dirname(os.path.abspath(__file__)), os.__file__)
)
# faulthandler's line above the stacks of a dying process.
FATAL = "Fatal Python error:"
# A line of a traceback (with a comma, the outermost first) or of faulthandler (the innermost first).
_WRITTEN = re.compile(r'^\s*File "(.*)", line (\d+)(,?) in (\S+)', re.MULTILINE)
# The handler calls the function of an RPC; the caller is where that function waits for another RPC.
_HANDLER, _CALLER = "/distributed/rpc/internal.py", "/distributed/rpc/api.py"
_THREAD = re.compile(r"^(?=(?:Current )?[Tt]hread .*\(most recent call first\):)", re.MULTILINE)
# Functions between a test and the collective that it calls.
_WRAPPERS = re.compile(r"wrapper|decorate_context|inner|__call__|_fn|<lambda>")

_FRAME = r'  File "[^"]*", line \d+ in .*\n'

# Maximal number of chained exceptions in a report, counted from the last.
_MAX_LINKS = 20


class HiddenFrames(NamedTuple):
    """Frames that reports leave out. See Note [Hidden frames]."""

    file: str  # regular expression that matches the end of the file's path
    functions: tuple[str, ...] = ()  # leave out their frames; empty: every frame of the file, in tracebacks only
    outwards: bool = False  # in stacks, also leave out the callers of the functions
    thread: bool = False  # in stacks, leave out every thread that runs one of the functions


_ROOMS = r"/testing/_internal/(?:hypothesis_utils|_distributed/\w+)\.py"
_RUNPY = r"(?:<frozen runpy>|/runpy\.py)"
_HIDDEN = (
    # The world, and what lies between its functions
    HiddenFrames(re.escape(os.path.dirname(os.path.abspath(__file__)) + os.sep) + "[^/]*"),
    HiddenFrames(r"/world/rank\.py", ("_listen",), thread=True),
    HiddenFrames(r"/world/rank\.py", ("_run_task",), outwards=True),
    HiddenFrames(r"/world/provider\.py", ("load_module",), outwards=True),
    HiddenFrames(r"/world/operations\.py", ("after_body", "wait_in_store")),
    HiddenFrames(r"/world/threads\.py", ("make_transport",)),
    HiddenFrames(r"/world/exits\.py", ("_write_stacks", "_exit", "kill_after_writing")),
    HiddenFrames(r"/compat/c10d\.py"),
    HiddenFrames(r"/torch/distributed/c10d_logger\.py"),
    HiddenFrames(r"/multiprocessing/process\.py"),
    HiddenFrames(r"/contextlib\.py"),
    HiddenFrames(r"/sim/(?:races/__init__|_patches|_collectives)\.py"),
    HiddenFrames(r"/asyncio/(?:runners|base_events)\.py", ("run", "run_until_complete")),
    HiddenFrames(r"<frozen importlib\._bootstrap(?:_external)?>", ("_call_with_frames_removed",)),
    # A test's body in unittest
    HiddenFrames(r"/unittest/(?:async_case|case|mock|suite)\.py"),
    HiddenFrames(r"/unittest/case\.py", ("run", "doCleanups", "_callTestMethod")),
    HiddenFrames(r"/compat/_unittest\.py"),
    HiddenFrames(r"/compat/_unittest\.py", ("call", "clean_up", "<lambda>", "run_test_method")),
    HiddenFrames(r"/testing/_internal/(?:common_distributed|common_utils)\.py"),
    HiddenFrames(_ROOMS),
    HiddenFrames(_ROOMS, ("wrapper", "run_test", "_run", "run_rank", "serve", "in_rank", "_receipt_of_body",
                          "_receipt_of_call", "run_method")),
    HiddenFrames(r"/testing/_internal/_fsdp/cases\.py", ("_run",)),
    # A test's body in pytest
    HiddenFrames(r"/(?:_pytest|pluggy)/\w+\.py"),
    HiddenFrames(r"/_pytest/(?:python|fixtures|unittest)\.py", ("pytest_pyfunc_call", "call_fixture_func", "runtest"),
                 outwards=True),
    HiddenFrames(r"/runner/pytest_plugin\.py"),
    # The parent half
    HiddenFrames(r"/runner/class_process\.py", ("main",), outwards=True),
    HiddenFrames(r"/runner/class_process\.py", ("call_and_check", "clean_up_and_check", "set_up_class")),
    HiddenFrames(r"/runner/interrupts\.py", ("_handle",)),
    # A program
    HiddenFrames(r"/torch_ext/program/(?:main_module|rank)\.py"),
    HiddenFrames(r"/torch_ext/program/main_module\.py", ("run_main", "_run_file"), outwards=True),
    HiddenFrames(_RUNPY),
    HiddenFrames(_RUNPY, ("_run_code",), outwards=True),
)  # fmt: skip


def read_error(error: BaseException) -> tuple[str, str]:
    """Return the message of ``error``, in one line, and its traceback without hidden frames.

    Keeps a traceback that has only hidden frames, unless it has a cause or a line that cannot be compiled.

    >>> read_error(SyntaxError("invalid syntax", ("/home/train.py", 1, 6, "def f(:", 1, 7)))[0]
    'SyntaxError: invalid syntax (train.py, line 1)'
    >>> read_error(ValueError("\\n-- Process 1 failed:\\nValueError: no data"))[0]
    'ValueError: -- Process 1 failed:'
    """
    shown = traceback.TracebackException.from_exception(error, capture_locals=False)
    cut = _links(error) - _MAX_LINKS
    _trim(shown, error, _MAX_LINKS)
    more = f"... {cut} more exceptions before these are left out ...\n\n" if cut > 0 else ""
    return _in_one_line(error, shown), more + "".join(shown.format())


def place_of(error: BaseException) -> str:
    """Return the user's line that raised ``error``, such as ``"test_a.py:31"``; empty if unknown."""
    stack = traceback.extract_tb(error.__traceback__)
    found = _place([(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(stack)])
    if found is None and error.__cause__ is not None and _links(error) <= _MAX_LINKS:
        return place_of(error.__cause__)
    return found[1] if found else ""


def place_here() -> str:
    """Return the user's line that this thread runs, such as ``"test_a.py:31"``; empty if there is none."""
    stack = traceback.walk_stack(sys._getframe(1))
    return place_of_frames([(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack])


def place_of_frames(frames: Sequence[tuple[str, int, str]]) -> str:
    """Return the user's line in a stack, innermost first, of files, lines and functions; empty if there is none."""
    found = _place(frames)
    return found[1] if found else ""


def place_in(stacks: str) -> str:
    """Describe the place of a rank's test, by the stack of its current thread, else of its main thread.

    >>> place_in('  File "/home/u/test_a.py", line 31 in test_b')
    'at test_a.py:31'
    >>> place_in('''  File "/lib/torch/distributed/distributed_c10d.py", line 9 in all_reduce
    ...   File "/lib/torch/distributed/c10d_logger.py", line 8 in wrapper
    ...   File "/home/u/test_a.py", line 31 in test_b''')
    'in all_reduce, called at test_a.py:31'
    >>> place_in("")
    ''
    """
    threads = [_THREAD.split(stacks)[0], *reversed(_THREAD.split(stacks)[1:])]
    threads.sort(key=lambda text: not text.startswith("Current"))
    return next((place for text in threads if (place := _format_stack(text))), "")


def place_of_death(output: str) -> str:
    """Describe the place where a process died, by what faulthandler wrote to its ``output``; empty if unknown."""
    if FATAL not in output:
        return ""
    stacks = output.rpartition(FATAL)[2]
    if any(re.search(_pattern(each, "Current "), stacks, re.MULTILINE) for each in _HIDDEN if each.thread):
        return "in a thread of torch_ext, which is a fault of torch_ext"
    return place_in(stacks)


def place_in_rpc(stacks: str) -> str:
    """Describe the place of a function that a peer has called by RPC and that does not wait for another RPC; empty if
    there is none.

    >>> place_in_rpc('''  File "/home/u/test_a.py", line 31 in never
    ...   File "/lib/torch/distributed/rpc/internal.py", line 209 in _run_function''')
    'at test_a.py:31'
    """
    for text in _THREAD.split(stacks):
        if _HANDLER in text and _CALLER not in text and (place := _format_stack(text)):
            return place
    return ""


def _format_stack(text: str) -> str:
    """Describe the user's place in the stack of one thread; empty if there is none."""
    read = [(found[1], int(found[2]), found[4], bool(found[3])) for found in _WRITTEN.finditer(text)]
    innermost_first = read[::-1] if read and read[0][3] else read
    found = _place([frame[:3] for frame in innermost_first])
    if not found:
        return ""
    inside, line = found
    return f"in {inside}, called at {line}" if inside else f"at {line}"


def is_torchs(file: str) -> bool:
    """Whether ``file`` is a Python file of torch; the user's may lie in a folder of that name."""
    return re.search(_TORCHS, file) is not None


def is_users(file: str) -> bool:
    """Whether ``file`` is the user's: not of torch, Python's library, an installed package or torch_ext."""
    return not file.startswith(_FOLDERS_BETWEEN) and not _NOT_THE_USERS.search(file)


def _place(frames: Sequence[tuple[str, int, str]]) -> tuple[str, str] | None:
    """Return torch's function that the user's innermost frame calls, if any, and the line of that frame."""
    inside = ""
    for file, line, name in frames:
        if is_users(file):
            return inside, f"{os.path.basename(file)}:{line}"
        if is_torchs(file) and not _WRAPPERS.fullmatch(name):
            inside = "" if name.startswith("_") else name
    return None


def _in_one_line(error: BaseException, shown: traceback.TracebackException) -> str:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:  # the text begins with lines of source
        place = f"{os.path.basename(str(error.filename))}, line {error.lineno}"
        return f"{type(error).__name__}: {error.msg} ({place})"
    lines = [line.strip() for line in "".join(shown.format_exception_only()).splitlines()]
    first, *more = [line for line in lines if line] or [""]
    return f"{first} {more[0]}" if first.endswith(":") and more else first or type(error).__name__


def _links(error: BaseException) -> int:
    seen: set[int] = set()
    linked: BaseException | None = error
    while linked is not None and id(linked) not in seen:
        seen.add(id(linked))
        linked = linked.__cause__ or (None if linked.__suppress_context__ else linked.__context__)
    return len(seen) - 1


def _trim(shown: traceback.TracebackException, error: BaseException | None, links: int) -> None:
    """Remove hidden frames from ``shown``, and exceptions more than ``links`` causes back."""
    kept = [
        frame
        for frame in shown.stack
        if not any(
            (not each.functions or frame.name in each.functions) and re.search(f"(?:{each.file})$", frame.filename)
            for each in _HIDDEN
        )
    ]
    if kept or shown.__cause__ is not None or getattr(shown, "lineno", None) is not None:
        shown.stack[:] = kept
    elif type(error).__module__.startswith("torch_ext."):
        shown.stack = None  # type: ignore[assignment]  # no heading above nothing: the message says where
    if links == 0:
        shown.__cause__ = shown.__context__ = None
    elif shown.__cause__ is not None:
        _trim(shown.__cause__, error and error.__cause__, links - 1)
    elif shown.__context__ is not None:
        _trim(shown.__context__, error and error.__context__, links - 1)


def trim_stacks(text: str) -> str:
    """Return faulthandler's output without hidden frames and the list of extension modules, but a thread that died."""
    # Whole threads first: they contain frames that the other patterns would match.
    in_order = sorted((each for each in _HIDDEN if each.functions), key=lambda each: (not each.thread, each.outwards))
    current = "" if FATAL in text else "(?:Current )?"
    patterns = (*(_pattern(each, current) for each in in_order), r"^Extension modules: .*\n?")
    return re.sub("|".join(patterns), "", text, flags=re.MULTILINE)


def _pattern(each: HiddenFrames, current: str) -> str:
    frame = rf'  File "[^"]*{each.file}", line \d+ in (?:{"|".join(map(re.escape, each.functions))})\n'
    if each.thread:
        return rf"^{current}[Tt]hread .*\n(?:{_FRAME})*?{frame}(?:{_FRAME})*\n?"
    return f"^{frame}(?:{_FRAME})*" if each.outwards else f"^{frame}"
