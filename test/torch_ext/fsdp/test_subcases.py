"""A sub-case that skips costs itself alone, and the run says so."""

import contextlib
import unittest
from unittest import mock

import pytest
from torch.distributed.fsdp import CPUOffload

from torch_ext.testing._internal._fsdp import subcases


class Case:
    """As much of a test case as running sub-cases asks for, without ranks."""

    def __init__(self):
        self.rank = 0
        self.said = []

    def subTest(self, **chosen):
        return contextlib.nullcontext()

    def announce(self, text):
        self.said.append(text)

    def id(self):
        return "Case.test"


@pytest.fixture(autouse=True)
def no_group():
    with mock.patch("torch.distributed.barrier"):
        yield


def run(case, test_fn, values=(1, 2, 3)):
    return subcases.run_and_tally(case, {"value": list(values)}, test_fn)


def test_skipped_subcase_leaves_the_others_to_run():
    case, seen = Case(), []

    def body(value):
        if value == 2:
            raise unittest.SkipTest("two is not for this machine")
        seen.append(value)

    tally = run(case, body)
    assert seen == [1, 3]
    assert (tally.ran, dict(tally.left_out)) == (2, {"two is not for this machine": 1})
    assert case.said == ["Case.test: 1 of 3 sub-cases left out: 1 x two is not for this machine"]


def test_nothing_left_out_says_nothing():
    case = Case()
    assert run(case, lambda value: None).ran == 3
    assert case.said == []


def test_only_rank_0_says_it():
    case = Case()
    case.rank = 1

    def body(value):
        if value == 2:
            raise unittest.SkipTest("no")

    run(case, body)
    assert case.said == []


def test_all_left_out_skips_the_test():
    def body(value):
        raise unittest.SkipTest("no accelerator")

    with pytest.raises(unittest.SkipTest, match="3 of 3 sub-cases left out: 3 x no accelerator"):
        run(Case(), body)


def test_failure_is_not_swallowed():
    def body(value):
        raise AssertionError("wrong value")

    with pytest.raises(AssertionError, match="wrong value"):
        run(Case(), body)


def test_missing_check_counts_once_a_subcase():
    case = Case()

    def body(value):
        for _ in range(value):
            case.subcase_tally.miss_check("values")

    tally = run(case, body, values=(0, 1, 2))
    assert (tally.ran, dict(tally.unchecked)) == (3, {"values": 2})
    assert case.said == ["Case.test: checks left out: 2 x values"]


@pytest.mark.parametrize(
    ("accelerator", "offload", "left_out"),
    [
        (False, CPUOffload(offload_params=True), True),
        (False, CPUOffload(offload_params=False), False),
        (False, None, False),
        (True, CPUOffload(offload_params=True), False),
    ],
)
def test_parameter_offload_is_left_out_without_an_accelerator(accelerator, offload, left_out):
    with mock.patch.object(subcases.device, "is_accelerator", return_value=accelerator):
        refused = pytest.raises(unittest.SkipTest, match="offload_params=True")
        with refused if left_out else contextlib.nullcontext():
            subcases.leave_out_parameter_offload(offload)
