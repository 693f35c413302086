"""Results of classes that run side by side, in the order of the plan."""

from __future__ import annotations

from test.torch_ext.runner.fakes import file, named
from torch_ext.results import Began, Event, Over, RoundBegan, RunEnded, Status, TestName, TestResult
from torch_ext.runner.reporters.tally import InOrder
from torch_ext.runner.schedule import make_plan

A1, A2, B1, C1 = named("a.py::A::1", "a.py::A::2", "a.py::B::1", "b.py::C::1")


class Kept:
    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Began):
            self.told.append(f"began {event.test.cls}{event.test.method}")
        elif isinstance(event, TestResult):
            self.told.append(f"{event.test.cls}{event.test.method or event.test.file}")
        elif isinstance(event, RoundBegan):
            self.told.append(f"round {event.number}")
        elif isinstance(event, RunEnded):
            self.told.append("end")


def made() -> tuple[Kept, InOrder]:
    kept = Kept()
    return kept, InOrder(make_plan([file("a"), file("b")], [A1, A2, B1, C1]), kept)


def result(test: TestName) -> TestResult:
    return TestResult(test, Status.PASSED, 0.0)


def test_the_first_class_passes_through_and_the_rest_waits() -> None:
    kept, ordered = made()
    ordered(result(C1))
    ordered(Over(TestName("b.py", "C")))
    ordered(Began(A1))
    ordered(result(B1))
    ordered(result(A1))
    assert kept.told == ["began A1", "A1"]
    ordered(Over(TestName("a.py", "A")))
    assert kept.told[2:] == ["B1"]
    ordered(Over(TestName("a.py", "B")))
    ordered(RunEnded())
    assert kept.told[3:] == ["C1", "end"]


def test_a_failure_and_the_beginning_of_a_class_are_reported_at_once() -> None:
    kept, ordered = made()
    for name in (TestName("b.py", "C"), TestName("a.py", "A")):
        ordered(Began(name))
    ordered(Began(C1))
    ordered(result(B1))
    ordered(TestResult(C1, Status.FAILED, 0.0))
    ordered(result(TestName("b.py")))
    assert kept.told == ["began C", "began A", "C1", "b.py"]


def test_a_class_that_does_not_finish_holds_nothing_up_for_good() -> None:
    kept, ordered = made()
    ordered(result(C1))
    ordered(result(B1))
    ordered(RunEnded(interrupted=True))
    assert kept.told == ["B1", "C1", "end"]


def test_a_new_round_hands_on_what_waits_and_begins_with_the_first_class() -> None:
    kept, ordered = made()
    ordered(result(C1))
    ordered(Over(TestName("a.py", "A")))
    ordered(RoundBegan(2))
    ordered(result(B1))
    ordered(result(C1))
    ordered(result(A1))
    assert kept.told == ["C1", "round 2", "A1"], "B waits for A again"
