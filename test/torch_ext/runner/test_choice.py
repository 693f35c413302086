"""What is chosen, in which order, how often, and what is remembered of it, over an executor without processes.

A failure here means that tests run which nobody asked for or, far worse, that some are left out in silence.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from test.torch_ext.runner.fakes import FakeCollector, FakeExecutor
from torch_ext.results import Remark, Status, TestName, TestResult
from torch_ext.runner.choice import History, divide
from torch_ext.runner.cli import main

LAYOUT = {
    "a/test_one.py": ["TestA.test_1", "TestA.test_2", "TestB.test_1"],
    "b/test_two.py": ["TestC.test_1", "TestC.test_2", "TestD.test_1"],
}
IDS = [f"{file}::{name.replace('.', '::')}" for file, names in LAYOUT.items() for name in names]
A1, A2, B1, C1, C2, D1 = IDS
Command = Callable[..., int]


@pytest.fixture
def command(root: Path, executor: FakeExecutor) -> Command:
    def run(*arguments: str) -> int:
        executor.ran.clear()
        return main(["--root", "suites", *arguments])

    return run


def ending(test: str, status: Status = Status.FAILED, duration_s: float = 0.1) -> TestResult:
    return TestResult(TestName(*test.split("::")), status, duration_s, (Remark("boom"),))


class Flaky(FakeExecutor):
    """Fails each test as often as ``failures`` says, then passes it."""

    def __init__(self, failures: dict[str, int]) -> None:
        super().__init__(FakeCollector(LAYOUT))
        self.failures = failures

    def _run_all(self, tests, options, sink):  # type: ignore[no-untyped-def]
        for test in tests:
            self.endings = {}
            if self.failures.get(test.id, 0) > 0:
                self.failures[test.id] -= 1
                self.endings = {test.id: ending(test.id)}
            if not super()._run_all([test], options, sink):
                return False
        return True


@pytest.fixture
def flaky(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Flaky]:
    def make(**failures: int) -> Flaky:
        found = Flaky({globals()[name]: number for name, number in failures.items()})
        monkeypatch.setitem(sys.modules, "torch_ext.runner.execute", found)
        return found

    return make


# --- bare patterns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["a"], ["suites/a/test_one.py"], ["TestA", "-q", "TestB"], ["-i", "TestA", "--", "TestB"]]
)
def test_patterns_need_no_flag(command: Command, executor: FakeExecutor, arguments: list[str]) -> None:
    assert command(*arguments) == 0
    assert executor.ran == [A1, A2, B1]


def test_a_path_outside_the_root_brings_its_own(root: Path, executor: FakeExecutor) -> None:
    assert main([str(root / "a")]) == 1  # the fake names no tests of such a file
    assert executor.fake_collector.asked == ["test_one.py"]


def test_a_folder_here_that_holds_tests_is_a_path_and_another_is_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: FakeExecutor
) -> None:
    for name in ("my_tests/deep/test_one.py", "data/readme"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("TORCH_EXT_CACHE", str(tmp_path / "cache"))  # no names that others have remembered
    monkeypatch.chdir(tmp_path)
    main(["my_tests"])
    assert executor.fake_collector.asked == ["deep/test_one.py"]
    main(["data"])
    assert "distributed/fsdp/test_fsdp_input.py" in executor.fake_collector.asked


# --- what failed ------------------------------------------------------------------------------------------------------


def test_last_failed_runs_what_failed_when_it_last_ran(
    command: Command, executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--last-failed") == 2
    assert "nothing selected: none of these tests failed when it last ran" in capsys.readouterr().err
    executor.endings = {A2: ending(A2), D1: ending(D1)}
    command()
    command("TestB")  # what does not run keeps its record
    assert command("--last-failed") == 1 and executor.ran == [A2, D1]
    executor.endings = {D1: ending(D1)}
    command("TestA")
    assert command("--last-failed") == 1 and executor.ran == [D1]


def test_a_class_that_failed_as_a_whole_failed_with_all_its_tests(command: Command, executor: FakeExecutor) -> None:
    executor.endings = {A1: TestResult(TestName("a/test_one.py", "TestA"), Status.FAILED, 0.0), A2: None}
    command()
    executor.endings = {}
    assert command("--last-failed") == 0 and executor.ran == [A1, A2]
    assert command("--last-failed") == 2


def test_what_failed_in_one_round_failed_last_time(command: Command, flaky: Callable[..., Flaky]) -> None:
    ran = flaky(A2=1)  # in the first round
    assert command("--repeat", "3", "TestA") == 1
    ran.ran.clear()
    assert command("--last-failed") == 0 and ran.ran == [A2]
    assert command("--last-failed") == 2


# --- what changed -----------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, root: Path) -> Path:
    (tmp_path / "helper.py").write_text("# helps\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "suites", "helper.py")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_changed_runs_files_that_differ(
    repository: Path, command: Command, executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--changed") == 2
    assert "no test's file, nor a module that one imports, differs from HEAD" in capsys.readouterr().err
    (repository / "suites/b/test_two.py").write_text("# changed\n")
    assert command("--changed") == 0 and executor.ran == [C1, C2, D1]
    assert command("--changed", "TestD") == 2  # no revision, and no path either
    assert "git knows no revision 'TestD'; write --changed=REV" in capsys.readouterr().err
    assert command("TestD", "--changed") == 0 and executor.ran == [D1]
    git(repository, "commit", "-qam", "two")
    assert command("--changed") == 2
    assert command("--changed", "HEAD~1") == 0 and executor.ran == [C1, C2, D1]


def test_changed_follows_imports(repository: Path, command: Command, executor: FakeExecutor) -> None:
    executor.fake_collector.imported = (str(repository / "helper.py"),)
    command("a", "--list")
    executor.fake_collector.imported = ()
    command("b", "--list")
    (repository / "helper.py").write_text("# helps more\n")
    executor.fake_collector.imported = (str(repository / "helper.py"),)
    assert command("--changed", "-q") == 0
    assert executor.ran == [A1, A2, B1]


def test_changed_counts_new_files(repository: Path, command: Command, executor: FakeExecutor) -> None:
    git(repository, "rm", "-q", "--cached", "suites/a/test_one.py")
    git(repository, "commit", "-qm", "gone")
    assert command("--changed") == 0 and executor.ran == [A1, A2, B1]


def test_changed_says_that_a_clone_is_shallow(
    repository: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "suites/b/test_two.py").write_text("# changed\n")
    git(repository, "commit", "-qam", "two")
    git(repository, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    assert main(["--root", "shallow/suites", "--changed=HEAD~1"]) == 2
    told = "git knows no revision 'HEAD~1'; this clone is shallow and may lack it; fetch more of it first: git fetch "
    assert told in capsys.readouterr().err
    assert command("--changed=HEAD~1") == 0


def test_changed_without_git_is_a_usage_error(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--changed") == 2
    assert "--changed asks git, which says" in capsys.readouterr().err


# --- parts ------------------------------------------------------------------------------------------------------------


def test_parts_are_everything_once(command: Command, executor: FakeExecutor) -> None:
    ran: list[str] = []
    for part in ("1/3", "2/3", "3/3"):
        assert command("--shard", part) == 0
        ran += executor.ran
    assert sorted(ran) == IDS


def test_parts_do_not_depend_on_what_this_machine_remembers(command: Command, executor: FakeExecutor) -> None:
    command("--shard", "1/2")
    before = list(executor.ran)
    executor.endings = {A1: ending(A1, Status.PASSED, 500.0)}
    command("-q")
    command("--shard", "1/2")
    assert executor.ran == before


def test_parts_are_balanced_by_the_times_of_a_report(
    command: Command, executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    executor.endings = {A1: ending(A1, Status.PASSED, 100.0)}
    command("--json", "times.jsonl")
    capsys.readouterr()
    command("--shard", "1/2", "--times", "times.jsonl")
    assert executor.ran == [A1, A2]
    said = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(r"Part 1 of 2: 2 of 6 tests, 100 of 101 s, of plan [0-9a-f]{8}\.", said)
    command("--shard", "2/2", "--times", "times.jsonl")
    assert executor.ran == [B1, C1, C2, D1]
    assert said[-9:] == capsys.readouterr().out.splitlines()[0][-9:]
    assert command("--shard", "1/2", "--times", "suites/a/test_one.py") == 2
    assert "which is no file that --json wrote" in capsys.readouterr().err


def test_a_part_without_tests_says_so(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("TestA", "--shard", "2/2") == 2
    assert "nothing selected: this part has no tests; divide by fewer" in capsys.readouterr().err
    for wrong in ("0/2", "3/2", "2", "a/b"):
        assert command("--shard", wrong) == 2
        assert f"got '{wrong}', expected I/N" in capsys.readouterr().err


def test_parts_are_even() -> None:
    weights = {TestName("f.py", f"Test{number}", "test"): 1.0 + number % 7 for number in range(100)}
    sums = [sum(weights[test] for test in part) for part in divide(weights, 8)]
    assert max(sums) - min(sums) <= 7.0


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_random_order_says_its_seed_and_can_be_had_again(
    command: Command, executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--random-order", "3") == 0
    first = list(executor.ran)
    assert sorted(first) == IDS
    orders = {tuple(first)}
    for _ in range(6):
        capsys.readouterr()
        command("--random-order")
        found = re.match(r"Random order of seed (\d+); --random-order=\1 repeats it\.\n", capsys.readouterr().out)
        assert found
        orders.add(tuple(executor.ran))
        again = list(executor.ran)
        command("--random-order", found[1])
        assert executor.ran == again
    assert len(orders) > 2
    for order in orders:  # files and classes stay together
        assert len(re.sub(r"(.)\1+", r"\1", "".join(test[0] for test in order))) == 2
        assert len(re.sub(r"(.)\1+", r"\1", "".join(test.split("::")[1][-1] for test in order))) == 4


# --- again ------------------------------------------------------------------------------------------------------------


def test_a_pass_on_rerun_is_flaky_and_never_passed(
    command: Command, flaky: Callable[..., Flaky], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = flaky(A2=1, C1=3)
    assert command("--reruns", "2") == 1
    assert ran.ran == [*IDS, A2, C1, C1]
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "4 passed, 1 failed, 0 skipped, 1 flaky"
    assert f"FLAKY {A2}: it failed once, then passed" in out and f"Flaky:\n  {A2}\nFailed:\n  {C1}\n" in out
    assert f"FAILED {C1}  0.10 s  attempt 3 of 3\n" in out


def test_a_flake_fails_the_command_only_if_asked(command: Command, flaky: Callable[..., Flaky]) -> None:
    flaky(A2=1)
    assert command("--reruns", "1") == 0
    flaky(A2=1)
    assert command("--reruns", "1", "--fail-on-flaky") == 1
    flaky(A2=1)
    assert command("--last-failed") == 2, "a flaky test has not failed"


def test_a_rerun_that_skips_leaves_the_failure(
    command: Command, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Skipping(FakeExecutor):
        def _run_all(self, tests, options, sink):  # type: ignore[no-untyped-def]
            status = Status.SKIPPED if self.ran else Status.FAILED
            self.endings = {A1: ending(A1, status)}
            return super()._run_all(tests, options, sink)

    monkeypatch.setitem(sys.modules, "torch_ext.runner.execute", Skipping(FakeCollector(LAYOUT)))
    assert main(["--root", "suites", A1, "--reruns", "1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


class FailingClass(FakeExecutor):
    """Its TestA fails ``times`` times in ``setUpClass``."""

    def __init__(self, times: int) -> None:
        super().__init__(FakeCollector(LAYOUT))
        self.times = times

    def _run_all(self, tests, options, sink):  # type: ignore[no-untyped-def]
        ours = [test for test in tests if test.cls == "TestA" and self.times]
        if ours:
            self.times -= 1
            problem = Remark("no server")
            sink(TestResult(TestName(ours[0].file, ours[0].cls), Status.FAILED, 0.0, (problem,)))
        return super()._run_all([test for test in tests if test not in ours], options, sink)


@pytest.mark.parametrize(
    ("times", "code", "last"),
    [
        (0, 0, "6 passed, 0 failed, 0 skipped"),
        (1, 0, "6 passed, 0 failed, 0 skipped, 1 flaky"),
        (2, 0, "6 passed, 0 failed, 0 skipped, 1 flaky"),
        (3, 1, "4 passed, 1 failed, 0 skipped"),
    ],
)
def test_a_class_that_failed_before_its_tests_runs_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], times: int, code: int, last: str
) -> None:
    executor = FailingClass(times)
    monkeypatch.setitem(sys.modules, "torch_ext.runner.execute", executor)
    assert main(["--root", "suites", "--reruns", "2"]) == code
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == last
    assert executor.ran.count(A1) == (times < 3) and executor.ran.count(B1) == 1
    assert ("2 tests, the first of them" in out) == (times == 3), out
    assert ("1 class failed as a whole" in out) == (times == 3)


def test_failfast_goes_on_after_a_flake(command: Command, flaky: Callable[..., Flaky]) -> None:
    ran = flaky(A2=1, C1=9)
    assert command("-f", "--reruns", "1") == 1
    assert ran.ran == [A1, A2, A2, B1, C1, C1]


def test_repeat_runs_everything_and_counts_every_round(
    command: Command, flaky: Callable[..., Flaky], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = flaky(A1=1)
    assert command("--repeat", "3", "TestA") == 1
    assert ran.ran == [A1, A2] * 3
    out = capsys.readouterr().out
    assert "Round 2 of 3\n" in out and "Round 3 of 3\n" in out
    assert out.splitlines()[-1] == "5 passed, 1 failed, 0 skipped"


def test_failfast_ends_with_the_round_that_fails(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(Flaky):
        def _run_all(self, tests, options, sink):  # type: ignore[no-untyped-def]
            self.failures = {A2: 1} if len(self.ran) >= 4 else {}
            return super()._run_all(tests, options, sink)

    later = Later({})
    monkeypatch.setitem(sys.modules, "torch_ext.runner.execute", later)
    assert command("TestA", "--repeat", "9", "-f") == 1
    assert later.ran == [A1, A2] * 3


def test_every_report_misses_what_a_later_round_did_not_run(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(Flaky):
        def _run_all(self, tests, options, sink):  # type: ignore[no-untyped-def]
            self.interrupt_at = A2 if len(self.ran) >= 3 else ""
            return super()._run_all(tests, options, sink)

    monkeypatch.setitem(sys.modules, "torch_ext.runner.execute", Stopped({}))
    reports = ("--json", "events", "--junit", "junit.xml", "--html", "page.html")
    assert command("a", "--repeat", "3", *reports) == 130
    assert f"Not run: 2 tests, the first of them {A2}" in capsys.readouterr().out
    end = json.loads(Path("events").read_text().splitlines()[-1])
    assert (end["passed"], end["not_run"]) == (4, [A2, B1])
    assert len(re.findall("<skipped ", Path("junit.xml").read_text())) == 2
    assert "2 not run</b>" in Path("page.html").read_text()


# --- list and history -------------------------------------------------------------------------------------------------


def test_a_list_for_machines_has_the_address_of_each_test(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--list", "TestD", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"test": D1, "file": "b/test_two.py", "class": "TestD", "method": "test_1"}
    assert command("--list", "--json", "list.jsonl") == 0
    assert len(Path("list.jsonl").read_text().splitlines()) == 6


def test_a_list_is_in_the_order_in_which_tests_run(
    command: Command, executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    for order in ("--random-order=7", "--random-order=8"):
        command(order)
        ran = list(executor.ran)
        capsys.readouterr()
        assert ran != IDS and command(order, "--list") == 0
        assert capsys.readouterr().out.splitlines() == ran


def history(tmp_path: Path, device: str = "") -> History:
    return History(tmp_path / "cache", tmp_path / "root", device)


def saved(found: History, *results: tuple[str, float], status: Status = Status.PASSED) -> History:
    found.save([TestResult(TestName("a.py", "A", name), status, duration_s) for name, duration_s in results])
    return found


def records(tmp_path: Path) -> dict[str, list[float]]:
    """The times of each test that lie in the history."""
    (file,) = (tmp_path / "cache/history").glob("*.json")
    return {
        test.split("::")[-1]: [row[3] for row in rows] for test, rows in json.loads(file.read_text())["tests"].items()
    }


def test_a_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_ext.runner.choice._TESTS", 3)
    for number in range(6):
        saved(history(tmp_path), (f"t{number}", 1.0), ("always", float(number)))
        time.sleep(0.002)
    assert records(tmp_path) == {"always": [1.0, 2.0, 3.0, 4.0, 5.0], "t4": [1.0], "t5": [1.0]}
    monkeypatch.setattr("torch_ext.runner.choice._AGE_S", 0.0)
    saved(history(tmp_path), ("t", 9.0))
    assert records(tmp_path) == {}


def test_the_expected_time_is_the_usual_one_on_this_device(tmp_path: Path) -> None:
    test = TestName("a.py", "A", "t")
    for device, times in (("cpu", (1.0, 1.2, 50.0)), ("sim", (7.0,))):
        for duration_s in times:
            saved(history(tmp_path, device), ("t", duration_s))
    assert history(tmp_path, "cpu").expected_s(test) == 1.2
    assert history(tmp_path, "sim").expected_s(test) == 7.0
    assert history(tmp_path, "other").expected_s(test) == 4.1
    assert history(tmp_path).expected_s(TestName("a.py", "A", "never")) is None


TWO_RUNNERS = """
import sys
from pathlib import Path
from torch_ext.runner.choice import History
from torch_ext.results import Status, TestName, TestResult

for number in range(40):
    history = History(Path(sys.argv[1]), Path("/root"), "")
    history.save([TestResult(TestName("a.py", sys.argv[2], f"t{number}"), Status.PASSED, 1.0)])
"""


def test_runners_side_by_side_lose_nothing_of_each_others_history(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_RUNNERS, str(tmp_path)]
    runners = [subprocess.Popen([*command, name]) for name in ("A", "B", "C")]
    assert [runner.wait(timeout=100) for runner in runners] == [0, 0, 0]
    (file,) = tmp_path.rglob("*.json")
    assert len(json.loads(file.read_text())["tests"]) == 120
    assert not list(tmp_path.rglob("*.part"))


def test_a_history_that_is_none_is_no_error(command: Command, tmp_path: Path) -> None:
    assert command() == 0
    (path,) = (tmp_path / "cache/history").glob("*.json")
    for text in ("{", "[]", '{"tests": {"a": [[1]]}}', '{"tests": 3}'):
        path.write_text(text)
        assert command("--last-failed") == 2
    path.unlink()
    path.mkdir()
    assert command("--last-failed") == 2


def test_a_history_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    saved(history(tmp_path), ("t", 1.0), status=Status.FAILED)
    assert history(tmp_path).failed(TestName("a.py", "A", "t"))
    (tmp_path / "cache" / "history").chmod(0o777)
    assert not history(tmp_path).failed(TestName("a.py", "A", "t"))
