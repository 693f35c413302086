"""Docstring examples run."""

import doctest
import importlib

import pytest

from test.torch_ext.house.source import module_name, python_files

MODULES = [
    module_name(path)
    for folder in ("torch_ext", "testing")
    for path in python_files(folder)
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.processes
@pytest.mark.parametrize("module", MODULES)
def test_examples_are_true(module, monkeypatch):
    monkeypatch.setattr("sys.argv", ["example.py"])  # torch_ext.upstream.file prepares for the file that is run
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried > 0
    assert failed == 0
