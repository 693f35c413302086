"""What ``fault_plan`` and ``every_rank_sees`` accept, and what they report."""

import os
import tempfile
import unittest

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_ext.sim  # noqa: F401 - registers the device
from torch_ext.testing._internal.common_distributed import DistributedTestBase
from torch_ext.testing._internal.fault_plan import (
    InjectedFault,
    Undisturbed,
    every_rank_sees,
    fault_plan,
    nothing_lost,
)

GONE = dist.DistBackendError


def train(case, steps=4):
    case.create_pg("sim")
    weights = torch.ones(4, device="sim")
    for _ in range(steps):
        gradient = weights * (case.rank + 1)
        dist.all_reduce(gradient)
        weights = weights - 0.01 * gradient
    return weights


class Trials(DistributedTestBase):
    __test__ = False  # run below
    world_size = 3

    @fault_plan("rank 1: kill at all_reduce #3", "rank 1: exit 7 at all_reduce #1", "rank 1: raise at all_reduce #2")
    @every_rank_sees(GONE, naming=1, within=60)
    def test_death(self):
        train(self)

    @every_rank_sees(GONE, within=60)
    @fault_plan("rank 1: hang at all_reduce #3; rank 2: kill at all_reduce #3")
    def test_hang(self):
        train(self)

    @fault_plan("rank 2: delay 20ms at all_reduce #2", "every rank: slow 1.1x")
    @every_rank_sees(Undisturbed)
    def test_delay(self):
        return train(self)

    @fault_plan("rank 0: raise at all_reduce #2")
    def test_unsaid(self):
        train(self)

    @fault_plan("rank 1: corrupt at all_reduce #3")
    @every_rank_sees(Undisturbed)
    def test_corrupt(self):
        return train(self)

    @fault_plan("rank 1: kill at all_reduce #3")
    @every_rank_sees(GONE, naming=0)
    def test_wrong_name(self):
        train(self)

    @fault_plan("rank 1: kill at all_reduce #3")
    @every_rank_sees(GONE, naming=1, within=1e-9)
    def test_too_late(self):
        train(self)

    @fault_plan("rank 1: delay 1ms at all_reduce #3")
    @every_rank_sees(ValueError)
    def test_nothing_raised(self):
        train(self)

    @fault_plan("rank 1: kill at all_reduce #30")
    def test_never(self):
        train(self)

    @fault_plan("rank 1: delay 1ms at all_reduce #1; rank 2: kill at all_reduce #4")
    @every_rank_sees(Undisturbed)
    def test_smallest(self):
        return train(self)

    @fault_plan(seeds=20, kinds=("delay 1ms", "corrupt"))
    @every_rank_sees(Undisturbed)
    def test_seeds(self):
        return train(self)

    @fault_plan("rank 1: kill at all_reduce #3")
    def test_fails_undisturbed(self):
        raise KeyError("before any fault")


def failure_of(name):
    result = unittest.TestResult()
    Trials(name).run(result)
    return "\n".join(text for _, text in (*result.failures, *result.errors))


@pytest.mark.parametrize("name", ["test_death", "test_hang", "test_delay"])
def test_expected_sights_pass(name):
    assert failure_of(name) == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_unsaid", "rank 0 never called all_reduce, which ranks 1, 2 waited in"),
        ("test_corrupt", "expected Undisturbed, saw another result and no error"),
        ("test_wrong_name", "expected an error that names rank 0, saw DistBackendError"),
        ("test_too_late", "expected DistBackendError within 1e-09 s of the fault, not after"),
        ("test_nothing_raised", "expected ValueError, saw "),
        ("test_never", "no fault of the plan has happened: rank 1: kill at all_reduce #30"),
        ("test_smallest", "The smallest plan that fails:\n    @fault_plan('rank 2: kill at all_reduce #1')"),
        ("test_seeds", "rank 1: corrupt at collective #1')\n\nPlans:\n    0  FAILED"),
        ("test_fails_undisturbed", "ranks 0-2 raised KeyError"),
    ],
)
def test_other_sights_fail(name, said):
    assert said in failure_of(name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "got plans and seeds, or neither"),
        ({"seeds": 3, "kinds": ["boil"]}, "there is no kind 'boil' of fault"),
    ],
)
def test_a_wrong_decorator_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        fault_plan(**arguments)


def test_a_torn_checkpoint_is_found():
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(AssertionError, match="has no whole checkpoint"):
            nothing_lost(folder)
        for step in (9, 10):
            dcp.save({"w": torch.full((3,), float(step))}, checkpoint_id=os.path.join(folder, str(step)), no_dist=True)
        os.mkdir(os.path.join(folder, "11"))  # died before its .metadata
        assert nothing_lost(folder)["w"].tolist() == [10.0] * 3
        file = os.path.join(folder, "9", "__0_0.distcp")
        os.truncate(file, os.path.getsize(file) // 2)
        with pytest.raises(AssertionError, match=r"9/\.metadata marks a checkpoint as whole that cannot be loaded"):
            nothing_lost(folder)


def test_the_planted_error_is_a_runtime_error():
    assert issubclass(InjectedFault, RuntimeError)
