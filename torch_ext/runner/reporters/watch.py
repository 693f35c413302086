"""What a run does between two lines of its report: a live view on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch_ext.results import Began, Event, Over, RoundBegan, RunEnded, TestName, TestResult, Tick
from torch_ext.runner.reporters.base import COLUMNS, Tally, counts
from torch_ext.runner.reporters.text import StyledWriter
from torch_ext.world.wording import LEFT_BEHIND, printable

__all__ = ["LiveWatch", "PlainWatch", "Running", "spell_s"]

# A test is slow that has run for this long, and for several times as long as when it last passed.
_SLOW_S, _SLOW_FACTOR = 30.0, 3.0


@dataclass
class _Class:
    """A class that runs."""

    ranks: int  # the most that one of its tests starts
    since_s: float  # since when
    test: TestName | None = None  # the one that runs; None between two


class Running:
    """Knows what is under way.

    Args:
        tally: the results so far.
        recorded_s: how long a test took when it last passed, in seconds; None if that is not known.
        now_s: the time.
    """

    def __init__(self, tally: Tally, recorded_s: Callable[[TestName], float | None], now_s: float) -> None:
        self._tally = tally
        self._recorded_s = recorded_s
        self._classes: dict[tuple[str, str], _Class] = {}
        self._ranks = {batch.key: batch.need.ranks for batch in tally.plan}
        self._began_s = now_s

    def take(self, event: Event, now_s: float) -> None:
        """Take one event, which the tally has counted."""
        if isinstance(event, Began):
            key = (event.test.file, event.test.cls)
            found = self._classes.setdefault(key, _Class(self._ranks.get(key, 1), now_s))
            if event.test.method:
                found.test, found.since_s = event.test, now_s
        elif isinstance(event, TestResult):
            running = self._classes.get((event.test.file, event.test.cls))
            if running is not None and running.test == event.test:
                running.test, running.since_s = None, now_s
        elif isinstance(event, Over):
            self._classes.pop((event.test.file, event.test.cls), None)
        elif isinstance(event, RoundBegan):
            self._began_s = now_s

    def summary(self, now_s: float) -> str:
        """Return how far the run has come, in one line, and how long the rest takes at the pace of this run.

        Counts in the order passed, failed, skipped, flaky; those that are 0 are left out.
        """
        planned, waiting = self._tally.plan.tests, self._tally.waiting
        done = len(planned) - len(waiting)
        found, parts = counts(self._tally.results), [f"[{done}/{len(planned)}]"]
        parts += [f"{found[one]} {one.value}" for one in COLUMNS if found[one]]
        parts.append(spell_s(now_s - self._began_s))
        waiting_s = sum(map(self._expected_s, waiting))
        done_s = sum(map(self._expected_s, planned)) - waiting_s
        if done and waiting:
            parts.append(f"about {spell_s(waiting_s * (now_s - self._began_s) / done_s)} left")
        return "  ".join(parts)

    def _expected_s(self, test: TestName) -> float:
        return self._recorded_s(test) or 1.0

    def under_way(self, now_s: float) -> list[str]:
        """Return a line for each class that runs, the one whose test has run for longest first."""
        found = sorted(self._classes.items(), key=lambda item: item[1].since_s)
        return [self._line(key, each, now_s) for key, each in found]

    def _line(self, key: tuple[str, str], running: _Class, now_s: float) -> str:
        ranks = f"{running.ranks} rank{'s' * (running.ranks != 1)}"
        where = running.test.id if running.test is not None else f"{'::'.join(key)} (between tests)"
        slow = self._is_slow(running, now_s)
        return f"{where}  {ranks}  {spell_s(now_s - running.since_s)}{'  slow' * slow}"

    def _is_slow(self, running: _Class, now_s: float) -> bool:
        if running.test is None:
            return False
        usual_s = self._recorded_s(running.test) or 0.0
        return now_s - running.since_s >= max(_SLOW_S, _SLOW_FACTOR * usual_s)


def spell_s(seconds: float) -> str:
    """Return a duration in few characters.

    >>> spell_s(7.26), spell_s(75), spell_s(3725)
    ('7 s', '1:15', '1:02:05')
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# Seconds without a line after which a pipe gets one, so that the run does not look dead; and with --quiet.
_SILENCE_S, _QUIET_S = 20.0, 60.0
# How often a terminal is redrawn at most, in seconds.
_REDRAW_S = 0.2


class PlainWatch:
    """Adds lines to a report that goes to a file or a pipe.

    Reports each test that has left a process behind, and how far the run has come if nothing has been printed for a
    while.

    Args:
        running: knows what is under way.
        out: where to print.
        often: tell how far the run has come three times a minute, not once.
    """

    def __init__(self, running: Running, out: StyledWriter, *, often: bool = True) -> None:
        self._running = running
        self._out = out
        self._silence_s = _SILENCE_S if often else _QUIET_S

    def __call__(self, event: Event) -> None:
        now_s = time.monotonic()
        self._running.take(event, now_s)
        if isinstance(event, Tick):
            self._tick(now_s)
        elif isinstance(event, TestResult):
            for told in event.warnings:
                if LEFT_BEHIND in told:
                    self._out.line((f"leak: {event.test.id}: {told}", "yellow"))

    def _tick(self, now_s: float) -> None:
        if now_s - self._out.wrote_s > self._silence_s:
            self._out.line(self._running.summary(now_s))
            for line in self._running.under_way(now_s):
                self._out.line(f"  running: {line}")


class LiveWatch(PlainWatch):
    """Keeps a few lines at the bottom of a terminal: how far the run has come, and each class that runs.

    They are taken away before anything else is written, and drawn again behind it, so that they never overwrite a
    report. A line is cut to the width of the terminal; what does not fit its height is left out.
    """

    def __init__(self, running: Running, out: StyledWriter) -> None:
        super().__init__(running, out)
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
        from rich.text import Text

        width, height = shutil.get_terminal_size()
        under_way = self._running.under_way(now_s)
        room = max(0, height - 3)
        if len(under_way) > room:
            under_way = [*under_way[: room - 1], f"and {len(under_way) - room + 1} more"] if room else []
        lines = [Text(printable(self._running.summary(now_s)), "bold")]
        lines += [Text(printable(f"  {line}"), "yellow" if line.endswith("  slow") else "dim") for line in under_way]
        for line in lines:
            line.truncate(max(1, width - 1), overflow="ellipsis")
        self._out.show("".join(f"{self._out.styled(line)}\n" for line in lines))
        self._drawn = len(lines)
        self._next_s = now_s + _REDRAW_S
