"""Which torch versions count as tested, and one warning about others."""

import os
import sys
from importlib import metadata

import pytest

from test.torch_ext.interpreter import python
from torch_ext.compat import untested_torch

VARIABLE = "TORCH_EXT_TOLD_VERSION"


@pytest.fixture(autouse=True)
def reset_warning(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")


def warning_for(version, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(metadata, "version", lambda name: {"torch": version}[name])
    return untested_torch()


TESTED = ["2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.15.9", "2.15.0.post1", "2.14"]
OTHERS = ["2.12.1", "2.16.0+cpu", "3.12.0", "2.14.0.dev20260301+cpu", "2.14.0a0+git1a2b3c", "2.15.0rc1", "main"]


@pytest.mark.parametrize("version", TESTED + OTHERS)
def test_untested_version_is_reported_with_the_tested_range(version, monkeypatch):
    warning = warning_for(version, monkeypatch)
    expected = f"torch {version} is untested: torch_ext is tested on the releases 2.13 to 2.15. "
    assert warning.startswith(expected) if version in OTHERS else warning == os.environ[VARIABLE] == ""


def test_warning_is_given_once_for_a_process_and_its_children(monkeypatch):
    assert warning_for("2.16.0", monkeypatch)
    assert untested_torch() == ""
    program = "from importlib import metadata; metadata.version = lambda name: '2.16.0'\n"
    program += "from torch_ext.compat import untested_torch; print(repr(untested_torch()))"
    assert python("-c", program).stdout == "''\n"


def test_version_comes_from_torch_once_it_is_loaded(monkeypatch):
    import torch

    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(torch, "__version__", "2.17.0a0+gitabc")
    assert "torch 2.17.0a0+gitabc is untested" in untested_torch()


def test_without_torch_there_is_no_warning(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(metadata, "version", missing)
    assert untested_torch() == ""


def test_runner_warns_on_stderr_before_it_starts_processes(tmp_path):
    (tmp_path / "torch-2.16.0.dev1.dist-info").mkdir()
    (tmp_path / "torch-2.16.0.dev1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.16.0.dev1\n")
    (tmp_path / "test_nothing.py").write_text("")
    program = f"import os, sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom torch_ext.runner.cli import main\n"
    program += "import torch_ext.runner.execute as execute\n"
    program += f"execute.open_executor = lambda options: print(os.environ.get({VARIABLE!r})) or sys.exit()\n"
    program += "main(sys.argv[1:])"
    done = python("-c", program, "--root", tmp_path)
    assert done.stderr.count("warning: torch 2.16.0.dev1 is untested") == 1
    assert done.stdout == "2.16.0.dev1\n"


def test_test_file_without_the_runner_warns_through_warnings():
    program = "import torch; torch.__version__ = '2.16.0'\n"
    program += "from torch_ext.testing._internal import common_distributed\n" * 2
    program += "from torch_ext.compat import untested_torch; assert not untested_torch()"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UntestedTorchWarning: torch 2.16.0 is untested") == 1
