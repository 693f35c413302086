"""``.ci/run`` is red when anything fails: its steps are replaced by small programs in a copy of the tree."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

GREEN = "echo '3 passed, 0 failed, 1 skipped'"
RED = "echo '2 passed, 1 failed, 0 skipped'; exit 1"
PYTEST_GREEN = "echo '5 passed, 2 skipped in 0.1s'"
PYTEST_RED = "echo '4 passed, 1 failed in 0.1s'; exit 1"


def start_ci(tree: Path, first: str, second: str, linter: str = "true") -> subprocess.Popen[str]:
    shutil.copytree(REPOSITORY / ".ci", tree / ".ci")
    blocks = (f"<!-- command -->\n```bash\n{command}\n```\n" for command in (first, second))
    (tree / "README.md").write_text("# A project\n\n" + "\n".join(blocks))
    programs = tree / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, body in {"python": "true", "ruff": linter, "mypy": "true"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    return subprocess.Popen(
        ["bash", ".ci/run"],
        cwd=tree,
        env={**os.environ, "CI": "true", "TMPDIR": str(tree)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_ci(tree: Path, first: str, second: str, linter: str = "true") -> tuple[int, list[str]]:
    process = start_ci(tree, first, second, linter)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output.splitlines()


def test_all_green_is_green_and_counts_both_runners(tmp_path: Path) -> None:
    code, lines = run_ci(tmp_path, GREEN, PYTEST_GREEN)
    assert (code, lines[-1]) == (0, "8 passed, 0 failed, 3 skipped"), lines


@pytest.mark.parametrize(
    ("first", "second", "linter", "last"),
    [
        (RED, PYTEST_GREEN, "true", "7 passed, 1 failed, 2 skipped"),
        (GREEN, PYTEST_RED, "true", "7 passed, 1 failed, 1 skipped"),
        (GREEN, "exit 3", "true", "3 passed, 1 failed, 1 skipped"),
        (GREEN, PYTEST_GREEN, "false", "8 passed, 2 failed, 3 skipped"),
        ("true", "true", "true", "0 passed, 0 failed, 0 skipped"),
    ],
    ids=["suite", "pytest", "crash", "linter", "nothing ran"],
)
def test_one_failure_turns_it_red(tmp_path: Path, first: str, second: str, linter: str, last: str) -> None:
    code, lines = run_ci(tmp_path, first, second, linter)
    assert (code, lines[-1]) == (1, last), lines


# Waits for the linter, so that it ends only if the linter runs beside it.
SECOND = "until [ -e linted ]; do sleep 0.02; done; echo second; echo '5 passed in 0.1s'"


def test_linters_run_beside_the_second_command_and_speak_after_it(tmp_path: Path) -> None:
    code, lines = run_ci(tmp_path, GREEN, SECOND, "echo lint; touch linted")
    assert code == 0, lines
    second = lines.index("second")
    assert "lint" not in lines[:second]
    assert lines[second + 2 : second + 4] == ["+ .venv/bin/ruff check .", "lint"]


def test_a_linter_does_not_run_before_the_first_command_has_made_it(tmp_path: Path) -> None:
    code, lines = run_ci(tmp_path, f"sleep 0.2; touch made; {GREEN}", PYTEST_GREEN, "[ -e made ]")
    assert code == 0, lines


def test_an_interrupt_ends_what_runs_in_the_background(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "held")
    process = start_ci(tmp_path, GREEN, "sleep 600", "exec 3> held; echo >&3; exec sleep 600")
    with open(tmp_path / "held") as held:
        assert held.readline() == "\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGINT
        assert select.select([held], [], [], 60)[0], "the linter still runs"
        assert held.read() == ""
    assert [path.name for path in tmp_path.glob("tmp.*")] == []


def test_readme_shows_two_commands() -> None:
    script = [str(REPOSITORY / ".ci" / "readme_commands.py"), str(REPOSITORY / "README.md")]
    done = subprocess.run(["python3", *script], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("python3 -m venv .venv && ")
    assert "run_test.py -i distributed/fsdp" in first
    assert "pytest" in second


CLEAN = "#include <vector>\n\nstd::vector<int> none() {\n  return {};\n}\n"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (CLEAN, ""),
        (CLEAN.replace("none() {", "none()  {"), "code should be clang-formatted"),
        (CLEAN.replace("vector>", "map>"), "no template named 'vector'"),
        # It compiles because <map> happens to bring what it uses.
        (
            "#include <map>\n\nint first(const std::map<int, int>& of) { return std::get<0>(*of.begin()); }\n"
            "std::pair<int, int> none() { return {}; }\n",
            'no header providing "std::pair"',
        ),
        ("void f(int* p) {\n  if (p == 0) return;\n}\n", "use nullptr"),
    ],
    ids=["clean", "format", "does not compile alone", "missing include", "check"],
)
def test_linters_of_native_sources_hold_each_source_alone(source: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "source.cpp"
    file.write_text(source)
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / ".ci" / "lint_cpp.py"), str(file)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == (1 if problem else 0), done.stdout + done.stderr
    assert problem in done.stderr


def test_the_command_of_ci_lints_the_native_sources() -> None:
    assert ".ci/lint_cpp.py" in (REPOSITORY / ".ci" / "run").read_text()
