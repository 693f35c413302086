"""Fixtures of the command's tests: the suite of their module's ``LAYOUT``, and an executor without processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.runner.fakes import Cli, FakeCollector, FakeExecutor, write_suite


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def before() -> Iterator[object]:
    """The handler of SIGINT before the test, restored after it."""
    handler = signal.getsignal(signal.SIGINT)
    yield handler
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeExecutor]:
    executor = FakeExecutor(FakeCollector(request.module.LAYOUT))
    monkeypatch.setitem(sys.modules, "torch_ext.runner.execute", executor)
    yield executor
    assert executor.open == 0


@pytest.fixture
def cli(root: Path, executor: FakeExecutor, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command on the suite."""
    return Cli(executor, capsys)
