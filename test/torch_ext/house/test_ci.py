"""``.ci/run`` is red when anything fails: its steps are replaced by small programs in a copy of the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

GREEN = "echo '3 passed, 0 failed, 1 skipped'"
RED = "echo '2 passed, 1 failed, 0 skipped'; exit 1"
PYTEST_GREEN = "echo '5 passed, 2 skipped in 0.1s'"
PYTEST_RED = "echo '4 passed, 1 failed in 0.1s'; exit 1"


def run_ci(tree: Path, first: str, second: str, linter: str = "true") -> subprocess.CompletedProcess[str]:
    shutil.copytree(REPOSITORY / ".ci", tree / ".ci")
    blocks = (f"<!-- command -->\n```bash\n{command}\n```\n" for command in (first, second))
    (tree / "README.md").write_text("# A project\n\n" + "\n".join(blocks))
    programs = tree / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, body in {"python": "true", "ruff": linter, "mypy": "true"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "CI": "true"}
    return subprocess.run(
        ["bash", ".ci/run"],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_all_green_is_green_and_counts_both_runners(tmp_path: Path) -> None:
    done = run_ci(tmp_path, GREEN, PYTEST_GREEN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "8 passed, 0 failed, 3 skipped"


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
    done = run_ci(tmp_path, first, second, linter)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == last


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
