"""The places for ranks that a machine has, and who holds them."""

from __future__ import annotations

import os

from torch_ext.runner.schedule.plan import Need

__all__ = ["Slots", "cores", "slots_of"]


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slots_of(need: Need, slots: int) -> int:
    """Return how many of ``slots`` a class holds: one for each rank, and all if it has more ranks or wants no company.

    >>> slots_of(Need(ranks=2), 4), slots_of(Need(ranks=8), 4), slots_of(Need(ranks=1, alone=True), 4)
    (2, 4, 4)
    """
    return slots if need.alone else min(max(1, need.ranks), slots)


class Slots:
    """Hands slots out by number, the lowest free ones first. On an accelerator the numbers are those of its devices.

    >>> slots = Slots(4)
    >>> first, second = slots.take(3), slots.take(1)
    >>> first, second, slots.free
    ((0, 1, 2), (3,), 0)
    >>> slots.give_back(first); slots.take(2)
    (0, 1)
    """

    def __init__(self, number: int) -> None:
        if number < 1:
            raise ValueError(f"got {number} slots, expected at least 1")
        self.number = number
        self._free = list(range(number))

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def take(self, number: int) -> tuple[int, ...]:
        """Take ``number`` slots.

        Raises:
            AssertionError: so many are not free.
        """
        if number > len(self._free):
            raise AssertionError(f"{number} slots are wanted, {len(self._free)} are free")
        taken, self._free = self._free[:number], self._free[number:]
        return tuple(taken)

    def give_back(self, taken: tuple[int, ...]) -> None:
        """Give back what :meth:`take` has returned."""
        self._free = sorted([*self._free, *taken])
