"""Loads the simulator once for these tests, or leaves them out where it cannot be built for want of a compiler."""

from __future__ import annotations

import warnings

import pytest

collect_ignore_glob: list[str] = []

try:
    import torch_ext.sim  # noqa: F401 - registers the device
except RuntimeError as error:
    if type(error).__name__ != "MissingCompilerError":
        raise
    warnings.warn(f"the tests of the simulator are left out: {error}", stacklevel=1)
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what forks before what uses a device in this process."""
    items.sort(key=lambda item: item.path.parent.name == "one_process")
