"""The meaning of a class process's end, without processes: silence is no pass, and every class comes to its end."""

from __future__ import annotations

import itertools

import pytest

from torch_ext.results import Died, Problem, Raised, Remark
from torch_ext.runner.class_runner import ClassFacts, decide_next
from torch_ext.runner.messages import ClassEnded

EXITED = Died("It exited with code 0.")
KILLED = Died("It was killed.")
RAISED = Raised("KeyboardInterrupt", "Traceback ...")
ENDED, REPORTED, LEFT = ClassEnded(), ClassEnded(True), ClassEnded(True, RAISED)


UNBEGUN = Remark("unittest ended the class before 2 of its tests began.")
# Whether a test runs, how many have ended and are left, the last word, and how the process died; then the result.
CASES = [
    (ClassFacts(False, 3, 0, ENDED), (None, False)),
    # A process that never said that it ended fails the class whatever its exit code.
    (ClassFacts(False, 3, 0, None), (EXITED, False)),
    (ClassFacts(False, 3, 0, None, KILLED), (KILLED, False)),
    (ClassFacts(False, 3, 0, ENDED, KILLED), (KILLED, False)),
    # A running test fails with the cause of the end, and the tests after it run.
    (ClassFacts(True, 0, 2, None, KILLED), (KILLED, True)),
    (ClassFacts(True, 0, 2, REPORTED, KILLED), (KILLED, True)),
    (ClassFacts(True, 0, 2, LEFT, KILLED), (RAISED, True)),
    # A test has reported the interrupt, so no other message repeats it.
    (ClassFacts(False, 1, 2, REPORTED), (None, True)),
    (ClassFacts(False, 1, 0, REPORTED), (None, False)),
    # Between two tests: the class fails and the rest runs; before the first one, the class ends.
    (ClassFacts(False, 1, 2, LEFT), (RAISED, True)),
    (ClassFacts(False, 0, 2, LEFT), (RAISED, False)),
    (ClassFacts(False, 1, 2, None, KILLED), (KILLED, True)),
    (ClassFacts(False, 0, 2, None, KILLED), (KILLED, False)),
    (ClassFacts(False, 1, 2, None, KILLED, lost_zygote=True), (None, True)),
    (ClassFacts(False, 1, 0, None, KILLED, lost_zygote=True), (KILLED, False)),
    # Tests that unittest leaves out are missed.
    (ClassFacts(False, 0, 2, ENDED), (UNBEGUN, False)),
    (ClassFacts(False, 1, 2, ENDED), (None, True)),
]


@pytest.mark.parametrize(("facts", "following"), CASES)
def test_decision_after_the_end_of_a_class_process(facts: ClassFacts, following: tuple[Problem | None, bool]) -> None:
    assert decide_next(facts, facts.death or EXITED) == following


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("last", [None, ENDED, REPORTED, LEFT])
def test_only_a_clean_end_is_no_failure(running: bool, last: ClassEnded | None) -> None:
    for ended, left, death, lost in itertools.product((0, 1), (0, 1), (None, KILLED), (False, True)):
        if lost and death is None:
            continue
        problem, goes_on = decide_next(ClassFacts(running, ended, left, last, death, lost), death or EXITED)
        assert problem is not None or not running
        assert not goes_on or (left and (ended or running or lost))
        if problem is None and not goes_on:
            assert last is not None and death is None and not left
