"""Tests that take long run by default, but last."""

from __future__ import annotations

import pytest

_LAST = ("test_hazards", "test_kills", "test_endurance")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LAST.index(item.path.stem) if item.path.stem in _LAST else -1)
