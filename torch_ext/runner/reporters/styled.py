"""Lines of text for a stream: plain for files and pipes, in color for a terminal."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from torch_ext.runner.results import OutputError
from torch_ext.world.phrases import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["StyledWriter", "is_live"]


def is_live(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


class StyledWriter:
    """Writes lines to ``stream``.

    Rich serves for the colors of a terminal only. A pipe gets the text and nothing else, and does not pay for the
    import (0.1 s). The message of a failed test never passes through rich, which would expand tabs. Control characters
    are spelt out, wherever they come from, so that no test commands the terminal.

    Attributes:
        lines: how many lines have been written.
        guard: makes what is entered around each write, such as what takes a live view aside.
        wrote_s: when a line was written last, by ``time.monotonic``.

    Every method raises :class:`OutputError` where the stream takes no more, and ``BrokenPipeError`` where its reader
    has left.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.guard: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self.wrote_s = time.monotonic()
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
        with _told(), self._guarded():
            self._console.print(Text.assemble(*styled), soft_wrap=True)

    def verbatim(self, text: str) -> None:
        """Write ``text`` as it is, and end its last line. What the stream cannot encode is escaped."""
        text = self._encodable(text)
        self.lines += text.rstrip("\n").count("\n") + 1
        with _told(), self._guarded():
            self._stream.write(text if text.endswith("\n") else f"{text}\n")
            self._stream.flush()

    def styled(self, text: Text) -> str:
        """Return ``text`` as the terminal is to get it; without its styles where there is none, or none is wanted."""
        if self._console is None:
            return text.plain
        with self._console.capture() as captured:
            self._console.print(text, soft_wrap=True, end="")
        return captured.get()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        self.wrote_s = time.monotonic()
        with self.guard():
            yield

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
