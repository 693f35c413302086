"""Remembered names: what a file defines may depend on more than its text; the tests that it defines now run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import Programs, programs
from test.torch_ext.world.suites import CHECKOUT, Run

# Where a file's cases come from; no import tells of any.
SOURCES = {
    "data_file": "json.load(open(os.path.join(HERE, 'cases.json')))",
    "environment": "os.environ.get('CASES', 'none').split()",
    "folder": "[name[:-5] for name in sorted(os.listdir(HERE)) if name.endswith('.case')]",
    "program": "subprocess.check_output(['cat', os.path.join(HERE, 'cases.txt')], text=True).split()",
}
GENERATED = """
class TestGenerated(unittest.TestCase):
    pass


def make(case):
    def test(self):
        self.assertNotEqual(case, "bad")
    return test


for case in {cases}:
    setattr(TestGenerated, f"test_{source}_{{case}}", make(case))
"""


def tell(suite: Programs, *cases: str) -> dict[str, str]:
    """Put the cases wherever a source looks for them; return the environment."""
    (suite.folder / "cases.json").write_text(json.dumps(cases))
    (suite.folder / "cases.txt").write_text(" ".join(cases))
    for path in suite.folder.glob("*.case"):
        path.unlink()
    for case in cases:
        (suite.folder / f"{case}.case").touch()
    return {"CASES": " ".join(cases)}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("names"), "") as suite:
        for source, cases in SOURCES.items():
            suite.add(f"test_{source}.py", GENERATED.format(cases=cases, source=source))
        run = suite.run(extra=tell(suite, "one", "two"))
        assert run.out.splitlines()[-1] == f"{2 * len(SOURCES)} passed, 0 failed, 0 skipped", run
        yield suite


@pytest.fixture(scope="module")
def run(suite: Programs) -> Run:
    """The run after a case was taken away and a bad one was added."""
    return suite.run(extra=tell(suite, "two", "bad"))


@pytest.mark.parametrize("source", SOURCES)
def test_a_case_that_was_added_runs(run: Run, source: str) -> None:
    assert run.status.get(f"test_{source}_bad") == "failed", run


@pytest.mark.parametrize("source", SOURCES)
def test_a_case_that_was_taken_away_has_no_result(run: Run, source: str) -> None:
    assert f"test_{source}_one" not in run.status, run


def test_the_cases_that_stayed_pass_and_the_rest_fails(run: Run) -> None:
    assert run.code == 1
    assert run.out.splitlines()[-1] == f"{len(SOURCES)} passed, {len(SOURCES)} failed, 0 skipped", run


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_whose_names_differ_says_so(run: Run, source: str) -> None:
    told = [line for line in (run.out + run.err).splitlines() if f"test_{source}.py" in line and "::" not in line]
    assert any("remember" in line for line in told), run


@pytest.mark.parametrize("source", SOURCES)
def test_a_new_case_can_be_selected(suite: Programs, run: Run, source: str) -> None:
    found = suite.run("-i", f"test_{source}_three", "--list", extra=tell(suite, "three"))
    assert found.out == f"test_{source}.py::TestGenerated::test_{source}_three\n", found


def test_a_file_that_looks_at_nothing_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "suites").mkdir()
    for number in range(30):
        text = "import unittest\n\n\nclass TestA(unittest.TestCase):\n    def test_a(self):\n        pass\n"
        (tmp_path / "suites" / f"test_{number}.py").write_text(text)
    command = [sys.executable, str(CHECKOUT / "run_test.py"), "--list", "--root", str(tmp_path / "suites")]
    variables = {**os.environ, "TORCH_EXT_CACHE": str(tmp_path / "cache")}
    first, second = (
        subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert first.stdout == second.stdout and len(first.stdout.splitlines()) == 30
    assert "imports 30 files to name their tests" in first.stderr
    assert second.stderr == "30 tests\n"


DOTS = """
class TestDotsOfRanks(Ranks):
    pass


class TestDotsOfClass(Standing):
    pass


class TestDotsOfThreads(Threads):
    pass


@with_timeout(3)
def test_sleeps(self):
    forever()


for cls in (TestDotsOfRanks, TestDotsOfClass, TestDotsOfThreads):
    base = cls.__name__
    setattr(cls, f"test_{base}_0.5", lambda self: self.check())
    setattr(cls, f"test_{base}_..", lambda self: self.fail(f"rank {self.rank} ran"))
setattr(TestDotsOfRanks, "test_limit_0.5", test_sleeps)
"""


def test_name_with_dots_is_the_name_of_a_test(tmp_path: Path) -> None:
    """Tests that are made of numbers (``test_tolerance_0.5``) have such names."""
    told = tmp_path / "events.jsonl"
    with programs(tmp_path, DOTS) as suite:
        run = suite.run("--json", str(told))
    events = [json.loads(line) for line in told.read_text().splitlines()]
    ended = {each["method"]: each for each in events if each["event"] == "result"}
    for base in ("Ranks", "Class", "Threads"):
        assert ended[f"test_TestDotsOf{base}_0.5"]["status"] == "passed", run
        assert "ran" in ended[f"test_TestDotsOf{base}_.."]["text"], run
    assert "timed out" in ended["test_limit_0.5"]["text"], run
