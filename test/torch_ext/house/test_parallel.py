"""Tests that share something stay in one process, and the tables of ``parallel`` name tests that exist."""

from __future__ import annotations

import ast
import doctest

import pytest

from test.torch_ext import parallel
from test.torch_ext.house.source import CHECKOUT

TESTS = {path.name: path for path in (CHECKOUT / "test" / "torch_ext").rglob("test_*.py") if path.parent.name != "sim"}


def test_examples_are_true() -> None:
    failed, tried = doctest.testmod(parallel)
    assert tried > 0
    assert failed == 0


def test_a_test_without_a_parameter_stays_with_its_file() -> None:
    assert parallel.scope("a/test_four_ways.py::test_x") == "a/test_four_ways.py"


def test_a_parameter_is_the_scope_up_to_its_slash_and_whole_without_one() -> None:
    scopes = [parallel.scope(f"a/test_four_ways.py::test_x[{id}]") for id in ("run, one", "run, one/1", "run")]
    assert scopes == ["a/test_four_ways.py[run, one]"] * 2 + ["a/test_four_ways.py[run]"]


def test_files_that_take_longest_come_first_and_others_after_all_of_them() -> None:
    places = [parallel.place_in_queue(name) for name in parallel._LONGEST]
    assert places == sorted(set(places))
    assert parallel.place_in_queue("test_other.py") > max(places)


@pytest.mark.parametrize("file", sorted({*parallel.ALONE, *parallel.BY_PARAMETER, *parallel._LONGEST}))
def test_every_name_in_the_tables_is_a_tests(file: str) -> None:
    tree = ast.parse(TESTS[file].read_text(encoding="utf-8"))
    tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    unused = [start for start in parallel.ALONE.get(file, ()) if not any(name.startswith(start) for name in tests)]
    assert unused == []


@pytest.mark.parametrize("file", parallel.ALONE)
def test_a_test_that_may_run_anywhere_shares_no_fixture_of_its_module(file: str) -> None:
    tree = ast.parse(TESTS[file].read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    shared = {
        function.name
        for function in functions
        for decorator in function.decorator_list
        if ast.unparse(decorator).startswith("pytest.fixture(") and "module" in ast.unparse(decorator)
    }
    alone = [function for function in functions if function.name.startswith(parallel.ALONE[file])]
    asked = {function.name: {each.arg for each in function.args.args} & shared for function in alone}
    cheap = {"example", "subclass"}  # read a page
    assert {name: fixtures - cheap for name, fixtures in asked.items() if fixtures - cheap} == {}
