"""Sources of options: ``[tool.torch_ext]``, the environment, flags; messages about wrong ones; shell completion."""

import importlib.util
import re
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest

import torch_ext
from test.torch_ext.interpreter import CHECKOUT, RUN_TEST, python
from torch_ext.results import SetupError
from torch_ext.runner.arguments import _patterns_below_root, parse
from torch_ext.runner.options import TABLE, default_root


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name in ("TORCH_EXT_OPTIONS", "TORCH_EXT_DEVICE", "TORCH_EXT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "suites").mkdir()
    monkeypatch.chdir(tmp_path / "deep/er")
    return tmp_path


def write(project, text):
    (project / "pyproject.toml").write_text(f"[tool.other]\nx = 1\n[tool.torch_ext]\n{text}\n")


def refused():
    """Return the message with which the command rejects its configuration."""
    with pytest.raises(SetupError) as error:
        parse([])
    (line,) = str(error.value).splitlines()
    return line


def shown(capsys):
    rows = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    return {name: (value, source) for name, value, source in rows}


def test_flags_win_over_the_environment_and_that_over_the_file(project, monkeypatch, capsys):
    write(project, 'root = "suites"\nreruns = 1\ntimeout = 2.5\nslots = 3\nverbose = true\ndevice = "sim"')
    monkeypatch.setenv("TORCH_EXT_OPTIONS", "--reruns 2 --slots 4 -k 'a or b'")
    monkeypatch.setenv("TORCH_EXT_DEVICE", "cpu")
    options = parse(["--reruns", "3"])
    assert (options.reruns, options.slots, options.timeout_s, options.verbosity) == (3, 4, 2.5, 1)
    assert options.keywords == ("a or b",)
    assert options.root == project / "suites"
    assert options.device == "cpu"
    with pytest.raises(SystemExit) as ended:
        parse(["--reruns", "3", "--shard", "2/3", "--show-config"])
    assert ended.value.code == 0
    found = shown(capsys)
    file = str(project / "pyproject.toml")
    assert found["reruns"] == ("3", "command line")
    assert found["slots"] == ("4", "TORCH_EXT_OPTIONS")
    assert found["device"] == ("cpu", "TORCH_EXT_DEVICE")
    assert found["timeout"] == ("2.5", file)
    assert found["root"] == (str(project / "suites"), file)
    assert found["shard"] == ("2/3", "command line")
    assert found["cluster"] == ("-", "default")
    assert len(found) == len({row.field for row in TABLE})
    assert found["verbosity"] == ("1", file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rerun = 1", "has the unknown key 'rerun'; nearest: reruns"),
        ("zzz = 1", "has the unknown key 'zzz'; see --help"),
        ("reruns = -1", "argument --reruns: got '-1', expected a whole number of at least 0"),
        ("reruns = true", "reruns of [tool.torch_ext]: got true, expected a value"),
        ('failfast = "yes"', "failfast of [tool.torch_ext]: got yes, expected true or false"),
        ('start_method = "spawn"', "argument --start-method: invalid choice: 'spawn'"),
        ("reruns = ", "cannot be read: "),
    ],
)
def test_invalid_configuration_is_refused(project, text, sentence):
    write(project, text)
    line = refused()
    assert sentence in line and str(project / "pyproject.toml") in line


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("TORCH_EXT_OPTIONS", "--rerun 1", "TORCH_EXT_OPTIONS: there is no option --rerun; nearest: --reruns"),
        ("TORCH_EXT_OPTIONS", "'", "TORCH_EXT_OPTIONS: No closing quotation"),
        (
            "TORCH_EXT_TIMEOUT",
            "abc",
            "TORCH_EXT_TIMEOUT: argument --timeout: got 'abc', expected a number of seconds above 0",
        ),
        ("TORCH_EXT_RACES", "no", "TORCH_EXT_RACES: argument --races: invalid choice: 'no'"),
        ("TORCH_EXT_SCHEDULE", "soon:3", "argument --schedule: got 'soon:3', expected one of early, late, random"),
        ("TORCH_EXT_START_METHOD", "spawn", "TORCH_EXT_START_METHOD: argument --start-method: invalid choice"),
    ],
)
def test_a_variable_that_its_option_cannot_have_is_a_usage_error(project, monkeypatch, variable, text, sentence):
    monkeypatch.setenv(variable, text)
    assert sentence in refused()


def test_a_file_without_our_section_is_passed_over(project):
    write(project, "reruns = 1")
    (project / "deep/pyproject.toml").write_text("[project]\n")
    assert parse(["--root", str(project)]).reruns == 1


def test_typed_patterns_replace_configured_patterns(project):
    write(project, 'root = "suites"\ninclude = ["a"]\nexclude = "slow"')
    assert parse([]).include == ("a",) and parse([]).exclude == ("slow",)
    assert parse(["b"]).include == ("b",)
    alone = parse([], project / "suites/test_x.py")
    assert (alone.include, alone.exclude, alone.root) == ((), (), project / "suites")


def test_help_shows_every_option_in_a_group(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert [row.flags[-1] for row in TABLE if row.flags[-1] not in text] == []
    for part in ("which tests:", "how they run:", "reports:", "examples:", "Exit codes:"):
        assert f"\n{part}" in text
    assert text.startswith("usage: ") and len(text.splitlines()[0]) < 80


def test_an_installed_package_takes_the_suites_from_the_working_directory(tmp_path, monkeypatch):
    assert default_root() == default_root(CHECKOUT / "docs") == CHECKOUT / "test"
    assert default_root(tmp_path) == tmp_path, "an editable install takes them from there too"
    monkeypatch.setattr(sys, "argv", [str(CHECKOUT / "run_test.py")])
    assert default_root(tmp_path) == CHECKOUT / "test"
    monkeypatch.setattr(torch_ext, "__file__", str(tmp_path / "site-packages/torch_ext/__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert default_root() == tmp_path
    (tmp_path / "tests").mkdir()
    assert default_root() == tmp_path / "tests"
    (tmp_path / "test").mkdir()
    assert default_root() == tmp_path / "test"


def test_a_usage_error_is_one_line_and_loads_no_torch(tmp_path):
    program = (
        "import sys; from torch_ext.runner.cli import main; code = main(sys.argv[1:]); "
        "print(code, 'torch' in sys.modules)"
    )
    done = python("-c", program, "--shrad", "1/2")
    assert done.stdout == "2 False\n"
    assert done.stderr == "error: there is no option --shrad; nearest: --shard, --changed; see --help\n"


def test_the_command_runs_beside_a_clone_of_its_own_name(tmp_path):
    """Beside the clone, Python finds the folder ``torch_ext`` before the package, and runs the clone's ``__main__``."""
    clone = tmp_path / "torch_ext"
    clone.mkdir()
    for name in ("__main__.py", "run_test.py"):
        shutil.copy(CHECKOUT / name, clone)
    (clone / "torch_ext").symlink_to(CHECKOUT / "torch_ext")
    for command in (["-m", "torch_ext"], ["torch_ext"]):
        done = subprocess.run(
            [sys.executable, *command, "--version"],
            cwd=tmp_path, capture_output=True, text=True, env={"PATH": ""}, timeout=60,
        )  # fmt: skip
        assert done.stdout == f"torch_ext {torch_ext.__version__}\n", done.stderr


def test_patterns_are_the_folders_and_files_below_the_root(tmp_path):
    for name in ("a/test_one.py", "a/b/test_two.py", "c/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    given = Namespace(typed_root=str(tmp_path))
    assert _patterns_below_root("", given) == ["a", "a/b", "a/b/test_two.py", "a/test_one.py"]
    assert _patterns_below_root("a/t", given) == ["a/test_one.py"]
    assert _patterns_below_root("x", given) == []


@pytest.mark.skipif(
    importlib.util.find_spec("argcomplete") is None, reason="needs argcomplete; pip install argcomplete"
)
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("run_test.py --reru", "--reruns "),
        ("run_test.py --races ", "error\noff\nreport"),
        ("run_test.py distributed/fsdp/test_fsdp_inp", "distributed/fsdp/test_fsdp_input.py "),
    ],
)
def test_command_completes_for_a_shell(tmp_path, line, found):
    completions = tmp_path / "told"
    asked = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(completions),
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n",
    }  # fmt: skip
    done = python(RUN_TEST, **asked)
    assert done.returncode == 0 and sorted(completions.read_text().split()) == found.split(), done
