"""The command from arguments to exit code, over an executor that starts no process."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from test.torch_ext.runner.fakes import FakeExecutor
from torch_ext import cache
from torch_ext.results import Remark, Status, TestName, TestResult
from torch_ext.runner.cli import main, main_for_file

LAYOUT = {
    "distributed/fsdp/test_input.py": ["TestInput.test_dict", "TestInput.test_tuple", "TestMore.test_one"],
    "distributed/rpc/test_rpc.py": ["TestRpc.test_call"],
}
INPUT, RPC = LAYOUT
DICT, TUPLE, ONE = (f"{INPUT}::{name.replace('.', '::')}" for name in LAYOUT[INPUT])
CALL = f"{RPC}::TestRpc::test_call"
CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def command(root: Path, executor: FakeExecutor) -> Callable[..., int]:
    return lambda *arguments: main(["--root", "suites", *arguments])


def failing(name: str) -> dict[str, TestResult | None]:
    return {name: TestResult(TestName(*name.split("::")), Status.FAILED, 0.1, problems=(Remark("boom"),))}


def test_everything_passes(
    command: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 0
    assert executor.ran == [DICT, TUPLE, ONE, CALL]
    assert capsys.readouterr().out.splitlines()[-1] == "4 passed, 0 failed, 0 skipped"


def test_skips_alone_are_no_failure(command: Callable[..., int], executor: FakeExecutor) -> None:
    executor.endings = {CALL: TestResult(TestName(*CALL.split("::")), Status.SKIPPED, 0.0, reason="no")}
    assert command("-i", CALL) == 0


@pytest.mark.parametrize("status", [Status.FAILED, Status.UNEXPECTED_SUCCESS])
def test_one_failure_is_exit_code_1(command: Callable[..., int], executor: FakeExecutor, status: Status) -> None:
    executor.endings = {TUPLE: TestResult(TestName(*TUPLE.split("::")), status, 0.1)}
    assert command() == 1


def test_a_test_that_vanishes_is_exit_code_1(
    command: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    executor.endings = {CALL: None}
    assert command() == 1
    assert f"Not run: 1 test, the first of them {CALL}" in capsys.readouterr().out


def test_include_exclude_and_keywords_narrow_the_run(command: Callable[..., int], executor: FakeExecutor) -> None:
    assert command("-i", "distributed/fsdp", "TestRpc", "-x", "TestMore", "-x", "test_call", "-k", "not tuple") == 0
    assert executor.ran == [DICT]


@pytest.mark.parametrize(
    "pattern", ["suites/distributed/rpc", "./suites/distributed/rpc/test_rpc.py", "suites.distributed.rpc"]
)
def test_a_pattern_may_be_what_the_shell_completes(
    command: Callable[..., int], executor: FakeExecutor, pattern: str
) -> None:
    assert command("-i", pattern) == 0
    assert executor.ran == [CALL]


def test_the_printed_id_runs_again(
    command: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    executor.endings = failing(TUPLE)
    assert command("--device", "cpu") == 1
    found = re.search(r"^rerun: python run_test\.py (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert found is not None
    arguments = found[1].split()
    assert arguments == ["-i", TUPLE, "--root", "suites", "--device", "cpu"]
    executor.ran.clear()
    assert main(arguments) == 1
    assert executor.ran == [TUPLE]


@pytest.mark.parametrize(
    ("started", "shown"),
    [
        ("run_test.py", "python run_test.py"),
        ("../elsewhere/run_test.py", "python ../elsewhere/run_test.py"),
        ("/checkout/torch_ext/__main__.py", "python -m torch_ext"),
        ("/usr/bin/torch_ext", "torch_ext"),
        ("/usr/bin/pytest", "python run_test.py"),
    ],
)
def test_rerun_lines_start_the_runner_as_it_was_started(
    command: Callable[..., int], executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch, started: str, shown: str
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    command("-i", CALL)
    assert executor.options[-1].command == shown


def test_list_prints_ids_and_runs_nothing(
    command: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--list", "-i", "distributed/fsdp") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [DICT, TUPLE, ONE]
    assert printed.err == "3 tests\n"
    assert executor.plans == []


def test_a_warm_list_needs_no_executor_and_says_where_its_names_are_from(
    command: Callable[..., int],
    executor: FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command("--list") == 0
    assert sorted(executor.fake_collector.asked) == sorted(LAYOUT)
    assert "cache" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "torch_ext.runner.execute", None)  # its import now fails
    assert command("--list") == 0
    folder = cache.folder()
    assert folder is not None
    assert capsys.readouterr().err == f"4 tests; names of 2 files from the cache in {folder / 'names'}\n"


def test_names_are_remembered_for_each_device(
    command: Callable[..., int], executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("--list", "--device", "cpu")
    monkeypatch.setenv("TORCH_EXT_DEVICE", "cpu")
    command("--list")
    assert len(executor.fake_collector.asked) == 2
    command("--list", "--device", "sim")
    assert len(executor.fake_collector.asked) == 4


def test_only_selected_modules_are_imported(command: Callable[..., int], executor: FakeExecutor) -> None:
    assert command("-i", CALL) == 0
    assert executor.fake_collector.asked == [RPC]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-i", "distributed/fspd"], "'distributed/fspd' matches no folder, module, class or test; nearest: "),
        (["-x", "TestRcp"], "nearest: TestRpc"),
        (["-k", "test_dcit"], "none of 4 tests fits -k 'test_dcit'; nearest: TestInput.test_dict"),
        (["-k", "a and"], "got -k 'a and', expected a name at the end"),
        (["-i", "TestRpc", "-x", RPC], "'TestRpc' matches no"),
        (["-i", RPC, "-x", "distributed"], "nothing selected: -x excludes every file"),
        (["-i", CALL, "-x", "test_call"], f"nothing selected: no test in {RPC}"),
        (["--timeout", "soon"], "got 'soon', expected a number of seconds above 0"),
        (["--timeout", "-1"], "got '-1', expected"),
        (["--timeout", "nan"], "got 'nan', expected"),
        (["--root", "nowhere"], "nowhere, which is no folder"),
        (["--start-method", "spawn"], "invalid choice"),
        (["--no-such-option"], "there is no option --no-such-option; see --help"),
        (["--faifast"], "there is no option --faifast; nearest: --failfast"),
        (["-k", "tupel and not errors"], "fits -k 'tupel and not errors'; nearest: tuple"),
        (["-v", "-q"], "not allowed with"),
        (["-qv"], "not allowed with"),
        (["-i"], "expected at least one argument"),
    ],
)
def test_a_usage_error_is_exit_code_2_and_says_what_to_type(
    command: Callable[..., int],
    executor: FakeExecutor,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    assert command(*arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""
    assert executor.plans == []


def test_a_root_without_tests_selects_nothing(
    executor: FakeExecutor, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "empty").mkdir()
    assert main(["--root", "suites/empty"]) == 2
    assert f"no test_*.py below {root / 'empty'}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-h", "--version"])
def test_help_and_version_are_no_errors(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out


def test_every_option_reaches_the_executor(command: Callable[..., int], executor: FakeExecutor, root: Path) -> None:
    command("-f", "--device", "cpu", "--timeout", "2.5", "--start-method", "interpreter", "--show-output", "-v")
    options = executor.options[-1]
    assert (options.root, options.failfast, options.device, options.timeout_s) == (root, True, "cpu", 2.5)
    assert (options.start_method, options.show_output, options.verbosity) == ("interpreter", True, 1)
    command("-q")
    options = executor.options[-1]
    assert (options.failfast, options.device, options.timeout_s, options.start_method, options.show_output) == (
        False, "", None, "fork", False
    )  # fmt: skip
    assert options.verbosity == -1


# --- files that cannot be imported ------------------------------------------------------------------------------------


@pytest.fixture
def broken(executor: FakeExecutor) -> FakeExecutor:
    executor.fake_collector.errors = {RPC: "Traceback ...\nImportError: no module named nothing"}
    return executor


def test_a_broken_file_fails_the_run_and_the_others_still_run(
    command: Callable[..., int], broken: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 1
    assert broken.ran == [DICT, TUPLE, ONE]
    printed = capsys.readouterr().out
    assert f"FAILED {RPC}  0.00 s\nTraceback ...\nImportError: no module named nothing\nrerun: " in printed
    assert printed.splitlines()[-1] == "3 passed, 1 failed, 0 skipped"


def test_a_broken_file_alone_is_a_failure_not_a_usage_error(command: Callable[..., int], broken: FakeExecutor) -> None:
    for arguments in (["-i", RPC], ["-i", CALL], ["-i", "TestRpc"], ["-k", "TestRpc"]):
        assert command(*arguments) == 1
    assert broken.plans == []


def test_a_broken_file_that_was_not_asked_for_does_not_matter(
    command: Callable[..., int], broken: FakeExecutor
) -> None:
    for arguments in (["-i", INPUT], ["-i", "TestInput"], ["-x", RPC]):
        assert command(*arguments) == 0


def test_a_broken_file_stops_a_run_that_stops_at_the_first_failure(
    command: Callable[..., int], broken: FakeExecutor
) -> None:
    assert command("-f") == 1
    assert broken.plans == []


def test_a_pattern_that_only_a_broken_file_could_explain_is_told(
    command: Callable[..., int], broken: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("-i", "TestInputs") == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("warning: 'TestInputs': no test that is known fits it, and some files cannot be imported")
    assert "; nearest: TestInput" in told
    assert command("-i", "TestInput") == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "def test_call(): pass\n",
            ": its tests are functions such as test_call, which pytest runs and unittest",
        ),
        ("class TestRpc:\n    def test_call(self): pass\n", ": its tests are classes without a base such as TestRpc"),
        ("", ""),
    ],
)
def test_a_file_that_was_asked_for_and_has_no_test_is_told(
    command: Callable[..., int],
    executor: FakeExecutor,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    told: str,
) -> None:
    executor.fake_collector.layout = {**LAYOUT, RPC: []}
    (root / RPC).write_text(text)
    for patterns in ((), ("distributed",), (RPC, INPUT)):
        assert command(*patterns) == 0
        said = f"warning: no test in {RPC}{told}" if told or RPC in patterns else ""
        err = capsys.readouterr().err
        assert err.startswith(said) if said else err == "", patterns
    assert command("TestInput") == 0 and capsys.readouterr().err == "", "it means no file"


def test_a_broken_file_fails_the_list(
    command: Callable[..., int], broken: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--list") == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [DICT, TUPLE, ONE]
    assert f"{RPC} cannot be imported:\nTraceback ...\nImportError" in printed.err


# --- endings ----------------------------------------------------------------------------------------------------------


def test_an_interrupt_prints_what_is_known(
    command: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    executor.interrupt_at = ONE
    assert command() == 130
    printed = capsys.readouterr().out
    assert "Interrupted.\nNot run: 2 tests" in printed
    assert printed.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"


def test_an_interrupt_while_importing(command: Callable[..., int], executor: FakeExecutor) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    executor.fake_collector.on_collect = interrupt
    assert command() == 130


# --- names that were cached -------------------------------------------------------------------------------------------


def test_a_run_imports_its_files_and_runs_what_they_hold_whatever_was_cached(
    command: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    command("--list")
    executor.fake_collector.layout = {**LAYOUT, INPUT: ["TestInput.test_dict", "TestInput.test_more", "TestNew.test_n"]}
    executor.fake_collector.asked.clear()
    assert command("-i", "TestInput", "-x", "test_dict", "-k", "not one") == 0
    assert executor.ran == [f"{INPUT}::TestInput::test_more"]
    assert executor.fake_collector.asked == [INPUT], "the cache says that the other file has no such test"
    capsys.readouterr()
    command("--list")
    assert f"{INPUT}::TestNew::test_n" in capsys.readouterr().out


def test_parts_are_divided_by_what_files_hold(command: Callable[..., int], executor: FakeExecutor) -> None:
    """Machines must agree on the parts, whatever each has cached."""
    command("--list")
    executor.fake_collector.layout = {**LAYOUT, RPC: ["TestRpc.test_call", "TestMany.test_1", "TestMany.test_2"]}
    for part in ("1/2", "2/2"):
        executor.fake_collector.asked.clear()
        assert command("--shard", part) == 0
        assert sorted(executor.fake_collector.asked) == sorted(LAYOUT)
    many = [f"{RPC}::TestMany::test_{number}" for number in (1, 2)]
    assert sorted(executor.ran) == sorted([DICT, TUPLE, ONE, CALL, *many])


def test_a_file_with_cached_names_that_no_longer_imports_fails_the_run(
    command: Callable[..., int], executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    command("--list")
    executor.fake_collector.errors = {INPUT: "ImportError: gone"}
    assert command() == 1
    assert executor.ran == [CALL]
    assert "ImportError: gone" in capsys.readouterr().out


# --- surroundings -----------------------------------------------------------------------------------------------------

RUN = """
import os, sys
from test.torch_ext.runner.fakes import FakeCollector, FakeExecutor

{before}
from torch_ext.runner.cli import main

root, file = sys.argv[1:]
sys.modules["torch_ext.runner.execute"] = FakeExecutor(FakeCollector({{file: ["TestA.test_1"]}}))
code = main(["--root", root, "-i", file, {more}])
for descriptor in range(3):
    os.fstat(descriptor)  # or the next file that is opened would take its place
raise SystemExit(code)
"""


def run_in(root: Path, before: str = "", more: str = "", **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN.format(before=before, more=more), str(root), RPC],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, stderr=subprocess.PIPE, text=True, timeout=60, **how,
    )  # fmt: skip


def test_a_closed_stdout_is_one_sentence(root: Path) -> None:
    done = run_in(root, preexec_fn=lambda: os.close(1))
    assert done.returncode == 2
    assert done.stderr == "error: stdout is closed, and the report goes there; give one, such as > /dev/null\n"


def test_a_full_disk_is_one_sentence(root: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run_in(root, stdout=full)
    assert done.returncode == 1
    (told,) = done.stderr.splitlines()
    assert told.startswith("error: the report cannot be written: ") and "No space left" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--show-config"], "error: the options cannot be written: "),
        (["--list", "--json"], "error: the list cannot be written to stdout: "),
        (["--json"], "error: the JSON report cannot be written to stdout: "),
    ],
)
def test_a_full_disk_is_one_sentence_whatever_is_shown(root: Path, arguments: list[str], told: str) -> None:
    with open("/dev/full", "w") as full:
        done = run_in(root, more=f"*{arguments!r}", stdout=full)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith(told) and "No space left" in said


def test_a_working_directory_that_is_gone_is_one_sentence(root: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = run_in(root, f"os.chdir({str(tmp_path / 'gone')!r}); os.rmdir({str(tmp_path / 'gone')!r})")
    assert done.returncode == 2
    assert done.stderr == "error: the working directory is gone; change to one that exists\n"


def test_a_closed_stderr_or_stdin_does_no_harm(root: Path) -> None:
    for descriptor in (0, 2):
        done = run_in(root, preexec_fn=lambda: os.close(descriptor), stdout=subprocess.PIPE)  # noqa: B023  # at once
        assert done.returncode == 0 and done.stdout.endswith("1 passed, 0 failed, 0 skipped\n")


def test_what_the_locale_has_no_letters_for_is_spelt_out(tmp_path: Path) -> None:
    folder = tmp_path / "é"
    folder.mkdir()
    (folder / "test_ü.py").write_text(
        "import unittest\nclass TestÄ(unittest.TestCase):\n    def test_ö(self): print('ß')\n"
    )
    for arguments in (["--show-output", "--device", "cpu"], ["--show-config"]):
        done = subprocess.run(
            [sys.executable, "-m", "torch_ext", "--root", str(folder), *arguments], env={**os.environ,
            "PYTHONPATH": str(CHECKOUT), "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0 and "\\x" in done.stdout, done


def test_a_cache_of_others_is_one_sentence_and_costs_only_time(
    command: Callable[..., int], executor: FakeExecutor, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root.parent / "cache").mkdir()
    (root.parent / "cache").chmod(0o777)
    for _ in range(2):
        assert command() == 0
        (told,) = capsys.readouterr().err.splitlines()
        assert told.startswith("warning: the cache is not used because others may write ")
    assert len(executor.fake_collector.asked) == 2 * len(LAYOUT)


LEAVE = """
import sys
from test.torch_ext.runner.fakes import FakeCollector, FakeExecutor
from torch_ext.runner.cli import main

file, *arguments = sys.argv[1:]
collector = FakeCollector({file: ["TestA.test_1"]})
collector.on_collect = sys.stdin.readline  # until the reader has left
sys.modules["torch_ext.runner.execute"] = FakeExecutor(collector)
raise SystemExit(main(["--root", "suites", "-i", file, *arguments]))
"""


@pytest.mark.parametrize("arguments", [[], ["--list"]])
def test_a_reader_that_leaves_is_an_interrupt_without_a_traceback(root: Path, arguments: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVE, RPC, *arguments],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, complaint = process.communicate("\n", timeout=60)
    assert (process.returncode, complaint) == (130, "")


# --- python some_test_file.py -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [DICT, TUPLE, ONE]),
        (["TestInput"], [DICT, TUPLE]),
        (["TestInput.test_tuple", "TestMore"], [TUPLE, ONE]),
        (["-v", "TestInput.test_dict"], [DICT]),
        (["-k", "tuple", "-k", "one"], [TUPLE, ONE]),
    ],
)
def test_a_file_by_itself_takes_the_spellings_of_unittest(
    root: Path, executor: FakeExecutor, arguments: list[str], expected: list[str]
) -> None:
    executor.fake_collector.layout = {"test_input.py": LAYOUT[INPUT]}
    assert main_for_file(root / INPUT, arguments) == 0
    assert executor.ran == [name.removeprefix("distributed/fsdp/") for name in expected]


def test_a_file_by_itself_reruns_by_itself(
    root: Path, executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    executor.fake_collector.layout = {"test_input.py": LAYOUT[INPUT]}
    executor.endings = failing("test_input.py::TestMore::test_one")
    assert main_for_file(str(root / INPUT), ["-f", "--device", "cpu"]) == 1
    assert f"\nrerun: python suites/{INPUT} TestMore.test_one --device cpu\n" in capsys.readouterr().out
    assert executor.options[-1].script == f"suites/{INPUT}"


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--changed", "--changed is no option of one file; run_test.py has it"),
        ("--include", "--include is no option of"),
    ],
)
def test_a_file_by_itself_says_which_options_are_the_runners(
    root: Path, capsys: pytest.CaptureFixture[str], flag: str, told: str
) -> None:
    with contextlib.suppress(SystemExit):
        assert main_for_file(root / INPUT, [flag]) == 2
    assert told in capsys.readouterr().err


def test_a_file_by_itself_is_always_asked_anew(root: Path, executor: FakeExecutor) -> None:
    executor.fake_collector.layout = {"test_input.py": LAYOUT[INPUT]}
    for _ in range(2):
        assert main_for_file(root / INPUT, ["--list"]) == 0
    assert executor.fake_collector.asked == ["test_input.py"] * 2


def test_a_file_by_itself_refuses_what_it_does_not_hold(
    root: Path, executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    executor.fake_collector.layout = {"test_input.py": LAYOUT[INPUT]}
    assert main_for_file(root / INPUT, ["TestInptu"]) == 2
    assert "'TestInptu' matches no folder, module, class or test; nearest: TestInput" in capsys.readouterr().err
    assert main_for_file(root / INPUT, ["--root", "elsewhere"]) == 2


def test_a_file_of_this_checkout_is_named_as_the_runner_names_it(executor: FakeExecutor) -> None:
    own = Path(__file__).resolve()
    executor.fake_collector.layout = {"torch_ext/runner/test_cli.py": ["TestA.test_1"]}
    assert main_for_file(own, []) == 0
    assert executor.ran == ["torch_ext/runner/test_cli.py::TestA::test_1"]


TWICE = """
import sys
from torch_ext.runner.cli import main

for _ in range(2):
    print("code", main(["--root", sys.argv[1], "--device", "cpu", "-q"]), flush=True)
"""


def test_the_command_runs_twice_in_one_process(tmp_path: Path) -> None:
    """The real one, with processes: nothing of the first run may be left for the second to trip over."""
    (tmp_path / "test_two.py").write_text(
        "from torch_ext.testing._internal.common_distributed import MultiProcessTestCase\n"
        "class TestTwo(MultiProcessTestCase):\n"
        "    world_size = 2\n"
        "    def setUp(self):\n"
        "        super().setUp()\n"
        "        self._spawn_processes()\n"
        "    def test_file(self):\n"
        "        import sys\n"
        "        self.assertEqual({'torch._dynamo', 'torch.distributed.tensor'} - set(sys.modules), set())\n"
        "        assert open(self.file_name).read() == ''\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TORCH_EXT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(tmp_path)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.count("1 passed, 0 failed, 0 skipped") == done.stdout.count("code 0") == 2, done.stdout
