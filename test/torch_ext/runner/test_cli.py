"""The command from arguments to exit code, over an executor that starts no process."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from test.torch_ext.interpreter import python
from test.torch_ext.runner.fakes import ending
from test.torch_ext.world.suites import suite_of
from torch_ext import __main__ as command
from torch_ext import cache
from torch_ext.results import Status

LAYOUT = {
    "distributed/fsdp/test_input.py": ["TestInput.test_dict", "TestInput.test_tuple", "TestMore.test_one"],
    "distributed/rpc/test_rpc.py": ["TestRpc.test_call"],
}
INPUT, RPC = LAYOUT
DICT, TUPLE, ONE = (f"{INPUT}::{name.replace('.', '::')}" for name in LAYOUT[INPUT])
CALL = f"{RPC}::TestRpc::test_call"


@pytest.fixture(autouse=True)
def _handlers():
    """The command handles the signals that end it; the process of these tests goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("status", "code"), [(Status.SKIPPED, 0), (Status.XFAIL, 0), (Status.FAILED, 1), (Status.UNEXPECTED_SUCCESS, 1)]
)
def test_only_failures_are_exit_code_1(cli, status, code):
    cli.executor.endings = {TUPLE: ending(TUPLE, status)}
    assert cli().code == code


def test_a_test_that_vanishes_is_exit_code_1(cli):
    cli.executor.endings = {CALL: None}
    done = cli()
    assert done.code == 1 and f"Not run: 1 test, the first of them {CALL}" in done.out
    assert f"Not run: 2 tests, the first of them {CALL}" in cli("--repeat", "2").out


def test_include_exclude_and_keywords_narrow_the_run(cli):
    assert cli("-i", "distributed/fsdp", "TestRpc", "-x", "TestMore", "-x", "test_call", "-k", "not tuple").code == 0
    assert cli.ran == [DICT]


def test_a_class_or_test_after_a_file_is_of_that_file(cli):
    assert cli(INPUT, "TestInput.test_dict").code == 0
    assert cli.ran == [DICT]
    assert cli(INPUT, "TestMore", "TestInput.test_tuple", RPC).code == 0
    assert sorted(cli.ran) == sorted([ONE, TUPLE, CALL])
    assert cli("-x", "test_input.py", RPC).code == 0, "-x takes one pattern"
    assert cli.ran == [CALL]


def test_help_is_one_screen_that_names_every_command_and_each_has_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torch_ext", "--help"])
    assert command.main() == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 120
    for name in command.COMMANDS:
        assert re.search(rf"^  {name} +\w", text, re.M), name
        monkeypatch.setattr(sys, "argv", ["torch_ext", name, "--help"])
        with contextlib.suppress(SystemExit):
            assert command.main() == 0
        assert "usage: " in capsys.readouterr().out, name


@pytest.mark.parametrize(("word", "near"), [("docter", "doctor"), ("demoo", "demo"), ("Serve", "serve")])
def test_a_misspelt_command_is_named_at_once(word, near, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torch_ext", word])
    assert command.main() == 2
    assert capsys.readouterr().err == f"error: there is no command {word!r}; nearest: {near}\n"


@pytest.mark.parametrize(
    "pattern", ["suites/distributed/rpc", "./suites/distributed/rpc/test_rpc.py", "suites.distributed.rpc", CALL]
)
def test_a_pattern_may_be_what_the_shell_completes_and_names_the_only_file_to_import(cli, pattern):
    assert cli("-i", pattern).code == 0
    assert (cli.ran, cli.asked) == ([CALL], [RPC])


def test_the_printed_id_runs_again(cli):
    cli.executor.endings = {TUPLE: ending(TUPLE)}
    found = re.search(r"^rerun: python run_test\.py (.*)$", cli("--device", "cpu").out, re.MULTILINE)
    arguments = found[1].split()
    assert arguments == ["-i", TUPLE, "--root", "suites", "--device", "cpu"]
    assert cli.main(*arguments).code == 1
    assert cli.ran == [TUPLE]


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
def test_rerun_lines_start_the_runner_as_it_was_started(cli, monkeypatch, started, shown):
    monkeypatch.setattr(sys, "argv", [started])
    cli("-i", CALL)
    assert cli.executor.options[-1].command == shown


def test_list_runs_nothing_and_cached_list_starts_no_executor(cli, monkeypatch):
    done = cli("--list", "-i", "distributed/fsdp")
    assert (done.code, done.out.splitlines(), done.err) == (0, [DICT, TUPLE, ONE], "3 tests\n")
    assert cli.executor.plans == []
    cli("--list")
    assert cli.asked == [RPC]
    monkeypatch.setitem(sys.modules, "torch_ext.runner.execute", None)  # its import now fails
    folder = cache.folder()
    assert cli("--list").err == f"4 tests; names of 2 files from the cache in {folder / 'names'}\n"


def test_names_are_cached_for_each_device(cli, monkeypatch):
    cli("--list", "--device", "cpu")
    monkeypatch.setenv("TORCH_EXT_DEVICE", "cpu")
    cli("--list")
    assert cli.asked == []
    cli("--list", "--device", "sim")
    assert len(cli.asked) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-i", "distributed/fspd"], "'distributed/fspd' matches no folder, module, class or test; nearest: "),
        (["-k", "test_dcit"], "nothing selected: none of 4 tests fits -k 'test_dcit'"),
        (["-i", RPC, "-x", "distributed"], "nothing selected: -x excludes every test"),
        (["-i", CALL, "-x", "test_call"], "nothing selected: -x excludes every test"),
        (["--timeout", "-1"], "got '-1', expected"),
        (["--timeout", "nan"], "got 'nan', expected"),
        (["--junit="], "argument --junit: got an empty value, as from an unset variable"),
        (["--cluster", ""], "argument --cluster: got an empty value"),
        (["--cluster", "local:0"], "got '0', expected a whole number of at least 1"),
        (["--cluster", "local:x"], "got 'x', expected a whole number of at least 1"),
        (["--root", "nowhere"], "nowhere, which is not a folder"),
        (["--no-such-option"], "there is no option --no-such-option; see --help"),
        (["--rerun", "1"], "there is no option --rerun; nearest: --reruns"),
        (["-v", "-q"], "not allowed with"),
        (["-i"], "expected at least one argument"),
    ],
)
def test_usage_error_exits_with_2_and_a_remedy(cli, arguments, reason):
    done = cli(*arguments)
    assert (done.code, done.out, cli.executor.plans) == (2, "", [])
    assert reason in done.err


def test_a_root_without_tests_selects_nothing(cli, root):
    (root / "empty").mkdir()
    done = cli.main("--root", "suites/empty")
    assert done.code == 2 and f"no test_*.py below {root / 'empty'}" in done.err


# --- files that cannot be imported ------------------------------------------------------------------------------------


@pytest.fixture
def broken(cli):
    cli.executor.fake_collector.errors = {RPC: "Traceback ...\nImportError: no module named nothing"}
    return cli


def test_a_broken_file_fails_the_run_and_the_others_still_run(broken):
    done = broken()
    assert (done.code, broken.ran) == (1, [DICT, TUPLE, ONE])
    assert f"FAILED {RPC}  0.00 s\nTraceback ...\nImportError: no module named nothing\nrerun: " in done.out
    assert done.out.splitlines()[-1] == "3 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *((arguments, 1) for arguments in (["-i", RPC], ["-i", CALL], ["-i", "TestRpc"], ["-k", "TestRpc"], ["-f"])),
        *((arguments, 0) for arguments in (["-i", INPUT], ["-i", "TestInput"], ["-x", RPC])),
    ],
)
def test_a_broken_file_fails_a_run_that_asks_for_it(broken, arguments, code):
    assert broken(*arguments).code == code
    assert bool(broken.executor.plans) == (code == 0)


def test_a_name_that_only_a_broken_file_may_hold_is_named_with_its_neighbours(broken):
    done = broken("TestRpc", "TestImput", INPUT)
    said = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert [line.split(" matches")[0] for line in said] == ["warning: 'TestRpc'", "warning: 'TestImput'"]
    assert "; nearest: TestInput, " in said[1] and said[1].endswith(f"; maybe one in {RPC}, which cannot be imported")
    assert broken("TestInput").err == "", "another file holds it"


def test_requested_files_without_tests_are_reported(cli):
    cli.executor.fake_collector.layout = {**LAYOUT, RPC: []}
    for patterns in ((), ("distributed",), (RPC, INPUT)):
        done = cli(*patterns)
        assert done.code == 0 and done.err.startswith(f"warning: no test in {RPC}; "), patterns
    assert cli("TestInput").err == "", "it means no file"
    done = cli(RPC)
    assert done.code == 2 and f"nothing selected: no test in {RPC}; pytest runs functions and classes" in done.err


def test_a_broken_file_fails_the_list(broken):
    done = broken("--list")
    assert (done.code, done.out.splitlines()) == (1, [DICT, TUPLE, ONE])
    assert f"{RPC} cannot be imported:\nTraceback ...\nImportError" in done.err


# --- endings ----------------------------------------------------------------------------------------------------------


def interrupt():
    raise KeyboardInterrupt


def test_interrupt_prints_the_results_so_far(cli):
    cli.executor.interrupt_at = ONE
    done = cli()
    assert done.code == 130 and f"Interrupted in {ONE}.\nNot run: 2 tests" in done.out
    assert done.out.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
    cli.executor.fake_collector.on_collect = interrupt
    assert cli().code == 130


# --- names that were cached -------------------------------------------------------------------------------------------


def test_run_uses_imported_names_instead_of_cached_ones(cli):
    cli("--list")
    collector = cli.executor.fake_collector
    collector.layout = {**LAYOUT, INPUT: ["TestInput.test_dict", "TestInput.test_more", "TestNew.test_n"]}
    assert cli("-i", "TestInput", "-x", "test_dict", "-k", "not one").code == 0
    assert cli.ran == [f"{INPUT}::TestInput::test_more"]
    assert cli.asked == [INPUT], "the cache says that the other file has no such test"
    assert f"{INPUT}::TestNew::test_n" in cli("--list").out
    collector.errors = {INPUT: "ImportError: gone"}
    done = cli()
    assert (done.code, cli.ran) == (1, [CALL]) and "ImportError: gone" in done.out


def test_parts_are_divided_by_imported_names(cli):
    """Machines must agree on the parts, whatever each has cached."""
    cli("--list")
    cli.executor.fake_collector.layout = {**LAYOUT, RPC: ["TestRpc.test_call", "TestMany.test_1", "TestMany.test_2"]}
    ran = []
    for part in ("1/2", "2/2"):
        assert cli("--shard", part).code == 0
        assert cli.asked == sorted(LAYOUT)
        ran += cli.ran
    assert sorted(ran) == sorted([DICT, TUPLE, ONE, CALL, f"{RPC}::TestMany::test_1", f"{RPC}::TestMany::test_2"])


# --- surroundings -----------------------------------------------------------------------------------------------------

RUN = """
import os, sys
from test.torch_ext.runner.fakes import FakeCollector, FakeExecutor

root, file, *arguments = sys.argv[1:]
{before}
from torch_ext.runner.cli import main

sys.modules["torch_ext.runner.execute"] = FakeExecutor(FakeCollector({{file: ["TestA.test_1"]}}))
code = main(["--root", root, "-i", file, *arguments])
for descriptor in range(3):
    os.fstat(descriptor)  # or the next file that is opened would take its place
raise SystemExit(code)
"""


def run_in(root, *arguments, before="", **how):
    return python("-c", RUN.format(before=before), root, RPC, *arguments, folder=root, **how)


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_closed_stdout_is_one_sentence_and_other_closed_streams_are_harmless(root, closed):
    message = "error: stdout is closed, but the report needs it; redirect it, such as > /dev/null\n"
    done = run_in(root, preexec_fn=lambda: os.close(closed))
    assert (done.returncode, done.stderr) == ((2, message) if closed == 1 else (0, ""))
    assert closed == 1 or done.stdout.endswith("1 passed, 0 failed, 0 skipped\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: the report cannot be written: "),
        (["--show-config"], "error: the list of options cannot be written to stdout: "),
        (["--list", "--json", "-"], "error: the list cannot be written to stdout: "),
        (["--json", "-"], "error: the JSON report cannot be written to stdout: "),
        (["--json", "/dev/full"], "error: the JSON report cannot be written to /dev/full: "),
        (["--junit", "/dev/full"], "error: the JUnit report cannot be written to /dev/full: "),
    ],
)
def test_a_full_disk_is_one_sentence_whatever_is_shown(root, arguments, message):
    with open(os.devnull if "/dev/full" in arguments else "/dev/full", "w") as stdout:
        done = run_in(root, *arguments, stdout=stdout.fileno())
    assert done.returncode == 1
    (reason,) = done.stderr.splitlines()
    assert reason.startswith(message) and "No space left" in reason


def test_a_working_directory_that_is_gone_is_one_sentence(root, tmp_path):
    (tmp_path / "gone").mkdir()
    done = run_in(root, before=f"os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd())")
    assert done.returncode == 2
    assert done.stderr == "error: the working directory is gone; change to one that exists\n"


def test_characters_outside_the_locale_are_escaped(tmp_path):
    folder = tmp_path / "é"
    folder.mkdir()
    (folder / "test_ü.py").write_text(
        "import unittest\nclass TestÄ(unittest.TestCase):\n    def test_ö(self): print('ß')\n"
    )
    for arguments in (["--show-output", "--device", "cpu"], ["--show-config"]):
        done = python("-m", "torch_ext", "--root", folder, *arguments, PYTHONIOENCODING="ascii")
        assert done.returncode == 0 and "\\x" in done.stdout, done


def test_untrusted_cache_is_one_sentence_and_is_not_used(cli, root):
    (root.parent / "cache").mkdir()
    (root.parent / "cache").chmod(0o777)
    for _ in range(2):
        done = cli()
        (message,) = done.err.splitlines()
        assert done.code == 0 and message.startswith("warning: the cache is not used because others may write ")
        assert cli.asked == sorted(LAYOUT)


@pytest.mark.parametrize("arguments", [[], ["--list"]])
def test_closed_pipe_is_an_interrupt_without_a_traceback(root, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = run_in(root, *arguments, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (130, "")


# --- python some_test_file.py -----------------------------------------------------------------------------------------


@pytest.fixture
def alone(cli):
    cli.executor.fake_collector.layout = {"test_input.py": LAYOUT[INPUT]}
    return cli


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [DICT, TUPLE, ONE]),
        (["TestInput.test_tuple", "TestMore"], [TUPLE, ONE]),
        (["-k", "tuple", "-k", "one"], [TUPLE, ONE]),
    ],
)
def test_single_file_accepts_unittest_names_and_ignores_the_cache(alone, root, arguments, expected):
    for _ in range(2):
        assert alone.of_file(root / INPUT, *arguments).code == 0
        assert alone.ran == [name.removeprefix("distributed/fsdp/") for name in expected]
        assert alone.asked == ["test_input.py"]


def test_single_file_has_its_own_rerun_command(alone, root):
    alone.executor.endings = {name: ending(name) for name in ["test_input.py::TestMore::test_one"]}
    done = alone.of_file(root / INPUT, "-f", "--device", "cpu")
    assert done.code == 1 and f"\nrerun: python suites/{INPUT} TestMore.test_one --device cpu\n" in done.out
    assert alone.executor.options[-1].script == f"suites/{INPUT}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--changed", "HEAD"], "there is no option --changed"),
        (["TestInptu"], "'TestInptu' matches no folder, module, class or test; nearest: TestInput"),
        (["--root", "elsewhere"], ""),
    ],
)
def test_single_file_refuses_runner_options_and_foreign_tests(alone, root, flags, message):
    done = alone.of_file(root / INPUT, *flags)
    assert done.code == 2 and message in done.err


def test_a_file_of_this_checkout_is_named_as_the_runner_names_it(cli):
    cli.executor.fake_collector.layout = {"torch_ext/runner/test_cli.py": ["TestA.test_1"]}
    assert cli.of_file(Path(__file__).resolve()).code == 0
    assert cli.ran == ["torch_ext/runner/test_cli.py::TestA::test_1"]


TWO = """
class TestTwo(Ranks):
    def test_file(self):
        self.assertEqual({"torch._dynamo", "torch.distributed.tensor"} - set(sys.modules), set())
        self.assertEqual(open(self.file_name).read(), "")
"""
TWICE = """
import sys
from torch_ext.runner.cli import main

for _ in range(2):
    print("code", main(["--root", sys.argv[1], "--device", "cpu", "-q"]), flush=True)
"""


@pytest.mark.costly
def test_the_command_runs_twice_in_one_process(tmp_path):
    """The real runner, with processes: the first run must leave no state that breaks the second."""
    with suite_of(tmp_path, TWO) as suite:
        run = suite.finish(suite.start(["-c", TWICE, str(tmp_path)]))
    assert run.out.count("1 passed, 0 failed, 0 skipped") == run.out.count("code 0") == 2, run
