"""Which torch versions count as tested, and one warning about others."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from torch_ext.compat import untested_torch

CHECKOUT = Path(__file__).resolve().parents[3]
TOLD = "TORCH_EXT_TOLD_VERSION"


@pytest.fixture(autouse=True)
def not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOLD, "")


def said_about(version: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(metadata, "version", lambda name: {"torch": version}[name])
    return untested_torch()


TESTED = ["2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.15.9", "2.15.0.post1", "2.14"]
OTHERS = ["2.12.1", "2.16.0+cpu", "3.12.0", "2.14.0.dev20260301+cpu", "2.14.0a0+git1a2b3c", "2.15.0rc1", "main"]


@pytest.mark.parametrize("version", TESTED + OTHERS)
def test_a_version_that_is_no_release_of_the_range_is_told_with_it(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_about(version, monkeypatch)
    told = f"torch {version} is untested: torch_ext is tested on the releases 2.13 to 2.15. "
    assert said.startswith(told) if version in OTHERS else said == os.environ[TOLD] == ""


def test_it_is_told_once_and_no_more_in_processes_started_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_about("2.16.0", monkeypatch)
    assert untested_torch() == ""
    program = "from importlib import metadata; metadata.version = lambda name: '2.16.0'\n"
    program += "from torch_ext.compat import untested_torch; print(repr(untested_torch()))"
    assert python(program).stdout == "''\n"


def test_a_torch_that_is_loaded_says_its_version_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(torch, "__version__", "2.17.0a0+gitabc")
    assert "torch 2.17.0a0+gitabc is untested" in untested_torch()


def test_without_torch_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(metadata, "version", missing)
    assert untested_torch() == ""


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], cwd=CHECKOUT, capture_output=True, text=True)


def test_the_runner_tells_it_on_stderr_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "torch-2.16.0.dev1.dist-info").mkdir()
    (tmp_path / "torch-2.16.0.dev1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.16.0.dev1\n")
    (tmp_path / "test_nothing.py").write_text("")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom torch_ext.runner.cli import main\n"
    program += "import torch_ext.runner.execute as execute\n"
    program += f"execute.open_executor = lambda options: print(execute.os.environ.get({TOLD!r})) or sys.exit()\n"
    program += "main(sys.argv[1:])"
    done = python(program, "--root", str(tmp_path))
    assert done.stderr.count("warning: torch 2.16.0.dev1 is untested") == 1
    assert done.stdout == "2.16.0.dev1\n"


def test_a_test_file_that_is_run_without_the_runner_tells_it_as_a_warning() -> None:
    program = "import torch; torch.__version__ = '2.16.0'\n"
    program += "from torch_ext.testing._internal import common_distributed\n" * 2
    program += "from torch_ext.compat import untested_torch; assert not untested_torch()"
    done = python(program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UntestedTorchWarning: torch 2.16.0 is untested") == 1
