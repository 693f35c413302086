"""Synchronized batch norm, and DTensor with its random numbers, equal the host; the suites have the other training."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")


@ranks.world_of(4)
def test_sync_batch_norm_equals_batch_norm_over_the_whole_batch(rank, world_size):
    torch.manual_seed(1)
    host = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    device = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(host)).to("sim")
    device = nn.parallel.DistributedDataParallel(device)
    x = torch.randn(world_size * 2, 2, 3, 3, generator=torch.Generator().manual_seed(3))
    expected = host(x)
    expected.square().mean().backward()
    got = device(x.chunk(world_size)[rank].to("sim"))
    got.square().mean().backward()
    torch.testing.assert_close(got.cpu(), expected.chunk(world_size)[rank], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(device.module.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(device.module[1].running_var.cpu(), host[1].running_var, rtol=1e-4, atol=1e-5)


@ranks.world_of(4)
def test_dtensor_and_its_random_numbers(rank, world_size):
    from torch.distributed import tensor as dt

    mesh = init_device_mesh("sim", (world_size,))
    assert mesh.device_type == "sim" and SIM.current_device() == rank
    whole = torch.arange(8.0).view(4, 2)
    x = dt.distribute_tensor(whole, mesh, [dt.Shard(0)])
    assert x.to_local().device == torch.device("sim", rank)
    assert torch.equal((x @ x.t()).full_tensor().cpu(), whole @ whole.t())
    torch.manual_seed(11)
    split = dt.rand(world_size, 16, device_mesh=mesh, placements=[dt.Shard(0)])
    rows = split.full_tensor().cpu()
    assert len({tuple(row.tolist()) for row in rows}) == world_size  # no two ranks drew the same numbers
    torch.manual_seed(11)
    assert torch.equal(rows, dt.rand(world_size, 16, device_mesh=mesh, placements=[dt.Shard(0)]).full_tensor().cpu())
    same = dt.rand(4, device_mesh=mesh, placements=[dt.Replicate()]).to_local()
    listed = [torch.empty_like(same) for _ in range(world_size)]
    dist.all_gather(listed, same)
    assert all(torch.equal(one, same) for one in listed)
