"""Halving a list of tests until the one is left on which another depends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from torch_ext.runner.audit import find_culprits
from torch_ext.runner.results import TestName

TESTS = [TestName("a.py", "A", f"test_{number}") for number in range(9)]
VICTIM = TESTS[8]


def runner(passes: Callable[[set[TestName]], bool]) -> tuple[list[int], Callable[..., Mapping[TestName, bool]]]:
    """Return a stand-in for a run in which ``passes`` tells how the victim ends after a set of tests."""
    runs: list[int] = []

    def run(tests: Sequence[TestName]) -> Mapping[TestName, bool]:
        runs.append(len(tests))
        return dict.fromkeys(tests[:-1], True) | {tests[-1]: passes(set(tests[:-1]))}

    return runs, run


@pytest.mark.parametrize("polluter", TESTS[:8])
@pytest.mark.parametrize("passes_alone", [True, False])
def test_one_culprit_is_found_in_few_runs(polluter: TestName, passes_alone: bool) -> None:
    runs, run = runner(lambda before: (polluter in before) != passes_alone)
    found = find_culprits(VICTIM, passes_alone, TESTS[:8], run)
    assert (found.culprits, found.passes_alone, found.steady) == ((polluter,), passes_alone, True)
    assert len(runs) <= 8


def test_two_that_only_act_together_are_both_named() -> None:
    _, run = runner(lambda before: not {TESTS[1], TESTS[6]} <= before)
    found = find_culprits(VICTIM, True, TESTS[:8], run)
    assert {TESTS[1], TESTS[6]} <= set(found.culprits)


def test_what_does_not_happen_again_is_not_blamed_on_anybody() -> None:
    _, run = runner(lambda before: True)
    assert not find_culprits(VICTIM, True, TESTS[:8], run).steady


def test_what_fails_first_on_shared_ranks_has_no_culprit() -> None:
    _, run = runner(lambda before: False)
    assert find_culprits(VICTIM, True, TESTS[:8], run).culprits == ()
