"""The text report: exact text on a pipe; on a terminal the same text with colours."""

import io
import re
from pathlib import Path

import pytest

from test.torch_ext.runner.fakes import Terminal, file, named
from torch_ext.results import Over, Remark, RunEnded, Status, TestName, TestResult
from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.tally import Tally
from torch_ext.runner.reporters.text import TextReporter, Writer, rerun_command
from torch_ext.runner.schedule import make_plan
from torch_ext.world.wording import LEFT_BEHIND

FILE = file("fsdp/test_a")
ONE, TWO, THREE, OTHER = named(
    *(f"{FILE.name}::{name}" for name in ("TestA::test_1", "TestA::test_2", "TestA::test_3", "TestB::test_1"))
)


def passed(test):
    return TestResult(test, Status.PASSED, 1.5)


def failed(test, message="boom"):
    return TestResult(test, Status.FAILED, 0.5, (Remark(message),) if message else ())


def skipped(test, reason="needs 2 GPUs"):
    return TestResult(test, Status.SKIPPED, 0.0, reason=reason)


def report(results, planned=None, *, stream=None, interrupted=False, **options):
    """Return all output for ``results``, with ``T s`` for the total time, the only thing that varies."""
    stream = io.StringIO() if stream is None else stream
    plan = make_plan([FILE], [result.test for result in results] if planned is None else planned)
    tally = Tally(plan)
    made = TextReporter(tally, RunOptions(Path("/root"), **options), Writer(stream))
    for event in (*results, *(Over(TestName(batch.file.name, batch.cls)) for batch in plan), RunEnded(interrupted)):
        tally(event)
        made(event)
    return re.sub(r"(Ran \d+ tests? in )\d+\.\d\d s", r"\1T s", stream.getvalue())


def test_default_is_one_line_a_class_and_the_counts_last():
    assert report([passed(ONE), skipped(TWO), passed(THREE), passed(OTHER)]) == (
        "fsdp/test_a.py::TestA  2 passed, 1 skipped  3.00 s\n"
        "fsdp/test_a.py::TestB  1 passed  1.50 s\n"
        "Skipped:\n"
        "     1  needs 2 GPUs\n"
        "Ran 4 tests in T s\n"
        "3 passed, 0 failed, 1 skipped\n"
    )


def test_verbose_is_one_line_a_test_with_the_reason_of_a_skip():
    lines = report([passed(ONE), skipped(TWO)], verbosity=1).splitlines()
    assert lines[:2] == [
        "fsdp/test_a.py::TestA::test_1  passed  1.50 s",
        "fsdp/test_a.py::TestA::test_2  skipped  0.00 s  needs 2 GPUs",
    ]
    assert not any(line.startswith("fsdp/test_a.py::TestA  ") for line in lines)


def test_quiet_shows_failures_and_summary_only():
    lines = report([passed(ONE), failed(TWO)], verbosity=-1).splitlines()
    assert lines[:3] == ["", "FAILED fsdp/test_a.py::TestA::test_2  0.50 s", "boom"]
    assert not any("1 passed, 1 failed  " in line for line in lines)
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"


def test_a_failure_is_one_block_as_it_happens_and_is_named_at_the_end_of_several_results():
    text = report([failed(ONE, "line 1\nline 2\n")])
    block = (
        "\nFAILED fsdp/test_a.py::TestA::test_1  0.50 s\nline 1\nline 2\n"
        "rerun: python run_test.py -i fsdp/test_a.py::TestA::test_1\n\n"
    )
    assert text.startswith(block)
    assert text.endswith("\nRan 1 test in T s\n0 passed, 1 failed, 0 skipped\n") and "Failed:" not in text
    text = report([failed(ONE, "line 1\n"), passed(TWO)])
    assert f"\nFailed:\n  {ONE.id}\nRan 2 tests in T s\n" in text


NASTY = "[rank 0] [bold]x[/bold] [/] :smile: \x1b[31mred\x1b[0m\ttab \x07" + "long " * 200 + "\n\n  indented"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_message_is_printed_as_it_is_but_commands_no_terminal(kind):
    shown = NASTY.replace("\x1b", r"\x1b").replace("\x07", r"\x07")
    text = report([failed(ONE, NASTY)], stream=kind())
    assert f"\n{shown}\nrerun: " in text
    assert "\x07" not in text and "\x1b[31m" not in text


def test_a_terminal_gets_colours_and_nothing_else(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    results = [
        passed(ONE),
        failed(TWO, "[rank 0] x"),
        skipped(THREE, "[rank 0] :smile: " + "long " * 30),
        passed(OTHER),
    ]
    for verbosity in (-1, 0, 1):
        coloured = report(results, stream=Terminal(), verbosity=verbosity)
        assert "\x1b[" in coloured
        assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == report(results, verbosity=verbosity)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_unencodable_characters_are_escaped(encoding):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="surrogateescape")  # as stdout in the C locale
    Writer(stream).line("message caf\xe9 \ud800")
    assert (
        raw.getvalue().decode(encoding)
        == ("message caf\\xe9" if encoding == "ascii" else "message caf\xe9") + " \\ud800\n"
    )


def test_expected_failures_pass_and_unexpected_successes_fail():
    results = [TestResult(ONE, Status.XFAIL, 0.0), TestResult(TWO, Status.UNEXPECTED_SUCCESS, 0.0)]
    text = report(results, verbosity=1)
    assert "test_1  expected failure" in text
    assert "FAILED fsdp/test_a.py::TestA::test_2  0.00 s\nThe test is marked as an expected failure and passed" in text
    assert text.endswith("\n1 passed, 1 failed, 0 skipped\n")


def test_reasons_and_warnings_are_grouped_and_leftover_processes_come_with_their_test():
    results = [skipped(ONE, "rare"), skipped(TWO, "often"), skipped(THREE, "often"), skipped(OTHER, "")]
    results += [TestResult(TestName(FILE.name, "TestC", "t"), Status.PASSED, 0.0, warnings=("old torch", "old torch"))]
    text = report(results)
    assert "Skipped:\n     2  often\n     1  rare\n     1  no reason given\nWarnings:\n     2  old torch\n" in text
    reported = f"rank 1 {LEFT_BEHIND}, which was ended: sleep 600"
    text = report([TestResult(ONE, Status.PASSED, 1.0, warnings=("the import took long", reported))])
    assert text.startswith(f"LEAK {ONE.id}: {reported}\n")


def test_run_of_skips_only_reports_that_nothing_ran():
    sentence = "Nothing ran: every test was skipped."
    assert sentence in report([skipped(ONE), skipped(TWO)])
    assert sentence not in report([skipped(ONE), passed(TWO)])


def test_planned_test_without_a_result_is_reported_and_fails_the_run():
    text = report([passed(ONE)], [ONE, TWO, THREE])
    assert "fsdp/test_a.py::TestA  1 passed, 2 not run  1.50 s\n" in text
    assert f"Not run: 2 tests, the first of them {TWO.id}\n" in text
    text = report([], [ONE], interrupted=True)
    assert "Interrupted.\nNothing ran.\nNot run: 1 test, the first of them" in text
    assert text.endswith("\n0 passed, 0 failed, 0 skipped\n")


def test_a_failed_class_is_counted_and_its_line_waits_for_its_tests():
    text = report([failed(TestName(FILE.name, "TestA"), "setUpClass raised")], [ONE, TWO])
    assert "rerun: python run_test.py -i fsdp/test_a.py::TestA\n" in text
    assert "fsdp/test_a.py::TestA  1 failed, 2 not run  0.50 s\n" in text
    text = report([passed(ONE), failed(TestName(FILE.name, "TestA"), "tearDownClass raised")], [ONE])
    assert text.count("fsdp/test_a.py::TestA  1 passed, 1 failed  2.00 s\n") == 1
    assert text.endswith("\n1 passed, 1 failed, 0 skipped\n")


def test_the_rerun_line_repeats_the_conditions_that_were_given():
    options = RunOptions(
        Path("/x/my suites"), typed_root="my suites", device="cpu", timeout_s=7.5, start_method="interpreter"
    )
    assert rerun_command(options, ONE) == (
        "python run_test.py -i fsdp/test_a.py::TestA::test_1 "
        "--root 'my suites' --device cpu --timeout 7.5 --start-method interpreter"
    )
    racing = RunOptions(Path("/x"), races="report", schedule="random:7", cluster="local:2")
    assert rerun_command(racing, ONE) == (
        "python run_test.py -i fsdp/test_a.py::TestA::test_1 --races report --schedule random:7 --cluster local:2"
    )
    spaced = rerun_command(RunOptions(Path("/x")), TestName(FILE.name, "TestA", "test_[a b]"))
    assert spaced == "python run_test.py -i 'fsdp/test_a.py::TestA::test_[a b]'"
    alone = RunOptions(Path("/x"), script="my suites/test_a.py", device="cpu")
    assert rerun_command(alone, ONE) == "python 'my suites/test_a.py' TestA.test_1 --device cpu"
    assert rerun_command(alone, TestName(FILE.name)) == "python 'my suites/test_a.py' --device cpu"
