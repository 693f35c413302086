"""Notes on errors (:pep:`678`), which reports show below the error's message. Standard library only."""

from __future__ import annotations

__all__ = ["add_note"]


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
