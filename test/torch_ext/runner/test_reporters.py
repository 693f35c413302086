"""Reports for machines, of one run of the real command with every kind of result: each report agrees with the run."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from test.torch_ext.interpreter import RUN_TEST, python

SUITE = r"""
import os, signal, threading, time, unittest
import torch.distributed as dist
from torch_ext.testing._internal.common_distributed import MultiProcessTestCase


class TestRanks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_crashes(self):
        print("last words of", self.rank, flush=True)
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    def test_fails(self):
        print(f"\x1b[31mred\x1b[0m \x00 ]]> <&> \ufffe \udcff of {self.rank}", flush=True)
        self.assertEqual(self.rank, 0, "a \x07 bell")

    def test_flakes(self):
        mark = os.path.join(os.path.dirname(__file__), f"seen-{self.rank}")
        if not os.path.exists(mark):
            open(mark, "w").close()
            self.fail("the first time")
        self.make_group()

    def make_group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def test_hangs(self):
        self.make_group()
        if self.rank == 1:
            threading.Event().wait()
        dist.barrier()

    def test_passes(self):
        pass

    @unittest.skip("not today, <b>")
    def test_skipped(self):
        pass


class TestOthers(unittest.TestCase):
    @unittest.expectedFailure
    def test_expected(self):
        self.fail("as it should")

    @unittest.expectedFailure
    def test_unexpected(self):
        pass

    def test_dies(self):
        os._exit(3)


class TestSetUp(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise ValueError("no class today")

    def test_never(self):
        pass
"""


@dataclass
class Ran:
    code: int
    out: str
    err: str
    cases: dict[str, ElementTree.Element]
    suites: ElementTree.Element
    events: list[dict[str, Any]]

    @property
    def text(self):
        """The lines of the text report."""
        return [line for line in self.out.splitlines() if not line.startswith("::")]

    def results(self, method):
        return [one for one in self.events if one["event"] == "result" and one["method"] == method]


def run(folder, *arguments, **extra):
    """Run the command on ``folder``, with its own cache."""
    words = (RUN_TEST, "--root", folder, "--device", "cpu", *arguments)
    return python(*words, folder=folder, TORCH_EXT_CACHE=str(folder / "cache"), **extra)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    import xmlschema  # takes a second

    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_all.py").write_text(SUITE, encoding="utf-8", errors="surrogatepass")
    (folder / "test_broken.py").write_text("import nothing_of_that_name\n")
    files = ["--junit", "out/junit.xml", "--json", "events.jsonl"]
    done = run(folder, *files, "--github", "--reruns", "1", TORCH_EXT_HANG_AFTER="2")
    text = (folder / "out/junit.xml").read_text(encoding="utf-8")
    suites = ElementTree.fromstring(text)
    cases = {case.attrib["name"]: case for case in suites.iter("testcase")}
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    xmlschema.XMLSchema(str(Path(__file__).with_name("junit.xsd"))).validate(text)
    return Ran(done.returncode, done.stdout, done.stderr, cases, suites, events)


def tags(case):
    return [child.tag for child in case]


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "skip", ["raise unittest.SkipTest('no cluster')", "import pytest; pytest.importorskip('no_cluster')"]
)
def test_file_that_skips_as_a_whole_has_not_failed(tmp_path, skip):
    case = "import unittest\nclass TestA(unittest.TestCase):\n    def test_1(self): pass\n"
    (tmp_path / "test_a.py").write_text(case)
    (tmp_path / "test_b.py").write_text(f"{case}{skip}\n")
    done = run(tmp_path)
    assert done.returncode == 0 and "Ran 1 test; 1 file skipped as a whole in " in done.stdout, done
    assert done.stderr == ""
    mistyped = run(tmp_path, "-k", "test_l")
    assert mistyped.returncode == 0 and "1 file skipped as a whole" in mistyped.stdout, mistyped
    assert "warning: none of 1 tests fits -k 'test_l'\n" in mistyped.stderr, mistyped


@pytest.mark.costly
def test_the_text_and_the_exit_code(ran):
    assert ran.code == 1, ran.err
    assert ran.text[-1] == "2 passed, 7 failed, 1 skipped, 1 flaky"
    assert "Ran 9 tests; 1 file failed as a whole; 1 class failed as a whole in " in ran.out
    assert "FLAKY test_all.py::TestRanks::test_flakes: it failed once, then passed\n" in ran.out
    assert "FAILED test_all.py::TestRanks::test_fails" in ran.out and "  attempt 2 of 2\n" in ran.out
    assert re.search(r"\[\d/3\] test_all.py::TestOthers\n", ran.out)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("test_passes", ["system-out"]),
        ("test_skipped", ["skipped"]),
        ("test_expected", ["skipped"]),
        ("test_unexpected", ["failure", "rerunFailure"]),
        ("test_fails", ["failure", "rerunFailure", "system-out", "system-out"]),
        ("test_crashes", ["error", "rerunError", "system-out", "system-out"]),
        ("test_hangs", ["error", "rerunError", "system-out", "system-out"]),
        ("test_dies", ["error", "rerunError"]),
        ("test_flakes", ["flakyFailure"]),
        ("test_never", ["error"]),
        ("setUpClass or tearDownClass", ["error"]),
        ("import", ["error"]),
    ],
)
def test_junit_has_every_ending(ran, name, found):
    assert tags(ran.cases[name]) == found


def test_junit_counts_match_its_cases(ran):
    for suite in (ran.suites, *ran.suites):
        for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            if name in suite.attrib:
                assert int(suite.attrib[name]) == len(list(suite.iter(tag))), (suite.attrib, tag)


def test_junit_reports_the_ending_of_each_rank(ran):
    (output,) = ran.cases["test_passes"].findall("system-out")
    assert output.text == "rank 0 passed\nrank 1 passed"
    case = ran.cases["test_crashes"]
    zero, one = (each.text or "" for each in case.findall("system-out"))
    assert zero.startswith("rank 0 was stopped") and "last words of 0" in zero
    assert one.startswith("rank 1 was killed by SIGSEGV") and "last words of 1" in one
    error = case.find("error")
    assert error.attrib["type"] == "rank killed"
    assert re.fullmatch(r"rank 1 was killed by SIGSEGV at test_\w+\.py:\d+", error.attrib["message"])
    assert "What each rank did in" in (error.text or "")
    hung = ran.cases["test_hangs"].find("error")
    assert "rank 1" in hung.attrib["message"]


def test_junit_escapes_characters_invalid_in_xml(ran):
    text = "".join(each.text or "" for each in ran.cases["test_fails"].findall("system-out"))
    assert r"\x1b[31mred\x1b[0m \x00 ]]> <&> \ufffe" in text
    failure = ran.cases["test_fails"].find("failure")
    assert r"a \x07 bell" in (failure.text or "")


def test_json_lines_begin_and_end(ran):
    start, plan, *_, end = ran.events
    assert (start["event"], start["version"], start["device"]) == ("start", 1, "cpu")
    needs = {one["method"]: (one["world_size"], one["processes"]) for one in plan["tests"]}
    assert needs["test_passes"] == (2, 2) and needs["test_dies"] == (0, 1)
    assert (end["event"], end["passed"], end["failed"], end["skipped"], end["flaky"]) == ("end", 2, 7, 1, 1)
    assert end["not_run"] == ["test_all.py::TestSetUp::test_never"] and not end["interrupted"]


def test_json_lines_report_every_attempt_in_order(ran):
    first, second = ran.results("test_flakes")
    assert (first["status"], first["attempt"], first["again"]) == ("failed", 1, True)
    assert (second["status"], second["attempt"], second["again"]) == ("flaky", 2, False)
    kinds = [one["event"] for one in ran.events if one.get("method") == "test_flakes"]
    assert kinds == ["begin", "result", "begin", "result"]
    assert [one["time"] for one in ran.events] == sorted(one["time"] for one in ran.events)


def test_json_lines_hold_each_rank(ran):
    problem = ran.results("test_crashes")[0]["problems"][0]
    assert (problem["kind"], problem["culprits"]) == ("ranks", [1])
    zero, one = problem["ranks"]
    assert (zero["ending"], one["ending"], one["exit_code"]) == ("stopped", "killed", -11)
    assert "last words of 1" in one["output"]
    assert ran.results("test_dies")[0]["problems"][0]["summary"].endswith("exited with code 3.")


def test_all_reports_agree(ran):
    last = {one["method"]: one["counts_as"] for one in ran.events if one["event"] == "result" and one["method"]}
    words = {"failure": "failed", "error": "failed", "flakyFailure": "flaky", "skipped": "skipped"}
    for method, counted in last.items():
        found = words.get((tags(ran.cases[method]) or [""])[0], "passed")
        assert found == counted or method == "test_expected"


def test_github_gets_one_line_for_each_failure_and_flake(ran):
    lines = [line for line in ran.out.splitlines() if line.startswith("::")]
    assert Counter(line.split()[0] for line in lines) == {"::error": 7, "::warning": 1}
    (crashed,) = [line for line in lines if "test_crashes" in line]
    assert crashed.startswith(
        "::error file=test_all.py,title=test_all.py%3A%3ATestRanks%3A%3Atest_crashes::rank 1 was killed by SIGSEGV at "
    )


PASSING = "import unittest\nclass TestA(unittest.TestCase):\n    def test_1(self): pass\n    def test_2(self): pass\n"


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize("flag", ["--junit", "--json"])
def test_a_report_that_cannot_be_opened_is_a_usage_error_in_one_sentence(tmp_path, flag):
    (tmp_path / "test_a.py").write_text(PASSING)
    (tmp_path / "file").write_text("")
    done = run(tmp_path, flag, "file/report")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "cannot be written to file/report: " in done.stderr and "Ran" not in done.stdout
    done = run(tmp_path, f"{flag}=test_a.py")
    assert done.returncode == 2 and "test_a.py, a Python file" in done.stderr
    assert (tmp_path / "test_a.py").read_text() == PASSING


@pytest.mark.costly
def test_json_on_stdout_moves_the_text_to_stderr(tmp_path):
    (tmp_path / "test_a.py").write_text(PASSING)
    done = run(tmp_path, "--json", "-")
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()][-1] == "end"
    assert done.stderr.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
