"""Collectives in graphs: captured without running, and run again by each replay."""

import pytest
import torch
import torch.distributed as dist

from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")


@ranks.world_of(2)
def test_collectives_of_a_graph_run_in_each_replay_and_must_be_waited_for_in_it(rank, world_size):
    x, gathered = torch.ones(4, device="sim"), torch.zeros(8, device="sim")
    for asynchronous in (False, True):
        graph = torch.accelerator.Graph()
        with SIM.stream(SIM.Stream()), graph:
            y = x * 2
            work = dist.all_reduce(y, async_op=asynchronous)
            if work is not None:
                work.wait()
            z = y + 1
            dist.all_gather_into_tensor(gathered, z)
        for value in (1.0, 3.0):
            x.fill_(value + rank)
            graph.replay()
            assert z.tolist() == [2 * (2 * value + 1) + 1] * 4 and gathered.tolist() == z.tolist() * 2
    graph = torch.accelerator.Graph()
    with pytest.raises(torch.AcceleratorError, match="capturing stream has unjoined work"):
        with SIM.stream(SIM.Stream()), graph:
            dist.all_reduce(x, async_op=True)
    dist.all_reduce(x.fill_(1))
    assert x.tolist() == [2.0] * 4
