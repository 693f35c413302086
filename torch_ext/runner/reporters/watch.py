"""Shows the progress of a run between lines of its report: a live view on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import time
import unicodedata
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch_ext.results import Event, RunEnded, TestName, Tick
from torch_ext.runner.reporters.tally import COLUMNS, Tally, counts
from torch_ext.runner.reporters.text import Writer
from torch_ext.world.wording import printable

# Seconds without a line after which to write one to a pipe, so that the run does not look dead; the same with --quiet.
_SILENCE_S, _QUIET_S = 20.0, 60.0
# Minimal interval between two redraws of a terminal, in seconds.
_REDRAW_S = 0.2


class PlainWatch:
    """Adds a progress line to a report in a file or a pipe after a while without output, three times a minute if
    ``often``, else once. ``expected_s``: the expected duration of a test; None if unknown.
    """

    def __init__(
        self, tally: Tally, expected_s: Callable[[TestName], float | None], out: Writer, *, often: bool = True
    ) -> None:
        self._tally = tally
        self._expected_s = expected_s
        self._out = out
        self._silence_s = _SILENCE_S if often else _QUIET_S

    def __call__(self, event: Event) -> None:
        if isinstance(event, Tick):
            self._tick(time.monotonic())

    def _tick(self, now_s: float) -> None:
        if now_s - self._out.wrote_s > self._silence_s:
            self._out.line(self.summary(now_s))
            for line in self.under_way(now_s):
                self._out.line(f"  running: {line}")

    def summary(self, now_s: float) -> str:
        """Return the progress of the run in one line, with an estimate of the remaining time at the present pace."""
        planned, waiting = self._tally.plan.tests, self._tally.waiting
        done, took_s = len(planned) - len(waiting), now_s - self._tally.began_s
        found, parts = counts(self._tally.results), [f"[{done}/{len(planned)}]"]
        parts += [f"{found[one]} {one.value}" for one in COLUMNS if found[one]]
        parts.append(_format_duration(took_s))
        waiting_s, planned_s = (sum(self._expected_s(test) or 1.0 for test in tests) for tests in (waiting, planned))
        if done and waiting:
            parts.append(f"about {_format_duration(waiting_s * took_s / (planned_s - waiting_s))} left")
        return "  ".join(parts)

    def under_way(self, now_s: float) -> list[str]:
        """Return a line for each running class, the longest-running test first."""
        lines = []
        for name, since_s in sorted(self._tally.running.values(), key=lambda one: one[1]):
            batch = self._tally.batch_of(name)
            ranks = batch.need.ranks if batch is not None else 1
            where = name.id + ("" if name.method else " (between tests)")
            lines.append(f"{where}  {ranks} rank{'s' * (ranks != 1)}  {_format_duration(now_s - since_s)}")
        return lines


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else str(timedelta(seconds=int(seconds)))


class LiveWatch(PlainWatch):
    """Keeps a few lines at the bottom of a terminal, below other output: the progress of the run, and each running
    class.
    """

    def __init__(self, tally: Tally, expected_s: Callable[[TestName], float | None], out: Writer) -> None:
        super().__init__(tally, expected_s, out)
        self._drawn = 0
        self._next_s = 0.0
        out.guard = self._aside

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, RunEnded):
            self._erase()
            self._out.guard = contextlib.nullcontext

    def _tick(self, now_s: float) -> None:
        if now_s >= self._next_s:
            self._erase()
            self._draw(now_s)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        shown = self._drawn > 0
        self._erase()
        yield
        if shown:
            self._draw(time.monotonic())

    def _erase(self) -> None:
        if self._drawn:
            self._out.show(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0

    def _draw(self, now_s: float) -> None:
        width, height = shutil.get_terminal_size()
        under_way = self.under_way(now_s)
        room = max(0, height - 3)
        if len(under_way) > room:
            under_way = [*under_way[: room - 1], f"and {len(under_way) - room + 1} more"] if room else []
        lines = [(self.summary(now_s), "bold"), *((f"  {line}", "dim") for line in under_way)]
        cut = ((_cut(printable(text), width - 1), style) for text, style in lines)
        self._out.show("".join(f"{self._out.styled(text, style)}\n" for text, style in cut))
        self._drawn = len(lines)
        self._next_s = now_s + _REDRAW_S


def _cut(text: str, width: int) -> str:
    """Return as much of ``text`` as fits ``width`` columns.

    >>> _cut("test_long", 6), _cut("test", 6), _cut("\u6d4b\u8bd5\u6d4b", 5)
    ('test_\u2026', 'test', '\u6d4b\u8bd5\u2026')
    """
    widths = [1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text]
    if sum(widths) <= width:
        return text
    while text and sum(widths[: len(text)]) > width - 1:
        text = text[:-1]
    return f"{text}\u2026"
