"""Training that loses one of four ranks at any collective goes on from its last checkpoint, bit for bit.

A fifth rank is a spare: it takes the place of the rank that died, so that the group has four ranks again.
"""

import contextlib
import os
import re
import shutil
import sys
import unittest.mock
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_ext.sim  # noqa: F401 - registers the device
from torch_ext.testing._internal.common_distributed import DistributedTestBase, with_timeout
from torch_ext.testing._internal.fault_plan import Undisturbed, every_rank_sees, fault_plan, nothing_lost

pytestmark = pytest.mark.costly
SIZE, STEPS, EVERY = 4, 4, 2
SEEDS = 200 if "--long" in sys.argv else 8


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to("sim")
    mesh = init_device_mesh("sim", (SIZE,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), 0.1)


def newest(folder):
    whole = [int(name) for name in os.listdir(folder) if os.path.exists(os.path.join(folder, name, ".metadata"))]
    return max(whole, default=0)


def train(role, folder):
    """Train from the newest whole checkpoint; return the final weights, whole."""
    model, optimizer = model_and_optimizer()
    state = {"model": model.state_dict(), "optimizer": {}}
    torch.sim.synchronize()
    dist.barrier(device_ids=[torch.sim.current_device()])
    if first := newest(folder):
        for each in model.parameters():  # what the optimizer will hold, to load into
            each.grad = torch.zeros_like(each)
        optimizer.step()
        state["optimizer"] = optimizer.state_dict()["state"]
        dcp.load(state, checkpoint_id=os.path.join(folder, str(first)))
        model.load_state_dict(state["model"])
        optimizer.zero_grad()
    for step in range(first, STEPS):
        x = torch.arange(16.0, device="sim").view(2, 8).add(step * SIZE + role).sin()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
            dcp.save(state, checkpoint_id=os.path.join(folder, str(step + 1)))
    return [each.full_tensor().cpu() for each in model.parameters()]  # a failed gather raises where the host reads


class TestRecovery(DistributedTestBase):
    world_size = SIZE + 1

    def setUp(self):
        # A backward that raises frees memory that FSDP2's streams may still use, and so do survivors that go on.
        changed = unittest.mock.patch.dict(os.environ, TORCH_EXT_RACES="off")
        changed.start()
        self.addCleanup(changed.stop)
        super().setUp()

    @with_timeout(1200)
    @fault_plan(seeds=SEEDS)
    @every_rank_sees(Undisturbed, ranks=range(SIZE))
    def test_death_at_any_collective(self):
        store, folder = dist.FileStore(self.file_name, -1), f"{self.file_name}.checkpoints"
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.mkdir(folder)
        role = self.rank
        if role < SIZE:
            try:
                weights = self.generation(0, role, store, folder)
            except dist.DistBackendError as error:
                if died := re.search(r"rank (\d) \(process \d+\) has ended", str(error)):
                    store.set("died", died[1])
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
            else:
                store.set("died", "nobody")
                return weights
        store.wait(["died"], timedelta(minutes=1))
        died = store.get("died").decode()
        if died == "nobody":
            return None
        role = int(died) if self.rank == SIZE else role
        return self.generation(1, role, store, folder)

    def generation(self, number, role, store, folder):
        torch.sim.set_device(role)
        store = dist.PrefixStore(f"generation {number}", store)
        dist.init_process_group("sim:simccl", rank=role, world_size=SIZE, store=store, timeout=timedelta(minutes=1))
        weights = train(role, folder)
        if role == 0:
            assert set(nothing_lost(folder)) == {"model", "optimizer"}
        return weights
