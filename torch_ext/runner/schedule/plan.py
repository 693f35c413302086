"""What a run executes: the selected tests by class, and what each class needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_ext.runner.discovery import TestFile
from torch_ext.runner.results import Needs, TestName

__all__ = ["Batch", "Need", "Plan", "make_plan"]

# What a test is taken to last that has never run.
_UNKNOWN_S = 1.0


@dataclass(frozen=True, slots=True)
class Need:
    """What a class needs while it runs.

    Attributes:
        ranks: the most ranks that one of its tests starts; at least 1, and 1 where ranks are threads.
        alone: nothing else runs beside it.
        hosts: on how many hosts its ranks run, as many on each.
    """

    ranks: int = 1
    alone: bool = False
    hosts: int = 1

    @property
    def of_each_host(self) -> Need:
        """What it needs of one of its hosts.

        >>> Need(ranks=4, hosts=2).of_each_host
        Need(ranks=2, alone=False, hosts=1)
        """
        return Need(-(-self.ranks // self.hosts), self.alone)


class Batch(NamedTuple):
    """The selected tests of one class, which share its ``setUpClass``; in the order in which they run.

    ``expected_s`` is how long they took when they last ran, in seconds.
    """

    file: TestFile
    cls: str
    tests: tuple[TestName, ...]
    need: Need = Need()
    expected_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """What tells it apart from every other class of a plan."""
        return self.file.name, self.cls


@dataclass(frozen=True)
class Plan:
    """Everything a run executes. The classes of a file stand together, so that a module is imported once."""

    batches: tuple[Batch, ...]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    @property
    def tests(self) -> tuple[TestName, ...]:
        """Every test of the plan, in order; none stands in it twice."""
        return tuple(test for batch in self.batches for test in batch.tests)

    def without(self, tests: Collection[TestName]) -> Plan:
        """Return this plan without ``tests``; a class keeps its needs and what it is expected to take."""
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
    """Group ``tests`` by file, in the order of ``files``, then by class and test, in the order given.

    Args:
        needs: what each test needs, as far as that is known; the rest needs one rank.
        expected_s: how long a test takes, in seconds; by default the same for all.

    Raises:
        AssertionError: a test's file is none of ``files``, so that the test would be dropped in silence.
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
