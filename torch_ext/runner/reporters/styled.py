"""Lines of text for a stream: plain for files and pipes, in color for a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from torch_ext.runner.results import OutputError
from torch_ext.world.phrases import printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["StyledWriter"]


class StyledWriter:
    """Writes lines to ``stream``.

    Rich serves for the colors of a terminal only. A pipe gets the text and nothing else, and does not pay for the
    import (0.1 s). The message of a failed test never passes through rich, which would expand tabs. Control characters
    are spelt out, wherever they come from, so that no test commands the terminal.

    Attributes:
        lines: how many lines have been written.

    Every method raises :class:`OutputError` where the stream takes no more, and ``BrokenPipeError`` where its reader
    has left.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console: Console | None = None
        self.lines = 0
        if stream.isatty():
            from rich.console import Console

            self._console = Console(file=stream)

    def line(self, *parts: str | tuple[str, str]) -> None:
        """Write one line. A part is a text, or a text and the rich style in which a terminal shows it."""
        styled = [(self._encodable(text), style) for text, style in map(_styled, parts)]
        if self._console is None:
            self.verbatim("".join(text for text, _ in styled))
            return
        from rich.text import Text

        # Unlike a string, Text is never read as markup: "[rank 0]" stays. The terminal wraps long lines itself, since a
        # test's name that was cut or broken cannot be copied.
        self.lines += 1
        with _told():
            self._console.print(Text.assemble(*styled), soft_wrap=True)

    def verbatim(self, text: str) -> None:
        """Write ``text`` as it is, and end its last line. What the stream cannot encode is escaped."""
        text = self._encodable(text)
        self.lines += text.rstrip("\n").count("\n") + 1
        with _told():
            self._stream.write(text if text.endswith("\n") else f"{text}\n")
            self._stream.flush()

    def _encodable(self, text: str) -> str:
        encoding = self._stream.encoding or "utf-8"
        return printable(text).encode(encoding, "backslashreplace").decode(encoding)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the report cannot be written: {error}") from error


def _styled(part: str | tuple[str, str]) -> tuple[str, str]:
    return (part, "") if isinstance(part, str) else part
