"""What a class does before its first test and after its last counts: its process may not die or hang in silence."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import Programs, programs
from test.torch_ext.world.suites import Run

# What the class process does in tearDownClass, and the words that must tell it.
DEATHS = {
    "sigkill": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "exit_0": ("os._exit(0)", "code 0"),
    "system_exit": ("sys.exit(0)", "SystemExit"),
    "class_cleanup": ("cls.addClassCleanup(os.kill, os.getpid(), signal.SIGKILL)", "SIGKILL"),
}
HANGS = {"sleep": "forever()", "stop": "os.kill(os.getpid(), signal.SIGSTOP)"}

ENDS = "".join(
    f"""
class TestEnd_{name}({base}):
    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        {statement}

    def test_{name}(self):
        pass
"""
    for number, (name, (statement, _)) in enumerate(DEATHS.items())
    for base in [("unittest.TestCase", "Ranks", "Threads", "Standing")[number % 4]]
)

HANGING = "".join(
    f"""
class TestEnd_{name}(unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        {statement}

    def test_{name}(self):
        pass
"""
    for name, statement in HANGS.items()
)

# Nobody but the supervisor knows the limit of such a test. It would end by itself before its limit and 30 s are over.
WITHOUT_RANKS = """
class TestWithoutRanks(unittest.TestCase):
    def test_sleeps(self):
        time.sleep(25)
        note("slept")
"""

BEGINNING = """
class TestBeginning(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        forever()

    def test_never_begun(self):
        pass


class TestNext(unittest.TestCase):
    def test_next(self):
        pass
"""

MODULE_END = """
def tearDownModule():
    {statement}


class TestLast(unittest.TestCase):
    def test_last(self):
        pass
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("class_end"), ENDS) as suite:
        yield suite


@pytest.fixture(scope="module")
def run(suite: Programs) -> Run:
    return suite.run()


@pytest.mark.parametrize("name", DEATHS)
def test_death_in_tear_down_class_is_an_error_of_the_class(run: Run, name: str) -> None:
    assert run.status.get(f"test_{name}") == "passed", run
    assert run.status.get(f"TestEnd_{name}") == "failed", run
    assert DEATHS[name][1] in run.text[f"TestEnd_{name}"]


def test_every_death_of_a_class_is_counted(run: Run, suite: Programs) -> None:
    assert run.code == 1
    assert run.out.splitlines()[-1] == f"{len(DEATHS)} passed, {len(DEATHS)} failed, 0 skipped", run
    suite.assert_nothing_left()


@pytest.fixture(scope="module")
def suite_that_hangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("hanging"), HANGING) as suite:
        suite.add("test_begin.py", BEGINNING)
        suite.add("test_without_ranks.py", WITHOUT_RANKS)
        suite.add("test_module.py", MODULE_END.format(statement="forever()"))
        yield suite


@pytest.fixture(scope="module")
def hanging(suite_that_hangs: Programs) -> Run:
    return suite_that_hangs.run("--timeout", "2")


@pytest.mark.parametrize(
    ("cls", "where"),
    [
        ("TestEnd_sleep", "tearDownClass"),
        ("TestEnd_stop", ""),
        ("TestLast", "tearDownModule"),
        ("TestBeginning", "setUpClass"),
    ],
)
def test_hang_around_the_tests_is_ended_within_the_limit_of_a_test(hanging: Run, cls: str, where: str) -> None:
    assert hanging.status.get(cls) == "failed", hanging
    assert where in hanging.text[cls]


def test_a_test_without_ranks_ends_at_its_limit(hanging: Run, suite_that_hangs: Programs) -> None:
    assert hanging.status.get("test_sleeps") == "failed", hanging
    assert "hung until it was killed" in hanging.text["test_sleeps"]
    assert "in test_sleeps" in hanging.text["test_sleeps"], "where it was"
    assert not (suite_that_hangs.folder / "slept").exists()


def test_classes_after_one_that_hung_run(hanging: Run, suite_that_hangs: Programs) -> None:
    assert hanging.status.get("test_next") == "passed", hanging
    assert hanging.code == 1
    suite_that_hangs.assert_nothing_left()


def test_death_at_the_end_is_told_by_the_file_itself(tmp_path_factory: pytest.TempPathFactory) -> None:
    source = MODULE_END.format(statement="os.kill(os.getpid(), signal.SIGKILL)") + "\nrun_tests()\n"
    with programs(tmp_path_factory.mktemp("file"), source) as suite:
        run = suite.finish(suite.start([str(suite.file)]))
        assert run.code == 1, run
        assert "SIGKILL" in run.out


LATE = """
class TestLate(unittest.TestCase):
    def test_1_passes(self):
        print("printed by the first")
        note("begun", os.getpid())
        await_note("runner stopped")

    def test_2_dies(self):
        print("printed by the second")
        note("dying")
        os.kill(os.getpid(), signal.SIGKILL)

    def test_3_fails(self):
        print("printed by the third", end="")
        self.fail()

    def test_4_fails(self):
        self.fail()
"""


def test_output_belongs_to_the_test_that_printed_it_however_late_the_runner_looks(tmp_path: Path) -> None:
    with programs(tmp_path, LATE) as suite:
        process = suite.start_runner(extra={"PYTHONUNBUFFERED": ""})
        suite.await_note("begun", process)
        os.kill(process.pid, signal.SIGSTOP)
        (suite.folder / "runner stopped").touch()
        suite.await_note("dying", process)
        os.kill(process.pid, signal.SIGCONT)
        run = suite.finish(process)
        printed = {name: re.findall(r"printed by the (\w+)", text) for name, text in run.text.items()}
        assert printed == {"test_2_dies": ["second"], "test_3_fails": ["third"], "test_4_fails": []}, run
