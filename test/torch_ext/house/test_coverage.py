"""``coverage`` counts lines that run in ranks and in the parent half."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.house.suites import RUN_TEST, line_of, run, write_suite

pytest.importorskip("coverage")

IN_RANKS = {line_of("line of ranks"), line_of("line of one rank")}
IN_PARENT = line_of("line of the parent half")


def covered(suite: Path, settings: Path, *arguments: str) -> set[int]:
    """Run the suite under coverage, combine the data of its processes, and return the lines that ran."""
    write_suite(suite)
    rcfile = f"--rcfile={settings}"
    done = run(suite, "-m", "coverage", "run", rcfile, *arguments)
    assert done.code == 1, done.output
    for command in (["combine", "-q"], ["json", "-q", "--include=test_suite.py", "-o", "covered.json"]):
        subprocess.run([sys.executable, "-m", "coverage", command[0], rcfile, *command[1:]], cwd=suite, check=True)
    (file,) = json.loads((suite / "covered.json").read_text())["files"].values()
    return set(file["executed_lines"])


def test_ranks_count_with_the_settings_that_multiprocessing_asks_for(tmp_path: Path) -> None:
    """Many projects have these: coverage then saves data in processes that end through multiprocessing's bootstrap."""
    settings = tmp_path / "settings"
    settings.write_text("[run]\nparallel = true\nconcurrency = multiprocessing\n")
    assert covered(tmp_path / "suite", settings, "test_suite.py") >= IN_RANKS


def test_ranks_and_parent_half_count_with_this_projects_settings(tmp_path: Path) -> None:
    settings = CHECKOUT / "pyproject.toml"
    assert covered(tmp_path / "suite", settings, RUN_TEST, "--root", ".") >= IN_RANKS | {IN_PARENT}
