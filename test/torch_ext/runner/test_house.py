"""Rules of the runner's house: it starts without torch, and its examples are true."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import torch_ext.runner

ROOMS = sorted(module.name for module in pkgutil.iter_modules(torch_ext.runner.__path__, "torch_ext.runner."))
CHECKOUT = Path(__file__).resolve().parents[3]


def modules_after(statement: str) -> set[str]:
    program = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, stdout=subprocess.PIPE, check=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_no_room_imports_torch() -> None:
    assert "torch_ext.runner.cli" in ROOMS
    assert "torch" not in modules_after(f"import {', '.join(ROOMS)}")


def test_the_command_loads_neither_the_report_nor_what_starts_processes_before_it_needs_them() -> None:
    loaded = modules_after("import torch_ext.__main__")
    assert loaded.isdisjoint({"rich", "difflib", "torch_ext.runner.report", "torch_ext.runner.execute"})


@pytest.mark.parametrize("room", ["keywords", "nearest", "rerun", "results", "selection"])
def test_examples_are_true(room: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(f"torch_ext.runner.{room}"))
    assert tried > 0
    assert failed == 0
