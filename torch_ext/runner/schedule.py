"""Decides which class runs when, and on which slots. Starts no processes and reads no clock.

A run executes a :class:`Plan`; :class:`Slots` are a machine's places for ranks. :class:`Packed` chooses which class of
the :class:`Queue` begins next.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_ext.results import Needs, TestName
from torch_ext.runner.names import TestFile

__all__ = ["Batch", "Need", "Packed", "Plan", "Queue", "Slots", "cores", "make_plan", "slots_of"]

# Expected duration of a test that has never run.
_UNKNOWN_S = 1.0


@dataclass(frozen=True, slots=True)
class Need:
    """The needs of a running class."""

    ranks: int = 1  # maximal number of ranks of its tests; at least 1, and 1 if ranks are threads
    alone: bool = False  # no other class runs at the same time
    hosts: int = 1  # number of hosts of its ranks, with as many ranks on each

    @property
    def of_each_host(self) -> Need:
        """The need on one of its hosts.

        >>> Need(ranks=4, hosts=2).of_each_host
        Need(ranks=2, alone=False, hosts=1)
        """
        return Need(-(-self.ranks // self.hosts), self.alone)


class Batch(NamedTuple):
    """The selected tests of one class, which share its ``setUpClass``, in the order in which they run.

    ``expected_s`` is their duration in their last run, in seconds.
    """

    file: TestFile
    cls: str
    tests: tuple[TestName, ...]
    need: Need = Need()
    expected_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """A unique key within a plan: file and class."""
        return self.file.name, self.cls


@dataclass(frozen=True)
class Plan:
    """Everything that a run executes. The classes of a file are consecutive, so that a module is imported once."""

    batches: tuple[Batch, ...]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    @property
    def tests(self) -> tuple[TestName, ...]:
        """All tests of the plan, in order and without duplicates."""
        return tuple(test for batch in self.batches for test in batch.tests)

    def without(self, tests: Collection[TestName]) -> Plan:
        """Return this plan without ``tests``; each class keeps its needs and expected duration."""
        kept = (
            batch._replace(tests=tuple(test for test in batch.tests if test not in tests)) for batch in self.batches
        )
        return Plan(tuple(batch for batch in kept if batch.tests))


def make_plan(
    files: Sequence[TestFile],
    tests: Iterable[TestName],
    needs: Mapping[TestName, Needs] = {},
    expected_s: Callable[[TestName], float] = lambda test: _UNKNOWN_S,
) -> Plan:
    """Group ``tests`` by file, in the order of ``files``, then by class and test, in the given order.

    Args:
        files: the files of the tests, in the order in which they run.
        tests: the tests, those of a class in its order.
        needs: the known needs of tests; other tests need one rank.
        expected_s: the expected duration of a test, in seconds; by default the same for all.

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


def _need_of(tests: Iterable[TestName], needs: Mapping[TestName, Needs]) -> Need:
    known = [needs[test] for test in tests if test in needs]
    ranks = max((each.processes for each in known), default=1)
    hosts = max((each.hosts for each in known), default=1)
    return Need(ranks, any(each.alone for each in known), hosts)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slots_of(need: Need, slots: int) -> int:
    """Return how many of ``slots`` a class holds: one for each rank; all if it has more ranks or must run alone.

    >>> slots_of(Need(ranks=2), 4), slots_of(Need(ranks=8), 4), slots_of(Need(ranks=1, alone=True), 4)
    (2, 4, 4)
    """
    return slots if need.alone else min(max(1, need.ranks), slots)


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
        """Take ``number`` slots.

        Raises:
            AssertionError: fewer slots are free.
        """
        if number > len(self._free):
            raise AssertionError(f"{number} slots are requested, {len(self._free)} are free")
        acquired, self._free = self._free[:number], self._free[number:]
        return tuple(acquired)

    def release(self, acquired: tuple[int, ...]) -> None:
        """Release the slots that :meth:`acquire` has returned."""
        self._free = sorted([*self._free, *acquired])


class Packed:
    """Chooses which class begins: as many concurrently as there are slots for their ranks.

    The longest class goes first, because at the end it would run on when all other classes have finished. If it does
    not fit, the longest class that fits goes first. Classes that must run alone come last, one by one.

    Args:
        at_once: the maximal number of concurrent classes.
        strict: begin classes only in the order of the plan, even if one of them is not ready.
    """

    def __init__(self, at_once: int, *, strict: bool = False) -> None:
        self._at_once = at_once
        self.strict = strict

    def order(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return ``batches`` in the order in which they should become ready, which is the order of imports."""
        return list(batches) if self.strict else sorted(batches, key=lambda one: (one.need.alone, -one.expected_s))

    def choose(self, ready: Sequence[Batch], running: Sequence[Batch], free: int, slots: int) -> Batch | None:
        """Return which of ``ready`` begins now, with ``free`` of ``slots``; None to wait for one of ``running``."""
        if len(running) >= self._at_once or any(batch.need.alone for batch in running):
            return None
        for batch in self.order(ready):
            if batch.need.alone:
                return None if running else batch
            if slots_of(batch.need, slots) <= free:
                return batch
        return None


# Number of files open ahead of the running classes. An open file has a process that has imported it.
_AHEAD = 2


class Queue:
    """The state of a run, file by file: closed, open (being imported), ready (imported), done.

    A file is imported once: it stays open until all of its classes have run. To limit the number of open files, the
    policy chooses among the classes of a few files, and the next file opens when one is done.
    """

    def __init__(self, plan: Plan, policy: Packed, slots: Slots) -> None:
        self._policy = policy
        self._slots = slots
        self._waiting: dict[str, list[Batch]] = {}
        for batch in policy.order(plan.batches):
            self._waiting.setdefault(batch.file.name, []).append(batch)
        self._files = {batch.file.name: batch.file for batch in plan}
        self._closed = list(self._waiting)
        self._ready: dict[str, None] = {}
        self._open: dict[str, None] = {}
        self.running: dict[Batch, tuple[int, ...]] = {}

    def files_to_open(self) -> list[TestFile]:
        """Return the files to import now, each file once."""
        busy = {batch.file.name for batch in self.running}
        opened = []
        while self._closed and len(set(self._open) - busy) < _AHEAD:
            name = self._closed.pop(0)
            self._open[name] = None
            opened.append(self._files[name])
        return opened

    def loaded(self, file: TestFile) -> None:
        """Note that the import of ``file`` has ended."""
        self._ready[file.name] = None

    def start(self) -> Batch | None:
        """Return the class that begins now, with its slots in :attr:`running`; None to wait."""
        ready = self._policy.order([batch for name in self._may_run() for batch in self._waiting[name]])
        chosen = self._policy.choose(ready, tuple(self.running), self._slots.free, self._slots.number)
        if chosen is not None:
            self._waiting[chosen.file.name].remove(chosen)
            self.running[chosen] = self._slots.acquire(slots_of(chosen.need, self._slots.number))
        return chosen

    def _may_run(self) -> list[str]:
        if not self._policy.strict:
            return list(self._ready)
        return list(itertools.takewhile(lambda name: name in self._ready, self._open))

    def ended(self, batch: Batch) -> None:
        """Release the slots of ``batch``, which has ended."""
        self._slots.release(self.running.pop(batch))

    def files_done(self) -> list[TestFile]:
        """Return the files whose classes have all ended, each file once."""
        busy = {batch.file.name for batch in self.running}
        done = [name for name in self._ready if not self._waiting[name] and name not in busy]
        for name in done:
            del self._ready[name], self._open[name]
        return [self._files[name] for name in done]

    @property
    def over(self) -> bool:
        """Whether every class has ended."""
        return not (self._closed or self._open or self.running)
