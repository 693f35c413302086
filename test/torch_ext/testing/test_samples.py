"""The test that asks for samples of an operator is found as torch finds it.

The test itself imports ``op_db``, which takes two seconds in each worker that collects this file.
"""

import unittest

import torch
from torch.testing._internal import common_utils

from torch_ext.compat import testing

ASKED = []


class TestAsking(unittest.TestCase):
    __test__ = False  # pytest

    def test_asks(self):
        ASKED.append((common_utils.extract_test_fn(), common_utils.get_tracked_input()))
        samples = testing.op_db[0].sample_inputs("cpu", torch.float32)
        next(iter(samples))
        ASKED.append((samples.test_fn, common_utils.get_tracked_input()))

    test_asks.tracked_input = None


class Unfinished(unittest.TestCase):
    """Has no name yet."""

    __test__ = False

    def __init__(self):
        self.found = common_utils.extract_test_fn()


class Proxy:
    """Claims to be a test."""

    __class__ = TestAsking

    def ask(self):
        return common_utils.extract_test_fn()


def test_samples_name_the_running_test_and_no_other(monkeypatch):
    monkeypatch.setattr(common_utils, "extract_test_fn", common_utils.extract_test_fn)
    found = []
    for _ in range(2):
        assert unittest.TextTestRunner().run(unittest.TestSuite([TestAsking("test_asks")])).wasSuccessful()
        found.append((ASKED[:], common_utils.extract_test_fn()))
        ASKED.clear()
        TestAsking.test_asks.tracked_input = None
        testing.samples_without_sources()
    (by_torch, outside), (by_frames, _) = found
    assert [function for function, _ in by_frames] == [TestAsking.test_asks] * 2
    assert [(function, str(tracked)) for function, tracked in by_torch] == [
        (function, str(tracked)) for function, tracked in by_frames
    ]
    # Torch's own function may have been replaced before.
    assert by_frames[0][1] is None and by_frames[1][1].index == 0
    assert outside is common_utils.extract_test_fn() is Proxy().ask() is Unfinished().found is None
