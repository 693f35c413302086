"""Which tests depend on those that ran before them on the same ranks. Decisions alone: it is told how tests end.

Note [Audit of order]
~~~~~~~~~~~~~~~~~~~~~
Every class runs three times: each test on fresh ranks; all on ranks that they share, in order; and in reverse. A test
that ends otherwise on shared ranks than on fresh ones depends on some test before it. A failure gives the next test
fresh ranks, so only the tests since the last failure can be to blame. These are halved until one is left: the
*polluter*, after which the *victim* fails, or the test after which one passes that fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch_ext.runner.results import TestName

__all__ = ["Dependence", "find_culprits", "suspects"]

# Runs tests of one class on ranks that they share, in this order; returns which of them passed.
RunShared = Callable[[Sequence[TestName]], Mapping[TestName, bool]]


@dataclass(frozen=True)
class Dependence:
    """A test that ends otherwise after others.

    Attributes:
        victim: the test.
        passes_alone: it passes on fresh ranks and fails after others; False: the other way round.
        culprits: the test after which it does, or several where no one of them suffices; empty if it does so alone on
            ranks that are merely meant to be shared.
        steady: whether it did so again when it was tried.
    """

    victim: TestName
    passes_alone: bool
    culprits: tuple[TestName, ...]
    steady: bool = True


def suspects(order: Sequence[TestName], passed: Mapping[TestName, bool], victim: TestName) -> list[TestName]:
    """Return the tests that ran before ``victim`` on the ranks that it had.

    >>> one, two, three = (TestName("a.py", "A", name) for name in "123")
    >>> [test.method for test in suspects([one, two, three], {one: False, two: True}, three)]
    ['2']
    """
    before: list[TestName] = []
    for test in order[: order.index(victim)]:
        before = [*before, test] if passed.get(test, False) else []
    return before


def find_culprits(
    victim: TestName, passes_alone: bool, before: Sequence[TestName], run_shared: RunShared
) -> Dependence:
    """Find the fewest of the tests ``before`` after which ``victim`` ends otherwise than alone."""

    def differs(tests: Sequence[TestName]) -> bool:
        return run_shared([*tests, victim]).get(victim, False) != passes_alone

    if not differs(before):
        return Dependence(victim, passes_alone, tuple(before), steady=False)
    if differs(()):
        return Dependence(victim, passes_alone, ())
    left = list(before)
    while len(left) > 1:
        half = len(left) // 2
        # What comes last is most often to blame.
        for part in (left[half:], left[:half]):
            if differs(part):
                left = part
                break
        else:
            break
    return Dependence(victim, passes_alone, tuple(left))
