"""As many classes at a time as there are slots for their ranks, the longest first."""

from __future__ import annotations

from collections.abc import Sequence

from torch_ext.runner.schedule.plan import Batch
from torch_ext.runner.schedule.slots import slots_of

__all__ = ["Packed"]


class Packed:
    """See :class:`~torch_ext.runner.schedule.base.Policy`.

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
