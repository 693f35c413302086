"""Which time limit applies to a test if several are set."""

import unittest
from datetime import timedelta

import pytest

from torch_ext.testing._internal._distributed.methods import count_ranks
from torch_ext.testing._internal.common_distributed import TIMEOUT_DEFAULT, TIMEOUT_OVERRIDE, get_timeout, with_timeout
from torch_ext.world.settings import seconds_of, timeout_of


class Plain(unittest.TestCase):
    def test_it(self): ...

    @with_timeout(7.5)
    def test_marked(self): ...


class OfClass(Plain):
    timeout = timedelta(minutes=2, seconds=1)


class OfClassInSeconds(Plain):
    timeout = 33


class OfClassAsMethod(Plain):
    def timeout(self):  # not a time limit: some existing classes have a helper with this name
        return 1


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    monkeypatch.delenv("TORCH_EXT_TIMEOUT", raising=False)


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
def test_nearest_timeout_applies(case, seconds, monkeypatch):
    assert timeout_of(case) == seconds
    monkeypatch.setitem(TIMEOUT_OVERRIDE, "test_it", 900)
    assert timeout_of(case) == (900 if seconds == TIMEOUT_DEFAULT else seconds)
    assert get_timeout("module.Class.test_it") == 900 and get_timeout("module.test_it.test_b") == TIMEOUT_DEFAULT
    monkeypatch.setenv("TORCH_EXT_TIMEOUT", "2.5")
    assert timeout_of(case) == 2.5


@pytest.mark.parametrize("value", [float("nan"), 0, -1, True, "60"])
def test_invalid_limits_and_world_sizes_are_refused(value):
    with pytest.raises(ValueError, match="expected a finite number of seconds above 0"):
        seconds_of(value, "the limit")
    if value != 0:  # as on a machine without devices
        with pytest.raises(ValueError, match="expected the number of ranks as an int"):
            count_ranks(Plain, value)
