"""Events of classes that run side by side, handed on in the order of the plan."""

from __future__ import annotations

import pytest

from test.torch_ext.runner.fakes import file, named
from torch_ext.results import Began, Event, Over, RoundBegan, RunEnded, Status, TestName, TestResult
from torch_ext.runner.reporters.tally import InOrder
from torch_ext.runner.schedule import make_plan

PLAN = make_plan([file("a"), file("b")], named("a.py::A::1", "a.py::A::2", "a.py::B::1", "b.py::C::1"))


def event(word: str) -> Event:
    """Return what a word means: ``+A1`` a beginning, ``A1`` a pass, ``!A1`` a failure, ``A.`` the end of a class."""
    if word in ("round", "end"):
        return RoundBegan(2) if word == "round" else RunEnded()
    name = word.strip("+!.")
    test = TestName("b.py" if name[:1] in ("", "C") else "a.py", name[:1], name[1:])
    if word.startswith("+"):
        return Began(test)
    return Over(test) if word.endswith(".") else TestResult(test, Status.FAILED if "!" in word else Status.PASSED, 0.0)


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        ("C1 C. +A1 B1 A1", "+A1 A1"),
        ("C1 C. B1 A1 A.", "A1 A. B1"),
        ("C1 C. B1 A1 A. B. end", "A1 A. B1 B. C1 C. end"),
        ("+C +A +C1 B1 !C1 !", "+C +A !C1 !"),  # a failure and the beginning of a class at once, and that of a file
        ("C1 B1 end", "B1 C1 end"),  # a class that does not finish holds up others only until the end
        ("C1 A. round B1 C1 A1", "A. C1 round A1"),  # B waits for A again
    ],
)
def test_the_first_class_passes_through_and_the_rest_waits(happens: str, expected: str) -> None:
    handed_on: list[Event] = []
    ordered = InOrder(PLAN, handed_on.append)
    for word in happens.split():
        ordered(event(word))
    assert handed_on == [event(word) for word in expected.split()]
