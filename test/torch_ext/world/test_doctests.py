"""The examples in the docstrings of the world's modules are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import torch_ext.world

MODULES = sorted(module.name for module in pkgutil.iter_modules(torch_ext.world.__path__))
WITH_EXAMPLES = {"_os", "outcome", "phrases"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"torch_ext.world.{name}"))
    assert result.failed == 0
    assert result.attempted > 0 or name not in WITH_EXAMPLES
