"""Results of classes that run side by side, in the order of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_ext.runner.discovery import TestFile
from torch_ext.runner.reporters.make import InOrder
from torch_ext.runner.results import Began, Over, Status, TestName, TestResult
from torch_ext.runner.schedule import make_plan

FILES = [TestFile(f"{name}.py", Path("/root") / name, name, Path("/root")) for name in "ab"]
NAMES = {
    **{f"{cls}{method}": TestName(f"{file}.py", cls, method) for file, cls, method in ("aA1", "aA2", "aB1", "bC1")},
    **{cls: TestName(f"{file}.py", cls) for file, cls in ("aA", "aB", "bC")},
    "a.py": TestName("a.py"),
}


class Kept:
    """A reporter that keeps what it gets since it was last asked."""

    def __init__(self) -> None:
        self.got: list[str] = []

    def begin(self, began: Began) -> None:
        self.got.append(f"b{began.test.cls}{began.test.method}")

    def add(self, result: TestResult) -> None:
        self.got.append(f"{result.test.cls}{result.test.method}" or result.test.file)

    def new_round(self, number: int) -> None:
        self.got.append(f"r{number}")

    def finish(self, *, interrupted: bool = False) -> None:
        self.got.append("end")


# Of classes A and B of one file and C of another: `bA1` test A1 begins, `A1` it passes, `fA1` it fails, `/A` class A is
# over, `r2` round 2 begins, `end` the run ends. Behind `=`, what the reporter gets by then.
SCRIPTS = {
    "the first class passes through and the rest waits": "C1 /C bA1 B1 A1 = bA1 A1 | /A = B1 | /B end = C1 end",
    "a class that begins passes at once, and so does word of a failure": "bC bA bC1 fC1 fA1 = bC bA A1 waits:C1",
    "an end without the first class holds nothing up": "C1 B1 end = B1 C1 end",
    "nor does a file that cannot be imported": "C1 a.py /a.py = a.py C1",
    "what comes late of a class is told at once": "/A A = A",
    "a new round hands on what waits and begins anew": "C1 r2 C1 A1 = C1 r2 A1",
}


def play(ordered: InOrder, kept: Kept, script: str) -> None:
    for part in script.split(" | "):
        events, _, expected = part.partition(" = ")
        for word in events.split():
            if word == "end":
                ordered.finish(interrupted=True)
            elif word in NAMES:
                ordered.add(TestResult(NAMES[word], Status.PASSED, 0.0))
            elif word[0] == "f":
                ordered.add(TestResult(NAMES[word[1:]], Status.FAILED, 0.0))
            elif word[0] == "b":
                ordered.begin(Began(NAMES[word[1:]]))
            elif word[0] == "/":
                ordered.over(Over(NAMES[word[1:]]))
            else:
                ordered.new_round(int(word[1:]))
        assert kept.got == expected.split(), script
        kept.got.clear()


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_results_come_in_the_order_of_the_plan(script: str) -> None:
    kept, waits = Kept(), list[str]()
    tests = [NAMES[name] for name in ("A1", "A2", "B1", "C1")]
    ordered = InOrder(make_plan(FILES, tests), kept, waits=lambda result: waits.append(f"waits:{result.test.cls}1"))
    script, _, waiting = script.partition(" waits:")
    play(ordered, kept, script)
    assert waits == [f"waits:{waiting}"] * bool(waiting)


def test_failures_may_come_at_once() -> None:
    kept = Kept()
    ordered = InOrder(make_plan(FILES, [NAMES[name] for name in ("A1", "B1", "C1")]), kept, failures_at_once=True)
    play(ordered, kept, "B1 fC1 = C1")
