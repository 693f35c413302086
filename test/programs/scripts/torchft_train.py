"""Trains replicas with torchft, each of one process: HOW is ddp, local_sgd or diloco. Prints a hash of the weights."""

import hashlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

STEPS = 5

how, replica = sys.argv[1], int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), 0.05)
outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)


def state_dict():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load_state_dict(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of the ranks of this replica
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=20)), min_replica_size=2, load_state_dict=load_state_dict,
    state_dict=state_dict, replica_id=f"replica_{replica}_", store_addr="localhost", store_port=store.port,
    rank=0, world_size=1, timeout=timedelta(seconds=30), quorum_timeout=timedelta(seconds=60),
    use_async_quorum=False,
)  # fmt: skip


def train(step, wrapped=model, stepper=optimizer):
    stepper.zero_grad()
    x = torch.arange(8.0).view(2, 4).add(10 * step + replica).sin()
    wrapped(x).square().sum().backward()
    stepper.step()


if how == "ddp":
    wrapped, stepper = DistributedDataParallel(manager, model), OptimizerWrapper(manager, optimizer)
    while manager.current_step() < STEPS:
        train(manager.current_step(), wrapped, stepper)
else:
    outer_of = {"local_sgd": lambda: LocalSGD(manager, model, optimizer, sync_every=2)}
    outer_of["diloco"] = lambda: DiLoCo(manager, [model], optimizer, outer, sync_every=2)
    with outer_of[how]():
        while manager.current_step() < STEPS:
            train(manager.current_step())
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("weights", manager.current_step(), hashlib.sha256(weights).hexdigest(), flush=True)
manager.shutdown(wait=False)
