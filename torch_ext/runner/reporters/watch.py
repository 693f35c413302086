"""Tells what a run does between two lines of its report: a live view on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TextIO

from torch_ext.runner.reporters.running import Running
from torch_ext.runner.reporters.styled import StyledWriter
from torch_ext.runner.results import Began, Over, Status, TestResult
from torch_ext.world.phrases import LEFT_BEHIND, printable

__all__ = ["LiveWatch", "PlainWatch"]

# After how many seconds without a line a pipe gets one, so that nobody takes the run for dead; and if it is quiet.
_SILENCE_S, _QUIET_S = 20.0, 60.0
# How often a terminal is redrawn at most, in seconds.
_REDRAW_S = 0.2


class PlainWatch:
    """Adds lines to a report that goes to a file or a pipe.

    Tells of each test that has become slow or has left a process behind, of failures whose report waits for its turn,
    and how far the run has come if nothing has been printed for a while.

    Args:
        running: knows what is under way.
        out: where to print.
        often: tell how far the run has come three times a minute, not once.
    """

    def __init__(self, running: Running, out: StyledWriter, *, often: bool = True) -> None:
        self._running = running
        self._out = out
        self._silence_s = _SILENCE_S if often else _QUIET_S

    # What a reporter does; see ``base``.

    def begin(self, began: Began) -> None:
        self._running.begin(began, time.monotonic())

    def add(self, result: TestResult) -> None:
        self._running.add(result, time.monotonic())
        for told in result.warnings:
            if LEFT_BEHIND in told:
                self._out.line((f"leak: {result.test.id}: {told}", "yellow"))

    def wait(self, result: TestResult) -> None:
        """Tell of a failure of which the report will tell more in its turn."""
        self._out.line((f"failed: {result.test.id} (more in its turn)", "red"))

    def over(self, over: Over) -> None:
        self._running.over(over)

    def tick(self) -> None:
        """Called a few times a second while tests run."""
        now_s = time.monotonic()
        for told in self._running.newly_slow(now_s):
            self._out.line((told, "yellow"))
        if now_s - self._out.wrote_s > self._silence_s:
            self._out.line(self._running.summary(now_s))
            for line in self._running.under_way(now_s):
                self._out.line(f"  running: {line}")

    def new_round(self, number: int) -> None:
        """Begin to count anew."""
        self._running.new_round(time.monotonic())

    def finish(self, *, interrupted: bool = False) -> None:
        """Nothing is left to tell."""


class LiveWatch(PlainWatch):
    """Keeps a few lines at the bottom of a terminal: how far the run has come, and each class that runs.

    They are taken away before anything else is written, and drawn again behind it, so that they never overwrite a
    report. A line is cut to the width of the terminal; what does not fit its height is left out.
    """

    def __init__(self, running: Running, out: StyledWriter, stream: TextIO) -> None:
        super().__init__(running, out)
        self._stream = stream
        self._drawn = 0
        self._next_s = 0.0
        out.guard = self._aside

    def tick(self) -> None:
        now_s = time.monotonic()
        for told in self._running.newly_slow(now_s):
            self._out.line((told, "yellow"))
        if now_s >= self._next_s:
            self._erase()
            self._draw(now_s)

    def finish(self, *, interrupted: bool = False) -> None:
        self._erase()
        self._out.guard = contextlib.nullcontext

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        shown = self._drawn > 0
        self._erase()
        yield
        if shown:
            self._draw(time.monotonic())

    def _erase(self) -> None:
        if self._drawn:
            self._write(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0

    def _draw(self, now_s: float) -> None:
        from rich.text import Text

        width, height = _size(self._stream)
        under_way = self._running.under_way(now_s)
        room = max(0, height - 3)
        if len(under_way) > room:
            under_way = [*under_way[: room - 1], f"and {len(under_way) - room + 1} more"] if room else []
        lines = [Text(printable(self._running.summary(now_s)), "bold")]
        if self._running.counts[Status.FAILED]:
            lines[0].stylize("red")
        lines += [Text(printable(f"  {line}"), "yellow" if line.endswith("  slow") else "dim") for line in under_way]
        for line in lines:
            line.truncate(max(1, width - 1), overflow="ellipsis")
        self._write("".join(f"{self._out.styled(line)}\n" for line in lines))
        self._drawn = len(lines)
        self._next_s = now_s + _REDRAW_S

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the report itself finds out, and says so
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()


def _size(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines of a terminal. One that does not know, and says 0, counts as 80 by 24."""
    try:
        width, height = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        width, height = 0, 0
    return width or 80, height or 24
