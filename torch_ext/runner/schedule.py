"""The order in which tests run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_ext.runner.discovery import TestFile
from torch_ext.runner.results import TestName

__all__ = ["Batch", "Plan", "make_plan"]


class Batch(NamedTuple):
    """The selected tests of one class, which share its ``setUpClass``; in the order in which they run."""

    file: TestFile
    cls: str
    tests: tuple[TestName, ...]


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

    def replaced(self, file: TestFile, batches: Sequence[Batch]) -> Plan:
        """Return this plan with ``batches`` in the place of those of ``file``."""
        names = [batch.file.name for batch in self.batches]
        start = names.index(file.name) if file.name in names else len(names)
        kept = [(number, batch) for number, batch in enumerate(self.batches) if batch.file.name != file.name]
        before = [batch for number, batch in kept if number < start]
        after = [batch for number, batch in kept if number > start]
        return Plan((*before, *batches, *after))


def make_plan(files: Sequence[TestFile], tests: Iterable[TestName]) -> Plan:
    """Group ``tests`` by file, in the order of ``files``, then by class and test, in the order given.

    Raises:
        AssertionError: a test's file is none of ``files``, so that the test would be dropped in silence.
    """
    by_file: dict[str, dict[str, dict[TestName, None]]] = {file.name: {} for file in files}
    for test in tests:
        if test.file not in by_file:
            raise AssertionError(f"got the test {test.id} of a file that was not discovered")
        by_file[test.file].setdefault(test.cls, {})[test] = None
    return Plan(tuple(Batch(file, cls, tuple(group)) for file in files for cls, group in by_file[file.name].items()))
