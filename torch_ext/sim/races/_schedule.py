"""Schedules: when lanes see what kernels have written. See Note [Late results] in csrc/races/watch.h."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch_ext.sim import _native

VARIABLE = "TORCH_EXT_SCHEDULE"
SCHEDULES = ("early", "late", "random")  # in the order of Schedule::Kind


@dataclass(frozen=True)
class Schedule:
    """One of all executions that the edges permit.

    Attributes:
        kind: ``early``: results are visible at once. ``late``: a kernel's results become visible at the first access
            that is ordered after it. ``random``: each kernel is early or late, drawn from ``seed``.
    """

    kind: str = "early"
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule's name, such as ``late``, or ``random:7`` with a seed.

        Raises:
            ValueError: ``text`` names no schedule.

        >>> Schedule.parse("random:7"), str(Schedule.parse("late"))
        (Schedule(kind='random', seed=7), 'late')
        """
        kind, _, seed = text.partition(":")
        if kind not in SCHEDULES or (seed and (kind != "random" or not seed.isdecimal())):
            raise ValueError(f"Got the schedule {text!r}, expected early, late, or random and a seed such as random:7.")
        return cls(kind, int(seed or 0))

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}" if self.kind == "random" else self.kind

    def start(self) -> None:
        """Start a check on this schedule."""
        _native.start_race_check(SCHEDULES.index(self.kind), self.seed)

    def replay(self) -> str:
        """Return the setting that replays this schedule, and its trace to compare; empty for ``early``."""
        if self.kind == "early":
            return ""
        return f"replay with {VARIABLE}={self}; its trace is {_native.schedule_trace():016x}"


def requested() -> Schedule:
    """Return the schedule in ``TORCH_EXT_SCHEDULE``; ``early`` if it is unset or empty.

    Raises:
        ValueError: the variable names no schedule.
    """
    text = os.environ.get(VARIABLE) or "early"
    try:
        return Schedule.parse(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text}: {error}") from None
