"""``--upstream`` runs an unmodified file that imports torch's own harness on ours."""

import pytest

from test.torch_ext.interpreter import RUN_TEST, python

# The imports of upstream's files.
FILE = """
import os
import sys
import unittest

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.testing._internal.common_distributed import MultiProcessTestCase, has_efa, skip_if_lt_x_gpu
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_fsdp import FILE_SCHEMA, FSDPTest, get_devtype
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.dist_utils import dist_init
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture


class TestProcesses(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_harness_is_ours_and_other_names_are_torchs(self):
        self.assertTrue(MultiProcessTestCase.__module__.startswith("torch_ext."))
        self.assertEqual(has_efa.__module__, "torch.testing._internal.common_distributed")
        self.assertEqual(FILE_SCHEMA, "file://")  # common_fsdp of torch has it from elsewhere, and ours does not
        self.assertGreaterEqual(common_fsdp.DEVICE_COUNT, 0)  # ours looks it up on use
        with self.assertRaisesRegex(AttributeError, "torch.testing._internal.common_fsdp"):
            common_fsdp.nothing_of_the_sort

    def test_death_of_rank_1_is_seen(self):
        if self.rank == 1:
            os._exit(0)


class TestShards(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_group_is_there(self):
        tensor = torch.ones(1, device=get_devtype())
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)


class TestWorkers(TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @dist_init
    def test_call(self):
        self.assertEqual(rpc.rpc_sync(f"worker{1 - self.rank}", torch.add, args=(torch.ones(1), 1)).item(), 2)


if __name__ == "__main__":
    run_tests()
"""

# The usual device code of upstream's files, with one class for each obstacle. No list in it or in torch's helpers names
# our accelerator.
DEVICE_FILE = """
import os

import torch
import torch.distributed as dist
from beside import SIZE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import (
    HAS_ACCELERATOR, MultiProcContinuousTest, MultiThreadedTestCase, requires_accelerator_dist_backend,
    requires_ddp_rank, skip_if_lt_x_gpu,
)
from torch.testing._internal.common_fsdp import FSDPTest, get_devtype
from torch.testing._internal.common_utils import get_cycles_per_ms, run_tests, TEST_PRIVATEUSE1
from torch.testing._internal.distributed._shard.sharded_tensor import ShardedTensorTestBase, with_comms as with_group
from torch.testing._internal.distributed._tensor.common_dtensor import (
    create_local_tensor_test_class, DTensorContinuousTestBase, DTensorOpTestBase, DTensorTestBase,
    LocalDTensorContinuousTestBase, with_comms
)

os.environ["SET_BY_THE_FILE"] = "for its tests"
BACKEND = os.environ["BACKEND"]  # which upstream's own runner sets
device_type = torch.accelerator.current_accelerator().type
backend = dist.get_default_backend_for_device(device_type)
MANY = torch.accelerator.device_count() >= 6


class TestPerDevice(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_device(self, device):
        self.assertEqual(torch.device(device).type, device_type)
        self.assertEqual((self.device_type, get_devtype().type), (device_type, device_type))
        self.assertTrue(TEST_PRIVATEUSE1 and HAS_ACCELERATOR and MANY)
        self.assertTrue(requires_ddp_rank(self.device_type))
        self.assertGreater(get_cycles_per_ms(device_type), 0)


class TestOnHostOnly(FSDPTest):
    def test_is_left_alone(self, device):
        self.assertEqual(device, "cpu")


class TestThreads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    @skip_if_lt_x_gpu(2)
    def test_all_reduce(self):
        tensor = torch.ones(1, device=torch.device(device_type, self.rank))
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)


class TestMesh(DTensorTestBase):
    @with_comms
    def test_sharded(self):
        mesh = self.build_device_mesh()
        whole = torch.arange(8.0, device=self.device_type)
        self.assertEqual(distribute_tensor(whole, mesh, [Shard(0)]).full_tensor(), whole)
        self.assertEqual(mesh.device_type, device_type)


class TestContinuous(MultiProcContinuousTest):
    world_size = 2

    @requires_accelerator_dist_backend()
    def test_broadcast(self):
        tensor = torch.full((1,), float(self.rank), device=torch.device(device_type, self.rank))
        dist.broadcast(tensor, 1)
        self.assertEqual(tensor.item(), 1)


class TestNamedBackend(DTensorTestBase):
    @property
    def backend(self):
        return backend

    @requires_accelerator_dist_backend(["nccl", "xccl"])
    @with_comms
    def test_group_and_device_of_the_rank(self):
        tensor = torch.ones(SIZE, device=device_type)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.sum().item(), SIZE * self.world_size)
        self.assertEqual(torch.accelerator.current_device_index(), self.rank)

    @with_comms(eager_init=True)
    def test_eager(self):
        dist.barrier(device_ids=[self.rank])


class TestShardedBase(ShardedTensorTestBase):
    @with_group(init_rpc=False)
    def test_default_backend(self):
        tensor = torch.ones(1, device=device_type)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), self.world_size)


class TestSizeIsAProperty(DTensorContinuousTestBase):
    @property
    def world_size(self):
        return 6

    def test_ranks_are_on_the_device_and_in_the_files_environment(self):
        self.assertEqual((self.device_type, torch.accelerator.current_device_index()), (device_type, self.rank))
        self.assertEqual((os.environ["SET_BY_THE_FILE"], os.environ["BACKEND"]), ("for its tests", BACKEND))
        self.assertEqual((BACKEND, os.environ["WORLD_SIZE"]), ("gloo", "2"))
        self.assertTrue(os.path.isdir(os.environ["TEMP_DIR"]))


class TestNoRanks(DTensorContinuousTestBase):
    world_size = 2

    def test_size_of_the_group(self):
        self.assertEqual((dist.get_world_size(), dist.get_backend()), (2, "fake"))


TestNoRanks = create_local_tensor_test_class(TestNoRanks, base_class=LocalDTensorContinuousTestBase)


class TestThreadsOfOps(DTensorOpTestBase):
    def test_device_is_the_same_whoever_was_first(self):
        before = torch.accelerator.current_device_index()
        init_device_mesh(device_type, (self.world_size,))
        self.assertEqual(torch.accelerator.current_device_index(), before)


instantiate_device_type_tests(TestPerDevice, globals(), only_for=("cuda", "hpu", "xpu"))
instantiate_device_type_tests(TestOnHostOnly, globals(), only_for=("cpu",))

if __name__ == "__main__":
    run_tests()
"""


NEWER = """
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_fsdp import FSDP_DEVICES, FSDPTestContinuous
from torch.testing._internal.common_utils import HardwareClassification, TestCase, requires_gpu


class TestSharded(FSDPTestContinuous):
    hw_classification = HardwareClassification.ACCELERATOR
    world_size = 2

    def test_device(self, device):
        self.assertEqual(torch.ones(2, device=device).device.type, "sim")


class TestGeneric(TestCase):
    hw_classification = HardwareClassification.GENERIC

    @requires_gpu
    def test_accelerator(self):
        self.assertTrue(torch.accelerator.is_available())


instantiate_device_type_tests(TestSharded, globals(), only_for=FSDP_DEVICES, allow_xpu=True)
"""


def run(folder, *arguments, device="cpu"):
    # A class that has run in this process may have left its WORLD_SIZE, as upstream's does.
    return python(RUN_TEST, "--upstream", folder, *arguments, TORCH_EXT_DEVICE=device, WORLD_SIZE=None)


@pytest.mark.costly
def test_unmodified_files_run_on_our_ranks_and_cannot_pass_falsely(tmp_path):
    (tmp_path / "test_unmodified.py").write_text(FILE)
    (tmp_path / "test_newer.py").write_text(NEWER)
    done = run(tmp_path, "-v")
    assert "3 passed, 1 failed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "1  requires an accelerator" in done.stdout
    assert "rank 1 exited with code 0 at test_" in done.stdout
    assert f"-i test_unmodified.py::TestProcesses::test_death_of_rank_1_is_seen --upstream {tmp_path}" in done.stdout
    assert done.returncode == 1


@pytest.mark.costly
def test_unmodified_files_for_accelerators_run_on_the_simulated_one(tmp_path):
    (tmp_path / "__init__.py").touch()
    (tmp_path / "beside.py").write_text("SIZE = 3\n")
    (tmp_path / "test_for_accelerators.py").write_text(DEVICE_FILE)
    (tmp_path / "test_newer.py").write_text(NEWER)
    (tmp_path / "test_left.py").write_text("import sys\n\nif True:\n    sys.exit(0)\n")
    done = run(tmp_path, "-v", device="sim")
    assert "13 passed, 0 failed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "::test_device_sim" in done.stdout and "::test_is_left_alone_cpu" in done.stdout
    assert "the file ends the program while it is imported: sys.exit(0) in line 4 of test_left.py" in done.stdout
    assert "skipped as a whole in " in done.stdout and "failed as a whole" not in done.stdout
    assert done.returncode == 0


@pytest.mark.long
@pytest.mark.costly
def test_fresh_interpreters_see_our_harness_too(tmp_path):
    file = tmp_path / "test_unmodified.py"
    file.write_text(FILE)
    done = run(file, "-i", "TestShards", "--start-method", "interpreter")
    assert "1 passed, 0 failed, 0 skipped" in done.stdout, done.stdout + done.stderr
