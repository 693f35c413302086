"""Which tests are chosen, in which order, how often, and the record kept of them, over an executor without processes.

A failure here means that the run holds other tests than the user asked for or, far worse, lacks some in silence.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test.torch_ext.interpreter import RUN_TEST
from test.torch_ext.runner.fakes import FakeCollector, FakeExecutor, ending
from torch_ext.results import Status, TestName, TestResult
from torch_ext.runner.choice import History, divide

LAYOUT = {
    "a/test_one.py": ["TestA.test_1", "TestA.test_2", "TestB.test_1"],
    "b/test_two.py": ["TestC.test_1", "TestC.test_2", "TestD.test_1"],
}
IDS = [f"{file}::{name.replace('.', '::')}" for file, names in LAYOUT.items() for name in names]
A1, A2, B1, C1, C2, D1 = IDS


class Flaky(FakeExecutor):
    """Fails each test as often as ``failures`` says, then passes it. Before the tests of a file, calls ``before``."""

    def __init__(self, before=lambda executor: None, **failures):
        super().__init__(FakeCollector(LAYOUT))
        self.failures = {globals()[name]: number for name, number in failures.items()}
        self.before = before

    def _run_all(self, tests, options, sink):
        self.before(self)
        for test in tests:
            self.endings = {}
            if self.failures.get(test.id, 0) > 0:
                self.failures[test.id] -= 1
                self.endings = {test.id: ending(test.id)}
            elif self.ran and self.skips:
                self.endings = {test.id: ending(test.id, Status.SKIPPED)}
            if not super()._run_all([test], options, sink):
                return False
        return True

    skips = False  # whether tests of later runs skip instead of passing


@pytest.fixture
def use(cli, monkeypatch):
    """Replace the executor that passes all tests."""

    def use(executor):
        monkeypatch.setitem(sys.modules, "torch_ext.runner.execute", executor)
        cli.executor = executor
        return executor

    return use


# --- bare patterns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["a"], ["suites/a/test_one.py"], ["TestA", "-q", "TestB"], ["-i", "TestA", "--", "TestB"]]
)
def test_patterns_need_no_flag(cli, arguments):
    assert (cli(*arguments).code, cli.ran) == (0, [A1, A2, B1])


def test_path_outside_the_root_sets_the_root(cli, root, monkeypatch):
    monkeypatch.setattr(sys, "argv", [RUN_TEST])
    assert cli.main(str(root / "a")).code == 1  # the fake names no tests of such a file
    assert cli.asked == ["test_one.py"]


def test_folder_with_tests_is_a_path_and_other_folders_are_names(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [RUN_TEST])
    for name in ("my_tests/deep/test_one.py", "data/readme"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    cli.main("my_tests")
    assert cli.asked == ["deep/test_one.py"]
    cli.main("data")
    assert "distributed/fsdp/test_fsdp_input.py" in cli.asked


# --- what failed ------------------------------------------------------------------------------------------------------


def test_last_failed_selects_tests_that_failed_in_their_last_run(cli):
    done = cli("--last-failed")
    assert done.code == 0 and "None of these tests failed when it last ran, so all run." in done.out
    cli.executor.endings = {A2: ending(A2), D1: ending(D1)}
    cli()
    cli("TestB")  # a test that does not run keeps its record
    assert (cli("--last-failed").code, cli.ran) == (1, [A2, D1])
    cli.executor.endings = {D1: ending(D1)}
    cli("TestA")
    assert (cli("--last-failed").code, cli.ran) == (1, [D1])


def test_failure_in_any_round_counts_as_last_failed(cli, use):
    use(Flaky(A2=1))  # in the first round
    assert cli("--repeat", "3", "TestA").code == 1
    assert (cli("--last-failed").code, cli.ran) == (0, [A2])
    assert "None of these tests failed" in cli("--last-failed").out


# --- what changed -----------------------------------------------------------------------------------------------------


def git(folder, *arguments):
    who = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def repository(tmp_path, root):
    (tmp_path / "helper.py").write_text("# helps\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "suites", "helper.py")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_changed_runs_files_that_differ(repository, cli):
    done = cli("--changed", "HEAD")
    assert done.code == 2 and "no test file, nor a module that it imports, differs from HEAD" in done.err
    (repository / "suites/b/test_two.py").write_text("# changed\n")
    assert (cli("--changed", "HEAD").code, cli.ran) == (0, [C1, C2, D1])
    for revision in ("TestD", "--cached"):
        done = cli(f"--changed={revision}")
        assert done.code == 2 and "--changed needs git, which fails in" in done.err and revision in done.err
    assert (cli("TestD", "--changed", "HEAD").code, cli.ran) == (0, [D1])
    git(repository, "commit", "-qam", "two")
    assert cli("--changed", "HEAD").code == 2
    assert (cli("--changed", "HEAD~1").code, cli.ran) == (0, [C1, C2, D1])
    git(repository, "rm", "-q", "--cached", "suites/a/test_one.py")
    git(repository, "commit", "-qm", "gone")
    assert (cli("--changed", "HEAD").code, cli.ran) == (0, [A1, A2, B1]), "new files count"


def test_changed_follows_imports(repository, cli):
    helper = (str(repository / "helper.py"),)
    for folder, imported in (("a", helper), ("b", ())):
        cli.executor.fake_collector.imported = imported
        cli(folder, "--list")
    (repository / "helper.py").write_text("# helps more\n")
    cli.executor.fake_collector.imported = helper
    assert (cli("--changed", "HEAD", "-q").code, cli.ran) == (0, [A1, A2, B1])


# --- parts ------------------------------------------------------------------------------------------------------------


def test_parts_cover_every_test_once_regardless_of_history(cli):
    parts = []
    for time_s in (0.25, 500.0):
        cli.executor.endings = {A1: ending(A1, Status.PASSED, time_s)}
        cli("-q")
        parts.append([list(cli.ran) for part in ("1/3", "2/3", "3/3") if cli("--shard", part).code == 0])
    assert parts[0] == parts[1] and sorted(test for ran in parts[0] for test in ran) == IDS


def test_parts_are_balanced_by_the_times_of_a_report(cli):
    cli.executor.endings = {A1: ending(A1, Status.PASSED, 100.0)}
    cli("--json", "times.jsonl")
    line = cli("--shard", "1/2", "--times", "times.jsonl").out.splitlines()[0]
    assert cli.ran == [A1, A2]
    assert re.fullmatch(r"Part 1 of 2: 2 of 6 tests, 100 of 101 s, of plan [0-9a-f]{8}\.", line)
    assert line[-9:] == cli("--shard", "2/2", "--times", "times.jsonl").out.splitlines()[0][-9:]
    assert cli.ran == [B1, C1, C2, D1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "1/2", "--times", "suites/a/test_one.py"], "which is not a file that --json wrote"),
        (["TestA", "--shard", "2/2"], "nothing selected: this part has no tests; divide by fewer"),
        *((["--shard", wrong], f"got '{wrong}', expected I/N") for wrong in ("0/2", "3/2", "2", "a/b")),
    ],
)
def test_empty_part_is_a_usage_error(cli, arguments, message):
    done = cli(*arguments)
    assert done.code == 2 and message in done.err


def test_parts_are_even():
    weights = {TestName("f.py", f"Test{number}", "test"): 1.0 + number % 7 for number in range(100)}
    sums = [sum(weights[test] for test in part) for part in divide(weights, 8)]
    assert max(sums) - min(sums) <= 7.0


# --- again ------------------------------------------------------------------------------------------------------------


def test_a_pass_on_rerun_is_flaky_and_never_passed(cli, use):
    use(Flaky(A2=1, C1=3))
    done = cli("--reruns", "2")
    assert (done.code, cli.ran) == (1, [*IDS, A2, C1, C1])
    assert done.out.splitlines()[-1] == "4 passed, 1 failed, 0 skipped, 1 flaky"
    assert f"FLAKY {A2}: it failed once, then passed" in done.out
    assert f"Flaky:\n  {A2}\nFailed:\n  {C1}\n" in done.out and f"FAILED {C1}  0.10 s  attempt 3 of 3\n" in done.out


def test_flake_fails_the_command_only_on_request(cli, use):
    for more, code in (([], 0), (["--fail-on-flaky"], 1)):
        use(Flaky(A2=1))
        assert cli("--reruns", "1", *more).code == code
    assert "None of these tests failed" in cli("--last-failed").out, "a flaky test has not failed"


def test_a_rerun_that_skips_leaves_the_failure(cli, use):
    flaky = Flaky(A1=1)
    flaky.skips = True
    use(flaky)
    done = cli(A1, "--reruns", "1")
    assert done.code == 1 and done.out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_class_that_failed_as_a_whole_failed_with_all_its_tests_and_does_not_run_again(cli):
    cli.executor.endings = {A1: TestResult(TestName("a/test_one.py", "TestA"), Status.FAILED, 0.0), A2: None}
    done = cli("--reruns", "2")
    assert (done.code, cli.ran) == (1, IDS)
    assert "2 tests, the first of them" in done.out and "1 class failed as a whole" in done.out
    assert "attempt" not in done.out
    cli.executor.endings = {}
    assert (cli("--last-failed").code, cli.ran) == (0, [A1, A2])
    assert "None of these tests failed" in cli("--last-failed").out


def test_failfast_goes_on_after_a_flake_and_ends_with_the_round_that_fails(cli, use):
    use(Flaky(A2=1, C1=9))
    assert cli("-f", "--reruns", "1").code == 1
    assert cli.ran == [A1, A2, A2, B1, C1, C1]
    use(Flaky(lambda executor: executor.failures.update({A2: 1} if len(executor.ran) == 4 else {})))
    assert cli("TestA", "--repeat", "9", "-f").code == 1
    assert cli.ran == [A1, A2] * 3


def test_repeat_runs_everything_and_counts_every_round(cli, use):
    use(Flaky(A1=1))
    done = cli("--repeat", "3", "TestA")
    assert (done.code, cli.ran) == (1, [A1, A2] * 3)
    assert "Round 2 of 3\n" in done.out and "Round 3 of 3\n" in done.out
    assert done.out.splitlines()[-1] == "5 passed, 1 failed, 0 skipped"


def test_reports_list_tests_missing_from_a_later_round(cli, use):
    use(Flaky(lambda executor: vars(executor).update(interrupt_at=A2 if len(executor.ran) >= 3 else "")))
    done = cli("a", "--repeat", "3", "--json", "events", "--junit", "junit.xml")
    assert done.code == 130 and f"Not run: 2 tests, the first of them {A2}" in done.out
    end = json.loads(Path("events").read_text().splitlines()[-1])
    assert (end["passed"], end["not_run"]) == (4, [A2, B1])
    assert len(re.findall("<skipped ", Path("junit.xml").read_text())) == 2


# --- list and history -------------------------------------------------------------------------------------------------


def test_json_list_has_the_address_of_each_test(cli):
    (line,) = cli("--list", "TestD", "--json", "-").out.splitlines()
    assert json.loads(line) == {"test": D1, "file": "b/test_two.py", "class": "TestD", "method": "test_1"}
    assert cli("--list", "--json", "list.jsonl").code == 0
    assert len(Path("list.jsonl").read_text().splitlines()) == 6


def history(tmp_path):
    return History(tmp_path / "cache", tmp_path / "root")


def saved(found, *results, status=Status.PASSED):
    found.save([TestResult(TestName("a.py", "A", name), status, duration_s) for name, duration_s in results])
    return found


def test_a_history_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_ext.runner.choice._TESTS", 3)
    for number in range(6):
        saved(history(tmp_path), (f"t{number}", 1.0), ("always", float(number)))
    kept = json.loads((tmp_path / "cache/history/tests.json").read_text())["tests"]
    assert {test.split("::")[-1]: took_s for test, (_, took_s) in kept.items()} == {"always": 5.0, "t4": 1.0, "t5": 1.0}


def test_expected_duration_is_the_last_duration(tmp_path):
    saved(history(tmp_path), ("t", 1.0))
    saved(history(tmp_path), ("t", 1.2))
    saved(history(tmp_path), ("t", 0.0), status=Status.SKIPPED)
    assert history(tmp_path).expected_s(TestName("a.py", "A", "t")) == 1.2
    assert history(tmp_path).expected_s(TestName("a.py", "A", "never")) is None
    assert History(tmp_path / "cache", tmp_path / "other").expected_s(TestName("a.py", "A", "t")) is None


TWO_RUNNERS = """
import sys
from pathlib import Path
from torch_ext.runner.choice import History
from torch_ext.results import Status, TestName, TestResult

for number in range(40):
    history = History(Path(sys.argv[1]), Path("/root"))
    history.save([TestResult(TestName("a.py", sys.argv[2], f"t{number}"), Status.PASSED, 1.0)])
"""


def test_concurrent_runners_keep_each_others_history(tmp_path):
    command = [sys.executable, "-c", TWO_RUNNERS, str(tmp_path)]
    runners = [subprocess.Popen([*command, name]) for name in ("A", "B", "C")]
    assert [runner.wait(timeout=100) for runner in runners] == [0, 0, 0]
    (file,) = tmp_path.rglob("*.json")
    assert len(json.loads(file.read_text())["tests"]) == 120
    assert not list(tmp_path.rglob("*.part"))


def test_invalid_history_is_no_error(cli, tmp_path):
    assert cli().code == 0
    (path,) = (tmp_path / "cache/history").glob("*.json")
    for text in ("{", "[]", '{"tests": {"a": [[1]]}}', '{"tests": 3}'):
        path.write_text(text)
        assert "None of these tests failed" in cli("--last-failed").out
    path.unlink()
    path.mkdir()
    assert "None of these tests failed" in cli("--last-failed").out


def test_a_history_that_others_may_write_is_not_read(tmp_path):
    saved(history(tmp_path), ("t", 1.0), status=Status.FAILED)
    assert history(tmp_path).failed(TestName("a.py", "A", "t"))
    (tmp_path / "cache" / "history").chmod(0o777)
    assert not history(tmp_path).failed(TestName("a.py", "A", "t"))
