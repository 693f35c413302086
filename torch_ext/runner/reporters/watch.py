"""Shows the progress of a run between lines of its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch_ext.results import Event, TestName, Tick
from torch_ext.runner.reporters.tally import COLUMNS, Tally, counts
from torch_ext.runner.reporters.text import Writer

# Seconds without a line after which to write one, so that the run does not look dead; the same with --quiet.
_SILENCE_S, _QUIET_S = 20.0, 60.0


class ProgressLines:
    """Adds a progress line to a report after a while without output, three times a minute if ``often``, else once.
    ``expected_s``: the expected duration of a test; None if unknown.
    """

    def __init__(
        self, tally: Tally, expected_s: Callable[[TestName], float | None], out: Writer, *, often: bool = True
    ) -> None:
        self._tally = tally
        self._expected_s = expected_s
        self._out = out
        self._silence_s = _SILENCE_S if often else _QUIET_S

    def __call__(self, event: Event) -> None:
        now_s = time.monotonic()
        if isinstance(event, Tick) and now_s - self._out.wrote_s > self._silence_s:
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
            ranks = batch.need.processes if batch is not None else 1
            where = name.id + ("" if name.method else " (between tests)")
            lines.append(f"{where}  {ranks} rank{'s' * (ranks != 1)}  {_format_duration(now_s - since_s)}")
        return lines


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else str(timedelta(seconds=int(seconds)))
