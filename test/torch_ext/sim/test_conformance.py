"""``simccl`` over both transports, gloo and the threaded group, on the suite that every c10d backend is held to."""

import os
import unittest
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from test.torch_ext.interpreter import python
from torch_ext.sim import faults
from torch_ext.testing._internal.common_distributed import DistributedTestBase, MultiThreadedTestCase
from torch_ext.testing._internal.distributed.backend_conformance import CAPABILITIES, BackendConformance

TRANSPORT = "TORCH_EXT_SIM_TRANSPORT"


class _OnSim(BackendConformance):
    device_type = "sim"
    backend_name = "simccl"
    transport: ClassVar[str]
    world_size = 3

    def setUp(self):
        self.addCleanup(os.environ.pop, TRANSPORT, None)
        os.environ[TRANSPORT] = self.transport
        super().setUp()


class TestSimcclOverSharedMemory(_OnSim, DistributedTestBase):
    transport = "shared"


class TestSimcclOverGloo(_OnSim, DistributedTestBase):
    transport = "gloo"


@pytest.mark.costly
class TestGloo(BackendConformance, DistributedTestBase):
    device_type = "cpu"
    backend_name = "gloo"
    world_size = 3


# Its ranks run in pytest's process, where torch's notes on newer names would be errors.
@pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")
class TestThreadedGroup(BackendConformance, MultiThreadedTestCase):
    device_type = "cpu"
    backend_name = "threaded"
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()


class TestThreadedGroupOnSim(TestThreadedGroup):
    device_type = "sim"


class TestMoreThreadsThanDevices(MultiThreadedTestCase):
    world_size = 65  # a simulated accelerator has at most 64 devices

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_they_share_a_device(self):
        tensor = torch.ones(2, device="sim:0")
        torch.distributed.all_reduce(tensor)
        self.assertEqual(tensor.tolist(), [65, 65])


# --- a backend outside this tree ---

OUT_OF_TREE = """
from torch import distributed as dist
from torch_ext.testing._internal.common_distributed import DistributedTestBase
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.distributed.backend_conformance import BackendConformance, Capabilities

def make(store, rank, size, timeout):
    return BACKEND(store, rank, size, timeout)

dist.Backend.register_backend("mine", make, devices=["cpu"])

class TestMine(BackendConformance, DistributedTestBase):
    device_type, backend_name, world_size = "cpu", "mine", 2
    capabilities = Capabilities(sizes=(1, 13), reductions=("SUM",), lacks=LACKS)

if __name__ == "__main__":
    run_tests()
"""
GLOO = "dist.ProcessGroupGloo"


def _run_out_of_tree(folder, test, backend=GLOO, lacks="{}"):
    file = folder / "test_mine.py"
    file.write_text(OUT_OF_TREE.replace("BACKEND", backend).replace("LACKS", lacks))
    return python(file, f"TestMine.{test}", TORCH_EXT_DEVICE="cpu")


@pytest.mark.costly
def test_suite_runs_on_an_out_of_tree_backend(tmp_path):
    ran = _run_out_of_tree(tmp_path, "test_scatter")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ('{"scatter": "not written yet"}', "scatter works; take it off `lacks`, which says: not written yet"),
        ('{"scater": "not written yet"}', "names unknown features: ['scater']"),
    ],
)
def test_features_listed_as_lacking_must_be_missing(lacks, message, tmp_path):
    ran = _run_out_of_tree(tmp_path, "test_scatter", lacks=lacks)
    assert ran.returncode == 1 and message in ran.stderr + ran.stdout, ran.stderr


class _Corrupted(_OnSim, DistributedTestBase):
    __test__ = False  # pytest's; the test below runs it
    transport = "shared"
    capabilities = replace(CAPABILITIES["simccl"], sizes=(1, 13))

    def start_group(self):
        super().start_group()
        if self.rank == 1:
            faults.corrupt(at=1)


@pytest.mark.parametrize("test", ["test_all_reduce", "test_all_gather", "test_scatter"])
def test_one_flipped_bit_fails_the_suite(test):
    result = unittest.TestResult()
    _Corrupted(test).run(result)
    assert len(result.failures) + len(result.errors) == 1, result
    assert "expected" in str(result.failures + result.errors)
