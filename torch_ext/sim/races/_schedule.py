"""Schedules: when lanes see what kernels have written. See Note [Late results] in csrc/races/watch.h."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch_ext.sim import _native

__all__ = ["SCHEDULES", "VARIABLE", "Schedule", "asked"]

VARIABLE = "TORCH_EXT_SCHEDULE"
SCHEDULES = ("early", "late", "random")


@dataclass(frozen=True)
class Schedule:
    """One of all executions that the edges permit.

    Attributes:
        kind: ``early``: results are there at once. ``late``: those of a kernel are there at the first
            access that is ordered after it. ``random``: a kernel is early or late as ``seed`` says.
    """

    kind: str = "early"
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Return what ``text`` says: ``late``, or ``random:7`` with a seed.

        Raises:
            ValueError: it says something else.

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
        _native.start_race_check(_native.Schedule.__members__[self.kind], self.seed)

    def replay(self) -> str:
        """Return how to run the same schedule again, and what tells that it was the same; empty if it is early."""
        if self.kind == "early":
            return ""
        return f"replay with {VARIABLE}={self}; its trace is {_native.schedule_trace():016x}"


def asked() -> Schedule:
    """Return the schedule that ``TORCH_EXT_SCHEDULE`` asks for.

    Raises:
        ValueError: it asks for none.
    """
    text = os.environ.get(VARIABLE) or "early"
    try:
        return Schedule.parse(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text}: {error}") from None
