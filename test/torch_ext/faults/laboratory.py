"""Programs with one fault each, of the shapes of real hangs and losses, and a line that the report must have.

A program is a function of its rank and the number of ranks. Families: collectives, transfers, data parallel, sharded,
tensor parallel, pipeline, checkpoints, memory.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_ext.faults.points import phase

# The page of the laboratory runs what it can on the host, where torch's own harness can.
DEVICE = os.environ.get("LABORATORY_DEVICE", "sim")


def full(value=1.0, numel=4):
    return torch.full((numel,), value, device=DEVICE)


def finish():
    """Wait for the device."""
    torch.get_device_module(DEVICE).synchronize()


def shared_folder(rank):
    """Make a folder, and return its path on each rank."""
    path = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(path, 0)
    return path[0]


def steps(rank, size):
    """A step loop with a reduction; a rank that skips one is missed only at the end."""
    for _ in range(4):
        dist.all_reduce(full())


def mixed(rank, size):
    """One of each collective."""
    dist.broadcast(full(), 0)
    dist.all_gather_into_tensor(full(numel=4 * size), full())
    dist.reduce_scatter_tensor(full(), full(numel=4 * size))
    dist.all_to_all_single(full(numel=size), full(numel=size))
    dist.barrier()


def in_groups(rank, size):
    """Two groups of all ranks, as a data-parallel and a tensor-parallel one."""
    groups = [dist.new_group(group_desc=name) for name in ("dp", "tp")]
    for _ in range(3):
        for group in groups:
            dist.all_reduce(full(), group=group)


def pipeline(rank, size):
    """Stages pass activations on, and gradients back."""
    for _ in range(3):
        if rank > 0:
            dist.recv(full(), rank - 1)
        if rank < size - 1:
            dist.send(full(), rank + 1)
            dist.recv(full(), rank + 1)
        if rank > 0:
            dist.send(full(), rank - 1)


def _train(model, numel=8):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(2, numel, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _net():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(DEVICE)


def ddp(rank, size):
    _train(nn.parallel.DistributedDataParallel(_net()))


def fsdp(rank, size):
    net = _net()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    _train(net)


def checkpointed(rank, size):
    """Saves a checkpoint between two reductions, then loads it."""
    folder = os.path.join(shared_folder(rank), "step_1")
    state = {"w": full(rank)}
    with phase("save"):
        dcp.save(state, checkpoint_id=folder)
    dist.barrier()
    with phase("load"):
        dcp.load(state, checkpoint_id=folder)
    dist.barrier()


def agrees(rank, size):
    """Ranks compare what they hold, as a check of replicas does."""
    mine = full(3.0)
    dist.all_reduce(mine)
    dist.all_gather(held := [full() for _ in range(size)], mine)
    assert all(bool((each == 3.0 * size).all()) for each in held), "replicas differ, or hold another sum"


WRITE = "torch.distributed.checkpoint.filesystem._write_item"
DIED, KEPT = "rank 1 was killed by SIGKILL", "rank 1 never called"
# Program, the fault, and the line of the report.
PROGRAMS = [
    # Deaths and exits
    (steps, "rank 1: kill at all_reduce #3", DIED),
    (steps, "rank 0: kill SIGSEGV at all_reduce #1", "rank 0 was killed by SIGSEGV"),
    (steps, "rank 1: exit 3 at all_reduce #2", "rank 1 exited with code 3"),
    (steps, "rank 1: exit 0 at all_reduce #4", "rank 1 exited with code 0"),
    (mixed, "rank 1: kill at broadcast", DIED),
    (mixed, "rank 1: kill at all_gather", DIED),
    (mixed, "rank 1: kill at reduce_scatter", DIED),
    (mixed, "rank 1: kill at all_to_all", DIED),
    (mixed, "rank 1: kill at barrier", DIED),
    (ddp, "rank 1: kill at all_reduce #2", DIED),
    (ddp, "rank 1: kill at backward of 2 #2", DIED),
    (fsdp, "rank 1: kill at all_gather #5", DIED),
    (fsdp, "rank 1: kill at reduce_scatter #2", DIED),
    (fsdp, "rank 1: kill at step #3", DIED),
    (pipeline, "rank 1: kill at send #2", DIED),
    (pipeline, "rank 1: kill at recv #3", DIED),
    (checkpointed, "rank 1: kill at phase save", DIED),
    (checkpointed, "rank 1: kill at call of torch.distributed.checkpoint.load", DIED),
    # Exceptions on one rank
    (steps, "rank 1: raise at all_reduce #3", "rank 1 raised InjectedFault"),
    (ddp, "rank 1: raise ValueError at forward of 2 #2", "rank 1 raised ValueError"),
    (fsdp, "rank 1: raise at forward of 2 #2", "rank 1 raised InjectedFault"),
    (fsdp, "rank 1: raise KeyError at backward of 0 #1", "rank 1 raised KeyError"),
    (fsdp, "rank 1: fail allocation #40", "rank 1 raised torch.OutOfMemoryError"),
    (checkpointed, f"rank 0: raise OSError at call of {WRITE}", "CheckpointException ranks:dict_keys([0])"),
    # Hangs: a rank that never comes, or skips a collective and goes on
    (steps, "rank 1: hang at all_reduce #3", KEPT),
    (in_groups, "rank 1: hang at all_reduce #2 of group tp", KEPT),
    (fsdp, "rank 1: hang at forward of 2 #2", KEPT),
    (fsdp, "rank 1: hang at reduce_scatter #2", KEPT),
    (steps, "rank 1: drop at call of torch.distributed.all_reduce #2", "rank 1 destroyed the process group"),
    (in_groups, "rank 1: drop at call of torch.distributed.all_reduce #5", "ranks 0, 1 wait for each other"),
    (steps, "rank 1: drop at all_reduce #2", "rank 1"),
    (pipeline, "rank 0: drop at send #2", "in recv"),
    (pipeline, "rank 1: hang at recv #2", "rank 0"),
    (steps, "every rank: split 0 at all_reduce #2", "hung in all_reduce"),
    # Silent corruption
    (agrees, "rank 1: corrupt at all_reduce #1", "replicas differ"),
    (agrees, "rank 1: corrupt element 3 bit 0 at all_gather #1", "replicas differ"),
    (agrees, "rank 0: drop at call of torch.distributed.all_reduce", "rank 1"),
    # No failure: what only takes longer
    (steps, "rank 1: delay 100ms at all_reduce #2", ""),
    (fsdp, "rank 1: slow 3x", ""),
    (ddp, "rank 1: stop 100ms at step #2", ""),
]  # fmt: skip
