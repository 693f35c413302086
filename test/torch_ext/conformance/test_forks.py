"""Cases in forks: a crash and a hang are results, the rest of the group goes on, and a difference is seen twice."""

import json

import pytest

from test.torch_ext.interpreter import python


def ran(*cases, limit_s=30, slots=1):
    """Return the status and text of each case; see bodies.py."""
    program = python("-m", "test.torch_ext.conformance.bodies", slots, limit_s, *cases)
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_death_is_the_result_of_one_case(slots):
    cases = {
        "crashes": ("crashed", "ended by SIGSEGV\nFatal Python error: Segmentation fault"),
        "is killed": ("crashed", "ended by SIGKILL"),
        "exits": ("crashed", "ended with exit code 3"),
        "gives up": ("crashed", "ended with exit code 70"),
        "raises": ("differs", "LookupError: no sample"),
    }
    found = ran("first", *cases, "last", slots=slots)
    for case, (status, text) in cases.items():
        assert found[case][0] == status and text in found[case][1]
    assert {found[case][0] for case in ("first", "last", "fine")} == {"agrees"}
    assert found["fine"][1].startswith("h") and found["last"][1].startswith("g")


def test_cases_of_a_group_share_a_fork_until_one_ends_it():
    found = ran("first", "second", "exits", "third")
    assert found["first"] == found["second"] != found["third"]


@pytest.mark.parametrize("case", ["hangs", "stops"])
def test_a_case_that_takes_too_long_hangs(case):
    found = ran("first", case, "last", limit_s=1)
    assert found[case][0] == "hung" and found[case][1].startswith("took longer than 1 s")
    assert case == "stops" or "bodies.py" in found[case][1]  # the stack
    assert found["first"][0] == found["last"][0] == "agrees"


def test_a_case_that_fails_by_what_another_left_behind_agrees():
    assert ran("leaves", "finds")["finds"][0] == "agrees"
