"""Loads the simulator once for these tests, or leaves them out where it cannot be built for want of a compiler."""

from __future__ import annotations

import warnings

import pytest

from torch_ext.world import access

collect_ignore_glob: list[str] = []

try:
    import torch_ext.sim  # noqa: F401 - registers the device
except RuntimeError as error:
    if type(error).__name__ != "MissingCompilerError":
        raise
    warnings.warn(f"the tests of the simulator are left out: {error}", stacklevel=1)
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the ranks' zygote now, when it has every test module and before a test uses a device in this process."""
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    for module in sorted(modules, key=lambda module: module.__name__):
        if hasattr(module, "ranks"):
            access.prepare(module.__name__)
