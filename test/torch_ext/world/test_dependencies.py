"""What an import depends on, as seen in a process of its own, since an audit hook stays for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from test.torch_ext.world.suites import CHECKOUT

PROGRAM = """
import importlib, json, sys
from torch_ext.world.dependencies import recorded

with recorded() as record:
    importlib.import_module("module")
found = record.dependencies(())
print(json.dumps([found.paths, found.variables, found.unsure, type(__import__("os").environ).__name__]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.txt").write_text("1 2")
    (tmp_path / "cases").mkdir()
    return tmp_path


def imported(folder: Path, source: str) -> tuple[list[str], list[str], str]:
    """Import a module of this source; return the paths below the folder, the variables, and what makes it unsure."""
    (folder / "module.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{folder}"},
    )  # fmt: skip
    paths, variables, unsure, environment = json.loads(done.stdout.splitlines()[-1])
    assert environment == "_Environ"
    return [os.path.relpath(path, folder) for path in paths], variables, unsure


@pytest.mark.parametrize(
    ("source", "paths"),
    [
        ("open('data.txt').read()", ["data.txt"]),
        ("import pathlib; pathlib.Path('data.txt').read_text()", ["data.txt"]),
        ("import os; os.close(os.open('data.txt', os.O_RDONLY))", ["data.txt"]),
        ("import os; os.listdir('cases')", ["cases"]),
        ("import glob; glob.glob('cases/*')", ["cases"]),
        ("import os; list(os.walk('cases'))", ["cases"]),
        ("import os; os.chdir('cases'); open('../data.txt')", ["data.txt"]),
        ("try: open('absent')\nexcept OSError: pass", ["absent"]),
        ("open('written', 'w').close()", []),
        ("import json, csv, decimal, unittest", []),
    ],
)
def test_what_is_read_and_listed_is_recorded(folder: Path, source: str, paths: list[str]) -> None:
    assert imported(folder, source) == (paths, [], "")


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("import os; os.environ.get('CASES')", ["CASES"]),
        ("import os; os.getenv('CASES', '')", ["CASES"]),
        ("import os; 'CASES' in os.environ", ["CASES"]),
        ("import os; os.environ['CASES'] = '1'", []),
    ],
)
def test_variables_that_are_asked_for_are_recorded(folder: Path, source: str, variables: list[str]) -> None:
    assert imported(folder, source) == ([], variables, "")


@pytest.mark.parametrize(
    ("source", "unsure"),
    [
        ("import subprocess; subprocess.run(['true'])", "starts a process"),
        ("import os; os.system('true')", "starts a process"),
        ("import os\nif not os.fork(): os._exit(0)", "starts a process"),
        ("import socket\ntry: socket.create_connection(('127.0.0.1', 9))\nexcept OSError: pass", "uses the network"),
        ("import os; dict(os.environ)", "reads the whole environment"),
    ],
)
def test_what_nobody_can_repeat_makes_unsure(folder: Path, source: str, unsure: str) -> None:
    assert imported(folder, source)[2] == unsure


def test_what_a_library_does_while_it_is_imported_is_the_librarys(folder: Path) -> None:
    import hypothesis

    assert hypothesis.__file__
    assert imported(folder, "import hypothesis, uuid, ctypes.util") == ([], [], "")
