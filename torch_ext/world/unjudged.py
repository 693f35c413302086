"""Ranks that were started and whose outcomes nobody has asked for yet. Standard library and own layer only.

Note [Judged once]
~~~~~~~~~~~~~~~~~~
A test whose ranks nobody waits for says nothing about them: a second start of ranks drops the first ones, a test method
that replaces the one of the instance runs beside them, a skip ends the test while they run. A test class can do all of
that in more ways than there are places to look. So every start of ranks, or of a test on ranks that live on, is noted
here until somebody takes their outcomes, and a test that ends before that has failed. The cleanup of each base class
checks it, and so does the runner when it has the result of a test.
"""

from __future__ import annotations

from torch_ext.world.phrases import ranks_phrase

__all__ = ["UnjudgedRanksError", "asked", "check", "started"]

_started: dict[int, tuple[object, int]] = {}  # by the identity of the owner, which stays alive with this


class UnjudgedRanksError(AssertionError):
    """A test ended though nobody had asked what became of its ranks."""


def started(owner: object, ranks: int) -> None:
    """Note that ``owner``, such as a world, has started a test on that many ranks."""
    if ranks:
        _started[id(owner)] = owner, ranks


def asked(owner: object) -> None:
    """Note that somebody takes the outcomes of the ranks of ``owner``."""
    _started.pop(id(owner), None)


def check() -> None:
    """Return if no ranks are left whose outcomes nobody has asked for; forget them.

    Raises:
        UnjudgedRanksError: there are some.
    """
    left = [ranks for _, ranks in _started.values()]
    _started.clear()
    if left:
        raise UnjudgedRanksError(
            f"{ranks_phrase(range(max(left)))} ran and nobody asked what became of them, so this test has not passed. "
            "Start the ranks once in a test, skip before they start, and leave the test method of the instance as it "
            "is: it waits for them."
        )
