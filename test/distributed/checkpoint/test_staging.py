# Owner(s): ["oncall: distributed"]
"""Stagers copy a state to the host or to another rank, and training does not change
the copy. Barriers hold checkpoint writers until all arrive.
"""

import copy
import os
import shutil
import sys
from datetime import timedelta
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._experimental import barriers, staging
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
    _ReplicationStager,
)
from torch.distributed.elastic.utils.distributed import get_free_port

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestReplicationStager(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _state(self, rank, step):
        start = 10.0 * rank + step
        weight = torch.arange(start, start + 6, device=self.device).view(2, 3)
        return {"w": weight, "nested": {"l": [weight.t() + 1, step]}, "rank": rank}

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_replication(self):
        """Each rank gets the state of the rank half a world away, and keeps the last
        one in a file. A write that fails leaves that file whole.
        """
        folder, partner = self.shared_folder(), (self.rank + 2) % 4
        limit = timedelta(seconds=30)
        stager = _ReplicationStager(
            self.process_group, limit, self.device, os.path.join(folder, "new")
        )
        name = f"rank_{self.rank}_replica_partner_{partner}.pt"
        path = os.path.join(folder, "new", name)
        for step in range(2):
            state = self._state(self.rank, step)
            found = stager.stage(state)
            expected = self._state(partner, step)
            self.assertEqual(found, expected, exact_device=False)
            self.assertEqual(torch.load(path), expected, exact_device=False)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(os.path.dirname(path))
        dist.barrier()
        stager.stage(state)
        self.assertTrue(os.path.exists(path), "a folder that was removed")
        for call in ("fsync", "rename"):
            full = mock.patch.object(os, call, side_effect=OSError("the disk is full"))
            text = f"from rank {partner} to rank {self.rank}: the disk is full"
            with full, self.assertRaisesRegex(RuntimeError, text):
                stager.stage(self._state(self.rank, 7))
            self.assertEqual(torch.load(path), expected, exact_device=False)
            self.assertFalse(os.path.exists(f"{path}.tmp"), "half a file")
        self.assertFalse(stager.should_synchronize_after_execute)
        default = _ReplicationStager(self.process_group, limit, self.device)
        self.assertTrue(os.path.isdir(default._storage_dir))
        os.rmdir(default._storage_dir)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_copies_keep_the_moment(self):
        """The call or a thread copies, blocking or not; a writer may be the stager."""
        state, folder = self._state(self.rank, 0), self.shared_folder()
        expected = copy.deepcopy(state)
        stagers = [
            stager(config(False, False, thread, non_blocking))
            for stager, config in (
                (DefaultStager, StagingOptions),
                (staging.DefaultStager, staging.CheckpointStagerConfig),
            )
            for thread in (False, True)
            for non_blocking in {False, torch.accelerator.is_available()}
        ]
        for stager in (*stagers, BlockingAsyncStager()):
            found = stager.stage(state)
            if not isinstance(found, dict):
                if hasattr(stager, "synchronize_staging"):
                    stager.synchronize_staging()
                    self.assertTrue(found.done(), "synchronized")
                found = found.result()
            self._change(state)
            self.assertEqual(found, expected, exact_device=False)
            self.assertTrue(all(each.is_cpu for each in self._tensors(found)))
            expected = copy.deepcopy(state)
            stager.close()
        group = dist.new_group(backend="cpu:gloo")
        writer = dcp.FileSystemWriter(folder)
        own = {f"{self.rank}": state}
        saving = dcp.async_save(own, storage_writer=writer, process_group=group)
        self._change(state)
        saving.result()
        dcp.load(own, checkpoint_id=folder)
        self.assertEqual(own[f"{self.rank}"], expected, "written by the stager")

    def _tensors(self, state):
        return state["w"], state["nested"]["l"][0]

    def _change(self, state):
        for each in self._tensors(state):
            each += 100


class TestBarriers(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_nobody_passes_before_all_arrive(self):
        """Barriers of two stores and of the process group, used in turn."""
        create, config = barriers.create_barrier_from_config, barriers.BarrierConfig
        ports, folder = [get_free_port() for _ in range(2)], self.shared_folder()
        dist.broadcast_object_list(ports)
        made = [create(config("dist_barrier"))]
        for port in ports:
            arguments = {
                "global_rank": self.rank, "global_world_size": 2, "timeout_secs": 20,
                "barrier_prefix": f"of {port}", "tcpstore_port": port,
                "master_address": "localhost", "timeout_barrier_init_secs": 20,
                "use_checkpoint_barrier_tcpstore_libuv": False,
            }  # fmt: skip
            made.append(create(config("tcp_store", arguments)))
        for step in range(9):
            path = os.path.join(folder, f"{step}")
            if self.rank == step % 2:
                os.mkdir(path)
            made[step % 3].execute_barrier()
            self.assertTrue(os.path.exists(path), f"passed barrier {step}")
        for each in made[1:]:
            reached = [each._tcp_store.get(f"rank{rank}") for rank in range(2)]
            self.assertEqual(reached, [b"2"] * 2, "last barrier of each rank")
        dist.barrier()  # before rank 0 ends, which has the store
        self.assertIsNone(create(config()))
        with self.assertRaisesRegex(ValueError, "Unknown barrier type: none"):
            create(config("none"))


if __name__ == "__main__":
    run_tests()
