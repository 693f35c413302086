"""The order of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_ext.results import TestName
from torch_ext.runner.names import TestFile
from torch_ext.runner.schedule import make_plan


def file(name: str) -> TestFile:
    return TestFile(name, Path("/root") / name, name[:-3], Path("/root"))


def test_classes_of_a_file_and_tests_of_a_class_stand_together() -> None:
    order = ["b A 1", "a B 2", "b C 1", "a A 1", "b A 2", "a B 1", "b A 1"]
    tests = [TestName(f"{name}.py", cls, method) for name, cls, method in map(str.split, order)]
    files = [file("a.py"), file("b.py"), file("empty.py")]
    plan = make_plan(files, tests)
    assert [(batch.file, batch.cls) for batch in plan] == [
        (files[0], "B"), (files[0], "A"), (files[1], "A"), (files[1], "C")
    ]  # fmt: skip
    expected = ["a.py::B::2", "a.py::B::1", "a.py::A::1", "b.py::A::1", "b.py::A::2", "b.py::C::1"]
    assert [test.id for test in plan.tests] == expected


def test_a_test_of_an_unknown_file_is_not_dropped_in_silence() -> None:
    with pytest.raises(AssertionError, match=r"a\.py::A::test"):
        make_plan([file("b.py")], [TestName("a.py", "A", "test")])
