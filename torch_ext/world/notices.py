"""What the harness itself says to the user, once per process. Standard library only."""

from __future__ import annotations

import sys

from torch_ext.world import _os
from torch_ext.world.phrases import printable

__all__ = ["PREFIX", "announce", "show"]

# Marks these lines among the output of a process, so that the runner can repeat them in its summary.
PREFIX = "torch_ext: "

_told: set[tuple[int, str]] = set()


def announce(message: str) -> None:
    """Print ``message`` on stderr, unless this process has done so before."""
    key = (_os.getpid(), message)
    if key not in _told:
        _told.add(key)
        print(f"{PREFIX}{printable(message)}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print ``text``, of one or more lines, on stderr."""
    print(f"{PREFIX}{printable(text)}", file=sys.stderr, flush=True)
