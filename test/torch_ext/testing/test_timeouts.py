"""Which time limit applies to a test if several are set."""

from __future__ import annotations

import unittest
from datetime import timedelta

import pytest

from torch_ext.testing._internal._distributed.timeouts import timeout_of
from torch_ext.testing._internal.common_distributed import TIMEOUT_DEFAULT, TIMEOUT_OVERRIDE, get_timeout, with_timeout


class Plain(unittest.TestCase):
    def test_it(self) -> None: ...

    @with_timeout(7.5)
    def test_marked(self) -> None: ...


class OfClass(Plain):
    timeout = timedelta(minutes=2, seconds=1)


class OfClassInSeconds(Plain):
    timeout = 33


class OfClassAsMethod(Plain):
    def timeout(self) -> int:  # not a time limit: some existing classes have a helper with this name
        return 1


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXT_TIMEOUT", raising=False)


def test_the_name_alone_gives_the_default_or_its_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIMEOUT_OVERRIDE, "test_slow", 900)
    assert get_timeout("module.Class.test_slow") == 900
    assert get_timeout("module.Class.test_slower") == TIMEOUT_DEFAULT
    assert get_timeout("module.test_slow.test_it") == TIMEOUT_DEFAULT


@pytest.mark.parametrize(
    ("case", "seconds"),
    [
        (Plain("test_it"), TIMEOUT_DEFAULT),
        (Plain("test_marked"), 7.5),
        (OfClass("test_it"), 121.0),
        (OfClass("test_marked"), 7.5),
        (OfClassInSeconds("test_it"), 33.0),
        (OfClassAsMethod("test_it"), TIMEOUT_DEFAULT),
    ],
    ids=lambda value: str(value),
)
def test_the_nearest_word_counts(case: unittest.TestCase, seconds: float) -> None:
    assert timeout_of(case) == seconds


@pytest.mark.parametrize("case", [Plain("test_it"), Plain("test_marked"), OfClass("test_it")], ids=str)
def test_the_command_line_goes_before_all(case: unittest.TestCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIMEOUT_OVERRIDE, "test_it", 900)
    monkeypatch.setenv("TORCH_EXT_TIMEOUT", "2.5")
    assert timeout_of(case) == 2.5


def test_the_class_goes_before_the_override_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIMEOUT_OVERRIDE, "test_it", 900)
    assert timeout_of(Plain("test_it")) == 900
    assert timeout_of(OfClass("test_it")) == 121
