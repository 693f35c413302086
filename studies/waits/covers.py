"""Which other waits do the work of one that can be deleted: found by deleting them too.

A wait that no test needs is redundant in one of two ways. Either nothing that runs depends on it: then a test that has
no wait at all reports the same races with it and without it. Or others cover it: then a test without these reports a
race that it does not report as long as this one is there. The fewest such others are looked for, one at best.

Other waits that no test needs are tried first, since two may stand in for one another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Cover", "Ending", "Run", "find_covers", "races_of"]


@dataclass(frozen=True)
class Ending:
    """How one test ended.

    Attributes:
        status: as the runner says.
        took_s: how long it took.
        text: what the runner says of a failure.
    """

    status: str
    took_s: float
    text: str = ""

    @property
    def races(self) -> list[str]:
        """The headings of the races that it reports."""
        return re.findall(r"^\s*race \d+: (.*?)(?: \(\d+ times\))?$", self.text, re.MULTILINE)


Deleted = tuple[str, ...]
Run = Callable[[Iterable[tuple[str, Deleted]]], Mapping[tuple[str, Deleted], Ending]]


@dataclass(frozen=True)
class Cover:
    """What stands in for a wait.

    Attributes:
        others: the waits that do, all of them; none if nothing depends on the wait.
        test: in which test it is reported that all are deleted.
        race: what it reports, and does not report if only ``others`` are deleted.
    """

    others: Deleted = ()
    test: str = ""
    race: str = ""


def races_of(ending: Ending) -> dict[str, str]:
    """Return the headings of the races that a test reports, by what is the same for equal ones: the accesses and where
    they are made, without numbers of operations and of streams.

    >>> text = "race 1: a number 3 writes what b reads (2 times)\\n earlier\\n   x.py:3 in f\\n later\\n   y.py:5 in g"
    >>> races_of(Ending("failed", 1, text))
    {'a writes what b reads x.py:3 in f y.py:5 in g': 'a number 3 writes what b reads'}
    """
    found = {}
    for block in re.split(r"^\s*race \d+: ", ending.text, flags=re.MULTILINE)[1:]:
        heading = re.sub(r" \(\d+ times\)$", "", block.splitlines()[0])
        places = re.findall(r"^\s+(\S+:\d+ in \S+)$", block, re.MULTILINE)
        found[" ".join([re.sub(r" number \d+", "", heading), *places])] = heading
    return found


class _Search:
    """The runs that were made, each of them once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[tuple[str, Deleted], Ending] = {}

    def make(self, asked: Iterable[tuple[str, str, Collection[str]]]) -> None:
        """Run what :meth:`adds` will ask for, all at once."""
        runs = {(test, tuple(sorted(sites))) for test, site, others in asked for sites in ({*others}, {*others, site})}
        new = runs - set(self._known)
        if new:
            self._known.update(self._run(sorted(new)))

    def adds(self, test: str, site: str, others: Collection[str]) -> str:
        """Return a race that a test without ``others`` reports only if it is without ``site`` too; else nothing."""
        self.make([(test, site, others)])
        with_it, without_it = (
            self._known.get((test, tuple(sorted(sites))), _LOST) for sites in ({*others}, {*others, site})
        )
        before = races_of(with_it)
        return next((heading for key, heading in races_of(without_it).items() if key not in before), "")

    def is_sound(self, test: str, others: Collection[str]) -> bool:
        """Whether a test without ``others`` does all that it did, races apart: known after :meth:`make`."""
        ending = self._known.get((test, tuple(sorted(others))), _LOST)
        return ending.status == "passed" or "RaceError" in ending.text.partition("\n")[0]


_LOST = Ending("missing", 0)
_TESTS = 2  # that are tried for each wait
_AT_ONCE = 6


def find_covers(
    redundant: Mapping[str, Sequence[str]],
    reached: Mapping[str, Collection[str]],
    run: Run,
    say: Callable[[str], None],
) -> dict[str, Cover]:
    """Return what stands in for each redundant wait.

    Args:
        redundant: for each wait, tests that reach it, the shortest first. One is left out if none of them runs to its
            end without all other waits, and no single one covers it.
        reached: for each test, the waits that it reaches.
        run: runs tests, each with some waits deleted.
        say: is told how far it is.
    """
    search = _Search(run)
    all_others = [
        (test, site, {*reached[test]} - {site}) for site, tests in redundant.items() for test in tests[:_TESTS]
    ]
    say(f"{len(redundant)} waits are redundant; {len(all_others)} times a test runs without all others")
    search.make(all_others)
    covers: dict[str, Cover] = {}
    for test, site, others in all_others:
        if site in covers and covers[site].others:
            continue
        near = sorted(others, key=lambda other: (other not in redundant, *_far(site, other)))
        if search.adds(test, site, others):
            say(f"something covers {site}")
            covers[site] = _one(search, test, site, near) or _several(search, test, site, near)
        elif not all(search.is_sound(test, sites) for sites in (others, {*others, site})):
            say(f"without all others {test} is no program")
            if one := _one(search, test, site, near):
                covers[site] = one
        else:
            covers[site] = Cover()
    return covers


def _one(search: _Search, test: str, site: str, near: Sequence[str]) -> Cover | None:
    """Return the first of the waits ``near`` that covers ``site`` alone."""
    for first in range(0, len(near), _AT_ONCE):
        now = near[first : first + _AT_ONCE]
        search.make((test, site, [other]) for other in now)
        for other in now:
            if race := search.adds(test, site, [other]):
                return Cover((other,), test, race)
    return None


def _several(search: _Search, test: str, site: str, near: Sequence[str]) -> Cover:
    """Return few of the waits ``near``, which cover ``site`` together."""
    size = len(near) // 2
    while size > 0:
        parts = [near[first : first + size] for first in range(0, len(near), size)]
        rests = [[other for other in near if other not in part] for part in parts]
        search.make((test, site, rest) for rest in rests)
        fewer = next((rest for rest in rests if search.adds(test, site, rest)), None)
        near, size = (fewer, min(size, len(fewer) // 2)) if fewer else (near, size // 2)
    return Cover(tuple(sorted(near)), test, search.adds(test, site, near))


def _far(site: str, other: str) -> tuple[bool, bool, int]:
    """How far from each other two waits are: in other modules, in other functions, or by lines."""
    (module, function, line), (its_module, its_function, its_line) = site.split(":"), other.split(":")
    return module != its_module, function != its_function, abs(int(line) - int(its_line))
