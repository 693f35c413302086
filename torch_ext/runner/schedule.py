"""Decides which class runs when, and on which slots. Starts no processes and reads no clock.

A run executes a :class:`Plan`; :class:`Slots` are a machine's places for ranks, and the :class:`Queue` fills them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_ext.results import Needs, TestName
from torch_ext.runner.names import TestFile

# Expected duration of a test that has never run.
_UNKNOWN_S = 1.0


class Batch(NamedTuple):
    """The selected tests of one class, which share its ``setUpClass``, in the order in which they run."""

    file: TestFile
    cls: str
    tests: tuple[TestName, ...]
    need: Needs = Needs()
    expected_s: float = 0.0  # their duration in their last run

    @property
    def name(self) -> TestName:
        """The name of the class, which is unique within a plan."""
        return TestName(self.file.name, self.cls)


@dataclass(frozen=True)
class Plan:
    """Everything that a run executes. The classes of a file are consecutive."""

    batches: tuple[Batch, ...]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    @property
    def tests(self) -> tuple[TestName, ...]:
        """All tests of the plan, in order and without duplicates."""
        return tuple(test for batch in self.batches for test in batch.tests)

    def without(self, tests: Collection[TestName]) -> Plan:
        """Return this plan without ``tests``; each class keeps its needs and expected duration."""
        kept = ((batch, tuple(test for test in batch.tests if test not in tests)) for batch in self.batches)
        return Plan(tuple(batch._replace(tests=left) for batch, left in kept if left))


def make_plan(
    files: Sequence[TestFile],
    tests: Iterable[TestName],
    needs: Mapping[TestName, Needs] = {},
    expected_s: Callable[[TestName], float] = lambda test: _UNKNOWN_S,
) -> Plan:
    """Group ``tests`` by file, in the order of ``files``, then by class and test, in the given order. A test without
    known ``needs`` needs one rank.

    Raises:
        AssertionError: a test's file is not in ``files``, so that the test would be lost silently.
    """
    by_file: dict[str, dict[str, dict[TestName, None]]] = {file.name: {} for file in files}
    for test in tests:
        if test.file not in by_file:
            raise AssertionError(f"got the test {test.id} of a file that was not discovered")
        by_file[test.file].setdefault(test.cls, {})[test] = None
    return Plan(
        tuple(
            Batch(file, cls, tuple(group), _need_of(group, needs), sum(map(expected_s, group)))
            for file in files
            for cls, group in by_file[file.name].items()
        )
    )


def _need_of(tests: Iterable[TestName], needs: Mapping[TestName, Needs]) -> Needs:
    known = [needs[test] for test in tests if test in needs] or [Needs()]
    processes, hosts = max(each.processes for each in known), max(each.hosts for each in known)
    return Needs(processes=processes, alone=any(each.alone for each in known), hosts=hosts)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slots_of(need: Needs, slots: int) -> int:
    """Return how many of ``slots`` a class holds: one for each rank; all if it has more ranks or must run alone.

    >>> slots_of(Needs(processes=2), 4), slots_of(Needs(processes=8), 4), slots_of(Needs(alone=True), 4)
    (2, 4, 4)
    """
    return slots if need.alone else min(need.processes, slots)


class Slots:
    """Allocates slots by number, the lowest free ones first. On an accelerator, slot numbers are device numbers.

    >>> slots = Slots(4)
    >>> first, second = slots.acquire(3), slots.acquire(1)
    >>> first, second, slots.free
    ((0, 1, 2), (3,), 0)
    >>> slots.release(first); slots.acquire(2)
    (0, 1)
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._free = list(range(number))

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def acquire(self, number: int) -> tuple[int, ...]:
        """Take ``number`` slots, which must be free."""
        if number > len(self._free):
            raise AssertionError(f"{number} slots are requested, {len(self._free)} are free")
        acquired, self._free = self._free[:number], self._free[number:]
        return tuple(acquired)

    def release(self, acquired: tuple[int, ...]) -> None:
        """Release the slots that :meth:`acquire` has returned."""
        self._free = sorted([*self._free, *acquired])


def longest_first(batches: Iterable[Batch]) -> list[Batch]:
    """Return ``batches`` so that no long class is left for the end; those that run alone come last."""
    return sorted(batches, key=lambda one: (one.need.alone, -one.expected_s))


class Queue:
    """Chooses the classes that run: the first of ``batches`` that fits into the free slots begins next.

    A class that must run alone holds all slots. At most ``at_once`` classes run.
    """

    def __init__(self, batches: Iterable[Batch], slots: int, at_once: int) -> None:
        self._waiting = list(batches)
        self._slots = Slots(slots)
        self._at_once = at_once
        self.running: dict[Batch, tuple[int, ...]] = {}  # with their slots

    def start(self) -> Batch | None:
        """Return the class that begins now; None to wait."""
        for batch in self._waiting if len(self.running) < self._at_once else ():
            if (number := slots_of(batch.need, self._slots.number)) <= self._slots.free:
                self._waiting.remove(batch)
                self.running[batch] = self._slots.acquire(number)
                return batch
        return None

    def ended(self, batch: Batch) -> bool:
        """Release the slots of ``batch``, which has ended. Return whether it was the last class of its file."""
        self._slots.release(self.running.pop(batch))
        return all(other.file != batch.file for other in (*self._waiting, *self.running))

    @property
    def over(self) -> bool:
        """Whether every class has ended."""
        return not (self._waiting or self.running)
