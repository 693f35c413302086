"""The completions that a shell gets."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path

import pytest

from test.torch_ext.interpreter import RUN_TEST, python
from torch_ext.runner.arguments import _patterns_below_root


def test_patterns_are_the_folders_and_files_below_the_root(tmp_path: Path) -> None:
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
def test_the_command_answers_a_shell(tmp_path: Path, line: str, found: str) -> None:
    told = tmp_path / "told"
    asked = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(told),
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n",
    }  # fmt: skip
    done = python(RUN_TEST, **asked)
    assert done.returncode == 0 and sorted(told.read_text().split()) == found.split(), done
