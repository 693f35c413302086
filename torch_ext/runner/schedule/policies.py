"""The policies: each chooses the class that begins next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch_ext.runner.schedule.plan import Batch
from torch_ext.runner.schedule.slots import slots_of

__all__ = ["Packed", "Policy", "Serial"]


class Policy(Protocol):
    """Chooses. It remembers nothing, so that a choice depends on what is asked alone.

    Called in the supervisor, on the main thread, whenever a class has ended or become ready. Must not block.

    Attributes:
        keeps_order: a class that is not ready holds up those that come after it.
    """

    @property
    def keeps_order(self) -> bool: ...

    def order(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return ``batches`` in the order in which they should become ready: their files are imported in it."""
        ...

    def choose(self, ready: Sequence[Batch], running: Sequence[Batch], free: int, slots: int) -> Batch | None:
        """Return which of ``ready`` begins now; None to wait until one of ``running`` has ended.

        With nothing running, one of ``ready`` has to begin.

        Args:
            ready: those that may begin, in the order of :meth:`order`.
            running: those that have begun and not ended.
            free: how many slots nobody holds.
            slots: how many there are.
        """
        ...


class Packed:
    """As many classes at a time as there are slots for their ranks; see :class:`Policy`.

    The longest class goes first, because one that is left for the end runs on when all others are through. Where it
    does not fit, the longest that does goes in its place. Classes that want to be alone come last, one by one.

    Args:
        at_once: the most classes that run at a time.
        in_order: prefer what comes first in the plan to what takes longest.
    """

    keeps_order = False

    def __init__(self, at_once: int, *, in_order: bool = False) -> None:
        if at_once < 1:
            raise ValueError(f"got {at_once} classes at once, expected at least 1")
        self._at_once = at_once
        self._in_order = in_order

    def order(self, batches: Sequence[Batch]) -> list[Batch]:
        return sorted(batches, key=self._rank)

    def choose(self, ready: Sequence[Batch], running: Sequence[Batch], free: int, slots: int) -> Batch | None:
        if len(running) >= self._at_once or any(batch.need.alone for batch in running):
            return None
        for batch in sorted(ready, key=self._rank):
            if batch.need.alone:
                return None if running else batch
            if slots_of(batch.need, slots) <= free:
                return batch
        return None

    def _rank(self, batch: Batch) -> tuple[bool, float]:
        """What comes first is least. Equals stay in the order of the plan."""
        return batch.need.alone, 0.0 if self._in_order else -batch.expected_s


class Serial:
    """One class at a time, in the order of the plan; see :class:`Policy`."""

    keeps_order = True

    def order(self, batches: Sequence[Batch]) -> list[Batch]:
        return list(batches)

    def choose(self, ready: Sequence[Batch], running: Sequence[Batch], free: int, slots: int) -> Batch | None:
        return ready[0] if ready and not running else None
