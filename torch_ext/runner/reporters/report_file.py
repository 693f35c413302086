"""A file that a report is written to, and what is said if it cannot be."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from torch_ext.runner.results import OutputError, SetupError

__all__ = ["ReportFile"]


class ReportFile:
    """Opens ``path`` at once, so that a run does not end with a report that cannot be written, nor leave an older one.

    Args:
        path: the file, whose folder is made if need be; ``-``: stdout.
        what: what is written, in words.

    Raises:
        SetupError: it cannot be opened.
    """

    def __init__(self, path: str, what: str) -> None:
        self._path, self._what = path, what
        self._stream: TextIO | None = None
        if path == "-":
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed with the report
        except OSError as error:
            raise SetupError(f"{what} cannot be written to {path}: {os.strerror(error.errno or 0)}") from error

    def write(self, text: str) -> None:
        """Write ``text``, and have the system know it at once.

        Raises:
            OutputError: the file takes no more.
            BrokenPipeError: stdout's reader has left.
        """
        with self._told():
            stream = sys.stdout if self._stream is None else self._stream
            stream.write(text)
            stream.flush()

    def close(self) -> None:
        """Close the file. Raises as :meth:`write`."""
        if self._stream is not None:
            with self._told():
                self._stream.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._stream is None and isinstance(error, BrokenPipeError):
                raise
            reason = os.strerror(error.errno or 0)
            place = "stdout" if self._stream is None else self._path
            raise OutputError(f"{self._what} cannot be written to {place}: {reason}") from error
