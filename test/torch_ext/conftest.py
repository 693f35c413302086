"""Keeps the simulated accelerator out of processes that test anything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SIM = Path(__file__).resolve().parent / "sim"


def _asked_for(config: pytest.Config) -> bool:
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return any(path == _SIM or _SIM in path.parents for path in named)


def pytest_configure(config: pytest.Config) -> None:
    # Else the first question after the device would register it, for all tests that follow in the process.
    if not _asked_for(config):
        os.environ.setdefault("TORCH_EXT_DEVICE", "cpu")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Importing these tests registers the device, which every other test in the process would then find.
    return True if collection_path == _SIM and not _asked_for(config) else None


def pytest_report_header(config: pytest.Config) -> str:
    return "" if _asked_for(config) else "test/torch_ext/sim needs a process of its own: pytest test/torch_ext/sim"
