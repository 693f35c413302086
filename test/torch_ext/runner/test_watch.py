"""Output while tests run: progress after long silence, styles on a terminal, classes in the order of the plan."""

import io
import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from test.torch_ext.runner.fakes import Terminal, file, named
from torch_ext.results import (
    Began,
    Needs,
    Over,
    Remark,
    RoundBegan,
    RunEnded,
    Stalled,
    Status,
    TestName,
    TestResult,
    Tick,
)
from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.tally import InOrder, Tally
from torch_ext.runner.reporters.text import ProgressLines, Writer
from torch_ext.runner.rounds import Reporters
from torch_ext.runner.schedule import make_plan

ONE, TWO, OTHER = named("a.py::TestA::test_1", "a.py::TestA::test_2", "a.py::TestB::t")
PLAN = make_plan([file("a")], [ONE, TWO, OTHER], {ONE: Needs(4, 4), OTHER: Needs(1, 1)})


def passed(test):
    return TestResult(test, Status.PASSED, 1.0)


@pytest.fixture
def now(monkeypatch):
    """The time, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


class Watched:
    """A watch of a run, and the tally that counts before it."""

    def __init__(self, stream, **more):
        self.tally = Tally(PLAN)
        self.watch = ProgressLines(self.tally, lambda test: None, Writer(stream), **more)

    def __call__(self, *events):
        for event in events:
            self.tally(event)
            self.watch(event)


def test_the_summary_counts_and_names_what_runs_for_how_long_on_how_many_ranks(now):
    run = Watched(io.StringIO())
    assert run.watch.summary(101.0) == "[0/3]  1 s" and run.watch.under_way(101.0) == []
    for now[0], event in ((101.0, Began(TestName("a.py", "TestA"))), (102.0, Began(ONE)), (103.0, Began(OTHER))):
        run(event)
    assert run.watch.under_way(110.0) == ["a.py::TestA::test_1  4 ranks  8 s", "a.py::TestB::t  1 rank  7 s"]
    now[0] = 110.0
    run(passed(ONE), TestResult(OTHER, Status.FAILED, 1.0), Over(TestName("a.py", "TestB")))
    assert run.watch.summary(110.0) == "[2/3]  1 passed  1 failed  10 s  about 5 s left"
    assert run.watch.under_way(112.0) == ["a.py::TestA (between tests)  4 ranks  2 s"]


def test_the_summary_counts_a_test_once_however_often_it_runs(now):
    run = Watched(io.StringIO())
    for attempt, status in ((1, Status.FAILED), (2, Status.FAILED), (3, Status.FLAKY)):
        run(TestResult(ONE, status, 1.0, attempt=attempt, again=attempt < 3))
        assert Counter(one.status for one in run.tally.results) == {status: 1}
    run(passed(TWO), passed(OTHER))
    assert run.watch.summary(102.0) == "[3/3]  2 passed  1 flaky  2 s"
    now[0] = 102.0
    run(RoundBegan(2), TestResult(ONE, Status.FAILED, 1.0))
    assert run.watch.summary(103.0).startswith("[1/3]  2 passed  1 failed  1 flaky  1 s")


def test_a_line_follows_long_silence(now):
    stream, quiet = io.StringIO(), io.StringIO()
    often, rarely = Watched(stream), Watched(quiet, often=False)
    often(Began(ONE))
    for now[0] in (119.0, 121.0, 131.0, 150.0, 152.0):
        often(Tick())
        rarely(Tick())
    assert stream.getvalue().splitlines() == [
        "[0/3]  21 s",
        "  running: a.py::TestA::test_1  4 ranks  21 s",
        "[0/3]  50 s",
        "  running: a.py::TestA::test_1  4 ranks  50 s",
    ]
    assert quiet.getvalue() == ""
    now[0] = 161.0
    rarely(Tick())
    assert quiet.getvalue() == "[0/3]  0:01:01\n"


def report(stream, monkeypatch):
    """Return all that a run writes to ``stream`` in which one test passes slowly and another fails."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stdout", stream)
    reporters = Reporters(PLAN, RunOptions(Path("/root")))
    failure = Remark("[bold] the \t whole " + "text " * 50)
    events = [
        Began(TestName("a.py", "TestA")), Began(ONE), Began(TestName("a.py", "TestB")), Began(OTHER), Tick(),
        Stalled(ONE, "no progress\n  stacks"),
        TestResult(OTHER, Status.FAILED, 0.5, (failure,)), Over(TestName("a.py", "TestB")), Tick(),
        passed(ONE), Began(TWO), Tick(), passed(TWO), Over(TestName("a.py", "TestA")),
    ]  # fmt: skip
    for event in events:
        now[0] += 1.0
        reporters(event)
    reporters(RunEnded())
    return stream.getvalue()


def test_a_terminal_gets_the_report_of_a_pipe_with_styles(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    raw, piped = report(Terminal(), monkeypatch), report(io.StringIO(), monkeypatch)
    assert "a.py::TestA::test_1: no progress\n  stacks\n" in piped
    assert re.sub(r"\x1b\[[\d;]*m", "", raw) == piped != raw


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_no_color_and_a_dumb_terminal_are_honored(monkeypatch, name, value):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.search(r"\x1b\[[\d;]*31m", report(Terminal(), monkeypatch)), "else this test looks for nothing"
    monkeypatch.setenv(name, value)
    raw = report(Terminal(), monkeypatch)
    colors = re.findall(r"\x1b\[([\d;]*)m", raw)
    assert not any(set(code.split(";")) & {"31", "32", "33"} for code in colors)
    assert ("\x1b" in raw) == (name == "NO_COLOR")


# Classes side by side: events in the order of the plan

FOUR = make_plan([file("a"), file("b")], named("a.py::A::1", "a.py::A::2", "a.py::B::1", "b.py::C::1"))


def event_of(word):
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
def test_the_first_class_passes_through_and_the_rest_waits(happens, expected):
    handed_on = []
    ordered = InOrder(FOUR, handed_on.append)
    for word in happens.split():
        ordered(event_of(word))
    assert handed_on == [event_of(word) for word in expected.split()]
