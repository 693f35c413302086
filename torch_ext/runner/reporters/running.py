"""What runs at the moment, and how far the run has come. No clock and no terminal: it is told the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch_ext.runner.results import Began, Over, Status, TestName, TestResult
from torch_ext.runner.schedule import Plan

__all__ = ["Running", "spell_s"]

# A test is slow that has run for this long, and for several times as long as when it last passed.
_SLOW_S, _SLOW_FACTOR = 30.0, 3.0
_COLUMNS = (Status.PASSED, Status.FAILED, Status.SKIPPED, Status.FLAKY)


@dataclass
class _Class:
    """A class that runs.

    Attributes:
        ranks: the most that one of its tests starts.
        test: the one that runs; None between two.
        since_s: since when.
        told_s: for how long that test has run when it was last told to be slow.
    """

    ranks: int
    since_s: float
    test: TestName | None = None
    told_s: float = 0.0


class Running:
    """Counts results, and knows what is under way.

    Args:
        plan: what runs.
        recorded_s: how long a test took when it last passed, in seconds; None if that is not known.
        expected_s: the same, or a guess.
        now_s: the time.
    """

    def __init__(
        self, plan: Plan, recorded_s: Callable[[TestName], float | None], expected_s: Callable[[TestName], float],
        now_s: float,
    ) -> None:  # fmt: skip
        self._recorded_s, self._expected_s = recorded_s, expected_s
        self.counts: Counter[Status] = Counter()
        self._classes: dict[tuple[str, str], _Class] = {}
        self._ranks = {batch.key: batch.need.ranks for batch in plan}
        self._planned = set(plan.tests)
        self.new_round(now_s)

    def new_round(self, now_s: float) -> None:
        """The plan begins, once more."""
        self._began_s = now_s
        self._done: dict[TestName, None] = {}
        self._done_s = 0.0
        self._counted: dict[TestName, Status] = {}

    def begin(self, began: Began, now_s: float) -> None:
        """A class or a test has begun."""
        key = (began.test.file, began.test.cls)
        found = self._classes.setdefault(key, _Class(self._ranks.get(key, 1), now_s))
        if began.test.method:
            found.test, found.since_s, found.told_s = began.test, now_s, 0.0

    def add(self, result: TestResult, now_s: float) -> None:
        """A result has come."""
        if result.attempt > 1 and (before := self._counted.get(result.test)) is not None:
            self.counts[before] -= 1  # of several attempts the last counts
        self.counts[result.status.counted] += 1
        self._counted[result.test] = result.status.counted
        if result.test in self._planned and result.test not in self._done:
            self._done[result.test] = None
            self._done_s += self._expected_s(result.test)
        found = self._classes.get((result.test.file, result.test.cls))
        if found is not None and found.test == result.test:
            found.test, found.since_s, found.told_s = None, now_s, 0.0

    def over(self, over: Over) -> None:
        """A class is over."""
        self._classes.pop((over.test.file, over.test.cls), None)

    def left_s(self, now_s: float) -> float | None:
        """Return how many seconds are left, at the pace of this run so far; None before there is a pace."""
        if not self._done_s or not self._done:
            return None
        waiting_s = sum(self._expected_s(test) for test in self._planned if test not in self._done)
        return waiting_s * (now_s - self._began_s) / self._done_s

    def summary(self, now_s: float) -> str:
        """Return how far the run has come, in one line.

        Counts in the order passed, failed, skipped, flaky; those that are 0 are left out.
        """
        parts = [f"[{len(self._done)}/{len(self._planned)}]"]
        parts += [f"{self.counts[one]} {one.value}" for one in _COLUMNS if self.counts[one]]
        parts.append(spell_s(now_s - self._began_s))
        left_s = self.left_s(now_s)
        if left_s is not None and len(self._done) < len(self._planned):
            parts.append(f"about {spell_s(left_s)} left")
        return "  ".join(parts)

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

    def newly_slow(self, now_s: float) -> list[str]:
        """Return a sentence for each test that has become slow, and again each time its time has doubled."""
        told = []
        for running in self._classes.values():
            took_s = now_s - running.since_s
            if running.test is None or not self._is_slow(running, now_s) or took_s < 2 * running.told_s:
                continue
            running.told_s = took_s
            usual_s = self._recorded_s(running.test)
            usual = f", {usual_s:.1f} s when it last passed" if usual_s is not None else ""
            told.append(f"slow: {running.test.id} has run for {spell_s(took_s)}{usual}")
        return told


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
