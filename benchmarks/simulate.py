"""Simulates a whole run: the real queue under a clock that jumps from one end of a class to the next."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from torch_ext.runner.schedule import Batch, Plan, Queue, longest_first, slots_of

__all__ = ["Span", "lower_bound", "makespan", "simulate"]


class Span(NamedTuple):
    """Start and end of a class, in seconds from the start of the run, and its slots."""

    batch: Batch
    begun_s: float
    ended_s: float
    slots: tuple[int, ...]


def simulate(plan: Plan, slots: int, at_once: int | None = None, *, in_order: bool = False) -> list[Span]:
    """Run ``plan`` on ``slots`` slots. A class takes as long as expected; importing a file takes no time."""
    queue = Queue(plan if in_order else longest_first(plan), slots, at_once or slots)
    ends: list[tuple[float, int, Span]] = []
    spans: list[Span] = []
    now_s = 0.0
    while True:
        while (batch := queue.start()) is not None:
            span = Span(batch, now_s, now_s + batch.expected_s, queue.running[batch])
            heapq.heappush(ends, (span.ended_s, len(spans), span))
            spans.append(span)
        if not ends:
            return spans
        now_s, _, span = heapq.heappop(ends)
        queue.ended(span.batch)


def makespan(plan: Plan, slots: int, at_once: int | None = None, *, in_order: bool = False) -> float:
    """Return the duration of ``plan`` on ``slots`` slots, in seconds."""
    return max((span.ended_s for span in simulate(plan, slots, at_once, in_order=in_order)), default=0.0)


def lower_bound(plan: Plan, slots: int) -> float:
    """Return a lower bound for any schedule of ``plan``, in seconds: its longest class, or all slots always busy.

    Classes that run alone add up, and so do classes with more than half of the slots.
    """
    apart = [batch for batch in plan if batch.need.alone]
    rest = [batch for batch in plan if not batch.need.alone]
    area = sum(batch.expected_s * slots_of(batch.need, slots) for batch in rest) / slots
    wide = sum(batch.expected_s for batch in rest if 2 * slots_of(batch.need, slots) > slots)
    longest = max((batch.expected_s for batch in rest), default=0.0)
    return sum(batch.expected_s for batch in apart) + max(area, wide, longest)
