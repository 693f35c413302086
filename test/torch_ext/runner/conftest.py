"""Fixtures of the command's tests: the suite of their module's ``LAYOUT``, and an executor without processes."""

import os
import signal
import sys

import pytest

from test.torch_ext.runner.fakes import Cli, FakeCollector, FakeExecutor, write_suite


@pytest.fixture
def root(request, tmp_path, monkeypatch):
    """The suite, in the working directory, with its own cache."""
    monkeypatch.setenv("TORCH_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_EXT_DEVICE", raising=False)
    monkeypatch.delenv("TORCH_EXT_OPTIONS", raising=False)
    monkeypatch.chdir(tmp_path)
    root = write_suite(tmp_path / "suites", request.module.LAYOUT)
    for path in root.rglob("*.py"):
        os.utime(path, (0, 0))
    return root


@pytest.fixture
def before():
    """The handler of SIGINT before the test, restored after it."""
    handler = signal.getsignal(signal.SIGINT)
    yield handler
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def executor(request, monkeypatch):
    executor = FakeExecutor(FakeCollector(request.module.LAYOUT))
    monkeypatch.setitem(sys.modules, "torch_ext.runner.execute", executor)
    yield executor
    assert executor.open == 0


@pytest.fixture
def cli(root, executor, capsys):
    """The command on the suite."""
    return Cli(executor, capsys)
