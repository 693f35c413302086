"""``pytest --slots``: distributed tests on slots, the rest as ever, and one report of both."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from test.torch_ext.world.suites import suite_of

PLUGIN = ("-p", "torch_ext.runner.pytest_plugin")
SOURCE = """
import pytest


class TestA(Ranks):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.here = os.path.join(os.path.dirname(__file__), cls.__name__)
        open(cls.here, "w").close()

    def test_meets_the_other(self):
        while not all(os.path.exists(os.path.join(os.path.dirname(__file__), name)) for name in ("TestA", "TestB")):
            time.sleep(0.01)
        self.check()


class TestB(TestA):
    def test_fails(self):
        if self.rank == 1:
            raise ValueError("this is rank 1")

    def test_dies(self):
        os.kill(os.getpid(), 11)

    def test_skips(self):
        self.skipTest("no reason")

    def test_skips_by_pytest(self):
        pytest.skip("as pytest does")

    @unittest.expectedFailure
    def test_xfails(self):
        raise ValueError("expected")

    @unittest.expectedFailure
    def test_dies_where_a_failure_is_expected(self):
        os._exit(1)


class TestInside(Ranks):
    @pytest.fixture(autouse=True)
    def of_pytest(self, tmp_path):
        self.folder = tmp_path

    def test_uses_a_fixture(self):
        self.check()


def test_function(tmp_path):
    pass
"""
ENDINGS = {
    "test_meets_the_other": "passed", "test_fails": "failed", "test_dies": "failed",
    "test_dies_where_a_failure_is_expected": "failed",
    "test_uses_a_fixture": "passed", "test_function": "passed",
}  # fmt: skip


@pytest.mark.costly
def test_reports_are_those_of_the_runner_under_pytests_names(tmp_path):
    xml = tmp_path / "report.xml"
    with suite_of(tmp_path, SOURCE) as suite:
        run = suite.run_pytest(*PLUGIN, "--slots", "8", f"--junitxml={xml}", "-W", "default")
    assert run.code == 1 and run.status == ENDINGS, run
    assert re.search(r"^SKIPPED \[1\] test_suite.py:\d+: .*no reason", run.out, re.M), run
    assert re.search(r"^SKIPPED \[1\] test_suite.py:\d+: .*as pytest does", run.out, re.M), run
    assert re.search(r"rank 1 raised ValueError at test_suite.py:\d+: this is rank 1", run.out)
    assert "rerun: python -m pytest test_suite.py::TestB::test_fails" in run.out and "SIGSEGV" in run.out
    assert "site-packages/_pytest" not in run.out and "1 xfailed" in run.out
    assert "1 distributed tests run in pytest's process" in run.out and "which uses the fixture" in run.out
    order = re.findall(r"^test_suite\.py::(?:(\w+)::)?\w+ (?!FAILED)[A-Z]", run.out, re.M)
    assert [cls for cls, _ in itertools.groupby(order)] == list(dict.fromkeys(order)) and order[0] == "TestA"
    root = ElementTree.parse(xml).getroot().find("testsuite")
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("10", "3", "0")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--slots", "8", "-n", "2"), 0, "-n 2 runs at most 2 classes at a time on slots"),
        (("-n", "1"), 0, "-n starts processes that know nothing of each other's ranks; --slots auto shares the cores"),
        (("--slots", "none"), 4, "got --slots 'none', expected a number above 0, auto or off"),
    ],
)
def test_concurrency_follows_slots_or_pytest_explains(tmp_path, arguments, code, message):
    with suite_of(tmp_path, SOURCE) as suite:
        run = suite.run_pytest(*PLUGIN, *arguments, "-k", "test_function")
        assert message in run.out + run.err and run.code == code, run
        assert ("[gw" in run.out) == (arguments[0] == "-n"), run


@pytest.mark.costly
@pytest.mark.parametrize("slots", [("--slots", "8", "-x"), pytest.param((), marks=pytest.mark.long)])
def test_x_stops_at_the_first_failure_and_without_slots_everything_is_pytests(tmp_path, slots):
    with suite_of(tmp_path, SOURCE) as suite:
        run = suite.run_pytest(*PLUGIN, *slots, "-k", "test_fails or test_function" if slots else "fails or dies_where")
        failed = ["test_fails"] if slots else ["test_dies_where_a_failure_is_expected", "test_fails"]
        assert run.code == 1 and run.status == dict.fromkeys(failed, "failed"), run
        assert ("stopping after 1 failures" in run.out) == ("rerun: python -m pytest" in run.out) == bool(slots), run


INTERRUPTED = """
class TestA(Ranks):
    def test_waits(self):
        time.sleep(600)


class TestB(Ranks):
    def test_fails(self):
        raise ValueError("no")


class TestC(Ranks):
    @classmethod
    def setUpClass(cls):
        raise ValueError("never")

    def test_waits(self):
        pass
"""
CTRL_C = """
from torch_ext.runner import execute
from torch_ext.results import TestResult

run, told = execute.RunExecutor.run, set()


def interrupted(self, plan, sink):
    def take(event):
        sink(event)
        if isinstance(event, TestResult):
            told.add(event.test.cls)
        if told == {"TestB", "TestC"}:
            raise KeyboardInterrupt

    run(self, plan, take)


execute.RunExecutor.run = interrupted
"""


@pytest.mark.long
def test_interrupt_reports_finished_tests_out_of_order(tmp_path):
    with suite_of(tmp_path, INTERRUPTED) as suite:
        (tmp_path / "conftest.py").write_text(CTRL_C)
        run = suite.run_pytest(*PLUGIN, "--slots", "8")
    assert run.code == 2 and run.status == {"test_fails": "failed", "TestC": "error"}, run
    assert "KeyboardInterrupt" in run.out and "1 failed, 1 error" in run.out, run
    assert re.search(r"^test_suite\.py::TestC ERROR", run.out, re.M), run
