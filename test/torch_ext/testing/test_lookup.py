"""Lazy lookup of names that are in different places in different releases."""

import sys
import types

import pytest
import torch

from torch_ext.compat import MissingTorchNameError, lazy_names


@pytest.fixture
def area(monkeypatch):
    """Make a compat module with the given places."""

    def make(**places):
        module = types.ModuleType("area_of_compat")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module)["__getattr__"] = lazy_names(module.__name__, places)
        return module

    return make


@pytest.fixture
def release(monkeypatch):
    """A module of some torch release, with a name in it."""
    module = types.ModuleType("release_of_torch")
    module.inner = types.SimpleNamespace(name="found")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_first_place_with_the_name_is_used(area, release):
    module = area(name=("no_such_module:name", "release_of_torch:name", "release_of_torch:inner.name", "sys:path"))
    assert module.name == "found"


def test_nothing_is_looked_up_before_it_is_used(area):
    module = area(name=("release_that_comes_later:name",))
    sys.modules["release_that_comes_later"] = types.SimpleNamespace(name="late")
    try:
        assert module.name == "late"
    finally:
        del sys.modules["release_that_comes_later"]
    assert module.name == "late"  # the result is cached


def test_error_for_a_missing_name_lists_the_places_tried_and_advice(area):
    area(name=("no_such_module:name", "sys:no_such_name"))
    with pytest.raises(MissingTorchNameError) as raised:
        exec("from area_of_compat import name", {})
    assert str(raised.value) == (
        f"torch {torch.__version__} has name in none of: no_such_module:name, sys:no_such_name. "
        "Find where it moved and add the place to area_of_compat."
    )


def test_unknown_name_of_an_area_is_an_attribute_error(area):
    module = area(name=("sys:path",))
    assert not hasattr(module, "other")
    with pytest.raises(AttributeError, match="module 'area_of_compat' has no attribute 'other'"):
        _ = module.other
