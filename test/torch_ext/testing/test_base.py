"""``DistributedTestBase`` on ``cpu``, and helpers in real ranks with a process group."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as c10d

from torch_ext.testing._internal.common_distributed import (
    DistributedTestBase,
    run_subtests,
    with_dist_debug_levels,
)

pytestmark = pytest.mark.processes


class TestOnCpu(DistributedTestBase):
    """The tests run in two ranks each; pytest judges the parent half."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        patched = mock.patch.dict(os.environ, TORCH_EXT_DEVICE="cpu")
        patched.start()
        self.addCleanup(patched.stop)
        super().setUp()

    def test_the_group_spans_the_ranks_and_reduces(self) -> None:
        group = self.create_pg("cpu")
        assert (group.size(), group.rank()) == (2, self.rank)
        assert c10d.get_backend(group) == self.backend("cpu") == "gloo"
        total = torch.tensor([self.rank + 1.0])
        c10d.all_reduce(total)
        assert total.item() == 3

    def test_a_smaller_group_spans_as_many_ranks_as_asked_for(self) -> None:
        if self.rank == 0:
            assert self.create_pg("cpu", world_size=1).size() == 1

    def test_the_world_size_is_in_the_environment(self) -> None:
        assert os.environ["WORLD_SIZE"] == "2"

    def test_each_rank_is_told_its_device(self) -> None:
        assert self.rank_to_device("cpu") == {0: [0], 1: [0]}
        assert self.backend("cuda:1") == "nccl"

    def test_subtests_keep_the_ranks_together(self) -> None:
        self.create_pg("cpu")
        seen: list[int] = []

        def body(value: int) -> None:
            total = torch.tensor([value * (self.rank + 1)])
            c10d.all_reduce(total)
            seen.append(int(total))

        run_subtests(self, {"value": [1, 2, 3]}, body)
        assert seen == [3, 6, 9]

    def test_debug_levels_reach_the_ranks(self) -> None:
        self.create_pg("cpu")
        before, seen = os.environ.get("TORCH_DISTRIBUTED_DEBUG"), []

        @with_dist_debug_levels(["DETAIL", "OFF"])
        def body() -> None:
            seen.append(c10d.get_debug_level().name)

        body()
        assert seen == ["DETAIL", "OFF"]
        assert os.environ.get("TORCH_DISTRIBUTED_DEBUG") == before


del DistributedTestBase  # pytest would take the imported class for a test class of this file
