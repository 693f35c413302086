"""``DistributedTestBase`` on ``cpu``."""

import importlib
import os
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as c10d

from torch_ext.testing._internal.common_distributed import DistributedTestBase

pytestmark = pytest.mark.processes


class TestOnCpu(DistributedTestBase):
    """The tests run in two ranks each; pytest judges the parent half."""

    world_size = 2

    def setUp(self):
        patched = mock.patch.dict(os.environ, TORCH_EXT_DEVICE="cpu")
        patched.start()
        self.addCleanup(patched.stop)
        super().setUp()

    def test_groups_span_the_ranks_and_each_gets_its_device_and_the_world_size(self):
        group = self.create_pg("cpu")
        assert (group.size(), group.rank()) == (2, self.rank)
        assert c10d.get_backend(group) == self.backend("cpu") == "gloo"
        total = torch.tensor([self.rank + 1.0])
        c10d.all_reduce(total)
        assert total.item() == 3
        assert os.environ["WORLD_SIZE"] == "2"
        assert self.rank_to_device("cpu") == {0: [0], 1: [0]}
        assert self.backend("cuda:1") == "nccl"

    def test_smaller_group_spans_the_requested_ranks(self):
        if self.rank == 0:
            assert self.create_pg("cpu", world_size=1).size() == 1

    def test_methods_of_a_test_can_be_sent_to_peers(self):
        """As by RPC, whose tests pass their own methods."""
        method = pickle.loads(pickle.dumps(self.assertEqual))
        self.assertEqual(method.__self__.rank, self.rank)
        with method.__self__.subTest("of a copy"):
            method(1, 1)


class TestOnSim(DistributedTestBase):
    """A group makes the rank's device current, as NCCL needs it, and no device the default, as upstream's."""

    world_size = 2

    def test_a_tensor_without_a_device_stays_on_the_host(self):
        importlib.import_module("torch_ext.sim")
        self.create_pg("sim")
        assert torch.ones(1).device.type == "cpu"
        assert torch.ones(1, device="sim").device.index == self.rank


del DistributedTestBase  # pytest would take the imported class for a test class of this file
