"""Words for users: phrases of reports, and the lines that the harness itself prints. Standard library and own layer
only."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence

from torch_ext.world import _os

__all__ = [
    "LEFT_BEHIND",
    "PREFIX",
    "add_note",
    "announce",
    "left_behind",
    "own_message",
    "printable",
    "ranks_phrase",
    "short_command",
    "show",
    "show_by",
    "without_ranks",
]

# What is said of a rank whose processes outlive it.
LEFT_BEHIND = "left a process behind"

# What a terminal obeys instead of showing it: control characters but tab and newline, and those that turn the
# direction of writing round.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_COMMAND_CHARACTERS = 100
# What differs between what ranks say that failed in the same way.
_RANK_DEPENDENT = re.compile(
    r"0x[0-9a-f]+|(?<=rank )\d+|(?<=rank=)\d+|(?<=process )\d+|(?<=pid )\d+|(?<=:)\d{4,5}\b"
    r"|(?<= [a-z]{3}:)\d+|(?<= [a-z]{4}:)\d+",  # devices, as each rank has its own
    re.IGNORECASE,
)


def printable(text: str) -> str:
    r"""Return ``text`` with each control character but tab and newline spelt out, so that it can go to a terminal.

    >>> printable("\x1b[2Jgone\0\tstays\n")
    '\\x1b[2Jgone\\x00\tstays\n'
    """
    return _OBEYED.sub(_spelt, text)


def _spelt(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def short_command(command: str) -> str:
    """Return the first 100 characters of a command line, which may be a program of several, as one line.

    >>> short_command("sleep " + "6" * 200) == "sleep " + "6" * 94 + "..."
    True
    >>> short_command("python -c while True:\\n    pass")
    'python -c while True: pass'
    """
    command = " ".join(command.split())
    return command if len(command) <= _COMMAND_CHARACTERS else f"{command[:_COMMAND_CHARACTERS]}..."


def left_behind(command: str) -> str:
    """Return what is said of a rank that left the process ``command`` behind.

    >>> left_behind("sleep 600")
    'left a process behind, which was ended: sleep 600'
    """
    return f"{LEFT_BEHIND}, which was ended: {short_command(command)}"


def own_message(trace: str) -> str:
    """Return the message of an error of this project, which needs no traceback; an empty string for any other error.

    >>> own_message("Traceback ...\\ntorch_ext.sim.build.BuildError: no compiler")
    'no compiler'
    >>> own_message("Traceback ...\\nValueError: no compiler")
    ''
    """
    kind, _, message = trace.rstrip().rpartition("\n")[2].partition(": ")
    return message if kind.startswith("torch_ext.") else ""


def ranks_phrase(ranks: Sequence[int]) -> str:
    """Name some ranks in words.

    >>> ranks_phrase([2])
    'rank 2'
    >>> ranks_phrase([0, 1, 2, 3, 6])
    'ranks 0-3, 6'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "ranks " + ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" if len(run) > 2 else f"{run[0]}, {run[1]}"
        for run in runs
    )


def without_ranks(text: str) -> str:
    """Return ``text`` without what differs between ranks that say the same.

    >>> without_ranks("rank 3 has no memory left on sim:3") == without_ranks("rank 0 has no memory left on sim:0")
    True
    """
    return _RANK_DEPENDENT.sub("*", text)


# Marks these lines among the output of a process, so that the runner can repeat them in its summary.
PREFIX = "torch_ext: "

_told: set[tuple[int, str]] = set()
_shown_by: list[Callable[[str], object]] = []


def announce(message: str) -> None:
    """Print ``message`` on stderr, unless this process has done so before."""
    key = (_os.getpid(), message)
    if key not in _told:
        _told.add(key)
        print(f"{PREFIX}{printable(message)}", file=sys.stderr, flush=True)


def show_by(show: Callable[[str], object]) -> None:
    """Have :func:`show` call ``show`` from now on, in place of printing."""
    _shown_by[:] = [show]


def show(text: str) -> None:
    """Tell the user ``text``, of one or more lines, at once: on stderr, or as :func:`show_by` has it."""
    if _shown_by:
        _shown_by[0](text)
        return
    print(f"{PREFIX}{printable(text)}", file=sys.stderr, flush=True)


def add_note(error: BaseException, note: str) -> None:
    """Add ``note`` to ``error``, if it is not there yet. Before Python 3.11 errors have no notes: nothing happens.

    >>> error = ValueError("x")
    >>> for _ in range(2):
    ...     add_note(error, "in the subtest with a=1")
    >>> getattr(error, "__notes__", [])[1:]
    []
    """
    if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
