"""Lines of ranks, and of the parent half beside them, count under ``coverage`` with this project's settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.house.suites import RUN_TEST, line_of, run, write_suite

pytest.importorskip("coverage")

SETTINGS = f"--rcfile={CHECKOUT / 'pyproject.toml'}"


def covered(folder: Path) -> set[int]:
    """Combine what the processes of a run left in ``folder`` and return the lines of the suite that ran."""
    for command in (["combine", "-q"], ["json", "-q", "--include=test_suite.py", "-o", "covered.json"]):
        subprocess.run([sys.executable, "-m", "coverage", command[0], SETTINGS, *command[1:]], cwd=folder, check=True)
    (file,) = json.loads((folder / "covered.json").read_text())["files"].values()
    return set(file["executed_lines"])


@pytest.mark.parametrize(
    "arguments",
    [("test_suite.py",), ("-m", "pytest", "test_suite.py"), (RUN_TEST, "--root", ".")],
    ids=["file", "pytest", "run_test"],
)
def test_lines_of_ranks_count(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    write_suite(tmp_path / "suite")
    done = run(tmp_path / "suite", "-m", "coverage", "run", SETTINGS, *arguments)
    assert done.code == 1, done.output
    wanted = {line_of(name) for name in ("line of ranks", "line of one rank", "line of the parent half")}
    assert wanted - covered(tmp_path / "suite") == set(), done.output
