"""A subtest that skips does not stop the others, and the test run says how many did."""

import contextlib
import unittest
from unittest import mock

import pytest
from torch.distributed.fsdp import CPUOffload

from torch_ext.testing._internal._distributed import helpers
from torch_ext.testing._internal._fsdp import device


class Case:
    """The parts of a test case that run_subtests needs, without ranks."""

    def __init__(self):
        self.announced = []

    def id(self):
        return "Case.test"


@pytest.fixture(autouse=True)
def no_group():
    with mock.patch("torch.distributed.barrier"):
        yield


def run(case, test_fn, rank=0):
    rank_of_group = mock.patch("torch.distributed.get_rank", return_value=rank)
    with rank_of_group, mock.patch.object(helpers.wording, "announce", case.announced.append):
        helpers.run_subtests(case, {"value": [1, 2, 3]}, test_fn)


@pytest.mark.parametrize(
    ("rank", "skipped", "announced"),
    [
        (0, 2, ["Case.test: 1 of 3 subtests skipped: 1 x two is not for this machine"]),
        (1, 2, []),  # only rank 0 reports
        (0, None, []),
    ],
)
def test_skipped_subtest_leaves_the_others_to_run(rank, skipped, announced):
    case, seen = Case(), []

    def body(value):
        if value == skipped:
            raise unittest.SkipTest("two is not for this machine")
        seen.append(value)

    run(case, body, rank)
    assert seen == [value for value in (1, 2, 3) if value != skipped]
    assert case.announced == announced


def test_all_skipped_skips_the_test():
    def body(value):
        raise unittest.SkipTest("no accelerator")

    with pytest.raises(unittest.SkipTest, match="3 of 3 subtests skipped: 3 x no accelerator"):
        run(Case(), body)


@pytest.mark.parametrize(
    ("accelerator", "offload", "skips"),
    [
        (False, CPUOffload(offload_params=True), True),
        (False, CPUOffload(offload_params=False), False),
        (False, None, False),
        (True, CPUOffload(offload_params=True), False),
    ],
)
def test_parameter_offload_skips_without_an_accelerator(accelerator, offload, skips):
    with mock.patch.object(device, "is_accelerator", return_value=accelerator):
        refused = pytest.raises(unittest.SkipTest, match="offload_params=True")
        with refused if skips else contextlib.nullcontext():
            device.skip_parameter_offload(offload)
