"""Puts the results of classes that run side by side into the order of the plan, for a reporter that people read."""

from __future__ import annotations

from collections.abc import Callable

from torch_ext.runner.reporters.base import Reporter
from torch_ext.runner.results import Began, Over, Status, TestName, TestResult
from torch_ext.runner.schedule import Plan

__all__ = ["InOrder"]

_Key = tuple[str, str]


class InOrder:
    """A reporter that hands everything on to another, class after class.

    The first class of the plan that is not over passes through as it happens. What comes of the others waits for their
    turn, or for the end of the run; with ``failures_at_once`` their failures do not. That a class begins is told at
    once, since it says that the run goes on.

    Args:
        plan: what runs.
        reporter: who is told.
        failures_at_once: failures do not wait.
        waits: called with each failure that does.
    """

    def __init__(
        self,
        plan: Plan,
        reporter: Reporter,
        *,
        failures_at_once: bool = False,
        waits: Callable[[TestResult], None] = lambda result: None,
    ) -> None:
        self._reporter = reporter
        self._waits = waits
        self._failures_at_once = failures_at_once
        self._held: dict[_Key, list[Began | TestResult]] = {}
        self._over: set[_Key] = set()
        self._order = [batch.key for batch in plan]
        self._place = {key: place for place, key in reversed(list(enumerate(self._order)))}
        self._at = 0

    def begin(self, began: Began) -> None:
        """Take note that a class or a test has begun."""
        if began.test.method:
            self._take(began)
        else:
            self._reporter.begin(began)

    def add(self, result: TestResult) -> None:
        """Take one result."""
        if self._failures_at_once and result.status.counted is Status.FAILED:
            self._reporter.add(result)
        else:
            self._take(result)

    def over(self, over: Over) -> None:
        """Take note that nothing more comes of a class, or, with an empty class, of a file."""
        file, cls = over.test.file, over.test.cls
        self._over.update(key for key in self._order if key[0] == file and cls in ("", key[1]))
        self._pass_on()

    def new_round(self, number: int) -> None:
        """Hand on what still waits, and begin anew."""
        self._hand_on_all()
        self._over.clear()
        self._at = 0
        self._reporter.new_round(number)

    def finish(self, *, interrupted: bool = False) -> None:
        """Hand on what still waits, then the end."""
        self._hand_on_all()
        self._reporter.finish(interrupted=interrupted)

    def _hand_on_all(self) -> None:
        for key in sorted(self._held, key=lambda key: self._place.get(key, -1)):
            self._hand_on(key)

    def _take(self, event: Began | TestResult) -> None:
        key = self._key(event.test)
        self._held.setdefault(key, []).append(event)
        if self._place.get(key, -1) <= self._at:
            self._hand_on(key)
        elif isinstance(event, TestResult) and event.status.counted is Status.FAILED and not event.again:
            self._waits(event)

    def _key(self, test: TestName) -> _Key:
        """The class to which ``test`` belongs; for a file its first class, which its failure precedes."""
        if test.cls:
            return test.file, test.cls
        return next((key for key in self._order if key[0] == test.file), (test.file, ""))

    def _pass_on(self) -> None:
        while self._at < len(self._order):
            self._hand_on(self._order[self._at])
            if self._order[self._at] not in self._over:
                return
            self._at += 1

    def _hand_on(self, key: _Key) -> None:
        for event in self._held.pop(key, ()):
            if isinstance(event, Began):
                self._reporter.begin(event)
            else:
                self._reporter.add(event)
