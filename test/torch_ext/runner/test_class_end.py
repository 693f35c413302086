"""What the end of a class process means, without processes: silence is no pass, and every class comes to its end."""

from __future__ import annotations

import itertools

import pytest

from torch_ext.results import Died, Raised, Remark
from torch_ext.runner.class_runner import ClassFacts, Next, what_next
from torch_ext.runner.messages import ClassEnded, ClassLeft

EXITED = Died("It exited with code 0.")
KILLED = Died("It was killed.")
RAISED = Raised("KeyboardInterrupt", "Traceback ...")
ENDED, TOLD, LEFT = ClassEnded(), ClassLeft(None), ClassLeft(RAISED)


def test_class_that_said_it_ended_and_exited_well_has_no_failure() -> None:
    assert what_next(ClassFacts(False, 3, 0, ENDED), EXITED) == Next()


@pytest.mark.parametrize("death", [None, KILLED])
def test_process_that_never_said_it_ended_fails_the_class_whatever_its_exit_code(death: Died | None) -> None:
    assert what_next(ClassFacts(False, 3, 0, None, death), EXITED) == Next(cls=death or EXITED)


def test_death_after_all_was_said_fails_the_class() -> None:
    assert what_next(ClassFacts(False, 3, 0, ENDED, KILLED), KILLED) == Next(cls=KILLED)


@pytest.mark.parametrize(("last", "problem"), [(None, KILLED), (TOLD, KILLED), (LEFT, RAISED)])
def test_running_test_fails_with_what_ended_it_and_the_others_go_on(last: ClassLeft | None, problem: object) -> None:
    assert what_next(ClassFacts(True, 0, 2, last, KILLED), KILLED) == Next(test=problem, go_on=True)  # type: ignore[arg-type]


def test_interrupt_that_a_test_told_is_not_told_twice() -> None:
    assert what_next(ClassFacts(False, 1, 2, TOLD), EXITED) == Next(go_on=True)
    assert what_next(ClassFacts(False, 1, 0, TOLD), EXITED) == Next()


def test_interrupt_between_two_tests_fails_the_class_and_the_rest_runs() -> None:
    assert what_next(ClassFacts(False, 1, 2, LEFT), EXITED) == Next(cls=RAISED, go_on=True)


def test_interrupt_before_the_first_test_ends_the_class() -> None:
    assert what_next(ClassFacts(False, 0, 2, LEFT), EXITED) == Next(cls=RAISED)


def test_death_between_two_tests_fails_the_class_and_the_rest_runs() -> None:
    assert what_next(ClassFacts(False, 1, 2, None, KILLED), KILLED) == Next(cls=KILLED, go_on=True)
    assert what_next(ClassFacts(False, 0, 2, None, KILLED), KILLED) == Next(cls=KILLED)


def test_class_goes_on_in_silence_where_its_zygote_died_between_two_tests() -> None:
    assert what_next(ClassFacts(False, 1, 2, None, KILLED, lost_zygote=True), KILLED) == Next(go_on=True)
    assert what_next(ClassFacts(False, 1, 0, None, KILLED, lost_zygote=True), KILLED) == Next(cls=KILLED)


def test_tests_that_unittest_leaves_out_are_missed() -> None:
    assert what_next(ClassFacts(False, 0, 2, ENDED), EXITED).cls == Remark(
        "unittest ended the class before 2 of its tests began."
    )
    assert what_next(ClassFacts(False, 1, 2, ENDED), EXITED) == Next(go_on=True)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("last", [None, ENDED, TOLD, LEFT])
def test_of_all_that_can_be_known_only_a_clean_end_is_no_failure(
    running: bool, last: ClassEnded | ClassLeft | None
) -> None:
    for ended, left, death, lost in itertools.product((0, 1), (0, 1), (None, KILLED), (False, True)):
        if lost and death is None:
            continue
        found = what_next(ClassFacts(running, ended, left, last, death, lost), death or EXITED)
        assert (found.test is not None) == running
        progress = ended or running or lost
        assert not found.go_on or (left and progress)
        silent = found.test is None and found.cls is None
        if silent and not found.go_on:
            assert last is not None and death is None and not left
