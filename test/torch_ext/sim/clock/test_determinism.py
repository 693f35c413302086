"""Equal programs give equal traces, whatever the load: FSDP2 steps on two ranks that are delayed at random."""

import hashlib
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")
RUNS = 50


def step(model, optimizer, x, pause):
    """Train one step with pauses of the host between its parts, and poll events as a data loader's thread would."""
    loss = model(x).square().mean()
    time.sleep(pause())
    loss.backward()
    time.sleep(pause())
    optimizer.step()
    optimizer.zero_grad()
    event = SIM.current_stream().record_event()
    while not event.query():
        time.sleep(pause())
    return loss.item()


@ranks.world_of(2)
def test_fifty_runs_have_one_trace(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to("sim")
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(4, 16, device="sim")
    step(model, optimizer, x, lambda: 0)  # the first step makes streams
    digests = set()
    for run in range(RUNS):
        delays = random.Random(f"{run} {rank}")
        scale = run % 5 / 2000  # no delays, up to those of a busy machine
        with SIM.clock.measure("unit", launch_ns=7) as trace:
            step(model, optimizer, x, lambda drawn=delays, at_most=scale: drawn.random() * at_most)
        digests.add(trace.digest())
    assert len(digests) == 1, len(digests)
    of_all = [None] * world_size
    times = [(work.name, work.start, work.end) for work in trace.select("collective")]
    dist.all_gather_object(of_all, hashlib.sha256(repr(times).encode()).hexdigest())
    assert len(set(of_all)) == 1, "collectives end on all ranks at once"
