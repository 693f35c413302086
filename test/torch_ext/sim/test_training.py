"""Distributed training on ``sim`` equals training of the same model, unsharded, on the host with the whole batch.

In single precision the losses agree to the noise of sums taken in another order; in half precision they are
compared with the host's single precision within what 10 bits of mantissa give over the steps.
"""

from __future__ import annotations

import copy
import io
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import torch_ext.sim  # noqa: F401 - registers the device
from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")
STEPS, BATCH, WIDTH = 3, 4, 16

Step = Callable[[nn.Module, torch.Tensor], float]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)).square().mean()


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _batch(step: int, world_size: int) -> torch.Tensor:
    return torch.randn(world_size * BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def _host_losses(world_size: int) -> list[float]:
    """Mean loss of each step on the host, with gradients averaged over the whole batch."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net(_batch(step, world_size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _sharded_losses(net: nn.Module, rank: int, world_size: int, *, replicas: int | None = None) -> list[float]:
    """The same on the device; ``replicas`` is the number of distinct parts of the batch, by default one a rank."""
    parts = replicas or world_size
    part = rank * parts // world_size
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        mine = _batch(step, world_size).chunk(parts)[part].to("sim")
        optimizer.zero_grad()
        loss = net(mine)
        loss.backward()
        optimizer.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def _assert_parity(losses: list[float], world_size: int, *, half: bool = False) -> None:
    assert losses == pytest.approx(_host_losses(world_size), rel=3e-2 if half else 1e-4)
    assert losses[0] != losses[1]  # it did learn something


def _fsdp1(rank: int, world_size: int, strategy: ShardingStrategy, half: bool, offload: bool, original: bool) -> None:
    group: Any = None
    if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        shards = 2
        mesh = init_device_mesh("sim", (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))
        group = (mesh.get_group("shard"), mesh.get_group("replicate"))
    precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16) if half else None
    # Torch's advice to its users, who may still ask for it.
    warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated", category=FutureWarning)
    net = FullyShardedDataParallel(
        _net(),
        process_group=group,
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(offload_params=offload),
        mixed_precision=precision,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=original,
        device_id=SIM.current_device(),
    )
    if offload:
        assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}
    _assert_parity(_sharded_losses(net, rank, world_size), world_size, half=half)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_fsdp1_equals_the_host(world_size: int, strategy: str) -> None:
    ranks.run(world_size, _fsdp1_grid, ShardingStrategy[strategy])


def _fsdp1_grid(rank: int, world_size: int, strategy: ShardingStrategy) -> None:
    # One set of ranks serves the whole grid: nothing that differs between its points depends on the process.
    for half in (False, True):
        for offload in (False, True):
            for original in (False, True):
                _fsdp1(rank, world_size, strategy, half, offload, original)


def _fsdp2(rank: int, world_size: int) -> None:
    for reshard in (True, False):
        for offload in (False, True):
            for half in (False, True):
                net = _net().to("sim")
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                mesh = init_device_mesh("sim", (world_size,))
                options: dict[str, Any] = {"reshard_after_forward": reshard, "mesh": mesh}
                if half:
                    options["mp_policy"] = policy
                if offload:
                    options["offload_policy"] = CPUOffloadPolicy()
                for block in net.blocks:
                    fully_shard(block, **options)
                fully_shard(net, **options)
                if offload:
                    assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}
                _assert_parity(_sharded_losses(net, rank, world_size), world_size, half=half)


@pytest.mark.parametrize("world_size", [2, 4])
def test_fsdp2_equals_the_host(world_size: int) -> None:
    ranks.run(world_size, _fsdp2)


def _fsdp2_hybrid(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("sim", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    net = _net().to("sim")
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    _assert_parity(_sharded_losses(net, rank, world_size), world_size)


def _fsdp2_with_tensor_parallel(rank: int, world_size: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("sim", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    net = _net().to("sim")
    for block in net.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    _assert_parity(_sharded_losses(net, rank, world_size, replicas=world_size // 2), world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("body", [_fsdp2_hybrid, _fsdp2_with_tensor_parallel])
def test_fsdp2_on_two_dimensions_equals_the_host(body: Callable[..., None], world_size: int) -> None:
    ranks.run(world_size, body)


def _ddp(rank: int, world_size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def exact_at_first() -> powerSGD_hook.PowerSGDState:
        # Approximates from the step after the last on; until then it averages.
        return powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=STEPS + 2)

    hooks: list[tuple[Any, Callable[[], Any], bool]] = [
        (None, lambda: None, False),
        (default_hooks.allreduce_hook, lambda: None, False),
        (default_hooks.fp16_compress_hook, lambda: None, True),
        # bf16_compress_hook: DDP itself refuses it everywhere but on CUDA and XPU.
        (powerSGD_hook.powerSGD_hook, exact_at_first, False),
    ]
    for hook, state, half in hooks:
        for views in (False, True):
            net = nn.parallel.DistributedDataParallel(_net().to("sim"), gradient_as_bucket_view=views)
            if hook is not None:
                net.register_comm_hook(state(), hook)
            _assert_parity(_sharded_losses(net, rank, world_size), world_size, half=half)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_with_and_without_hooks_equals_the_host(world_size: int) -> None:
    ranks.run(world_size, _ddp)


def _sync_batch_norm(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    host = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    device: Any = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(host)).to("sim")
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


@pytest.mark.parametrize("world_size", [2, 4])
def test_sync_batch_norm_equals_batch_norm_over_the_whole_batch(world_size: int) -> None:
    ranks.run(world_size, _sync_batch_norm)


def _checkpointed(rank: int, world_size: int) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    net = _net().to("sim")
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
    sharded = FullyShardedDataParallel(net, use_orig_params=True, device_id=SIM.current_device())
    _assert_parity(_sharded_losses(sharded, rank, world_size), world_size)

    net = _net().to("sim")
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
    for block in net.blocks:
        fully_shard(block, mesh=init_device_mesh("sim", (world_size,)))
    fully_shard(net, mesh=init_device_mesh("sim", (world_size,)))
    _assert_parity(_sharded_losses(net, rank, world_size), world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_activation_checkpointing_under_fsdp_equals_the_host(world_size: int) -> None:
    ranks.run(world_size, _checkpointed)


def _memory(rank: int, world_size: int) -> None:
    wide = nn.Linear(1024, 1024, bias=False, device="sim")  # 4 MiB
    whole = SIM.memory_allocated()
    net = FullyShardedDataParallel(wide, device_id=SIM.current_device())
    sharded = SIM.memory_allocated()
    assert whole - sharded >= whole // 2 - 4096, (whole, sharded)
    SIM.reset_peak_memory_stats()
    with FullyShardedDataParallel.summon_full_params(net, writeback=False):
        assert SIM.memory_allocated() >= sharded + (4 << 20)
    assert SIM.memory_allocated() - sharded < 64 << 10 and SIM.max_memory_allocated() >= sharded + (4 << 20)


def test_fsdp_memory_shows_the_sharded_sizes() -> None:
    ranks.run(2, _memory)


def _scaler(rank: int, world_size: int) -> None:
    net = FullyShardedDataParallel(_net(), device_id=SIM.current_device())
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), ShardedGradScaler(device="sim", init_scale=4.0)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    loss = net(_batch(0, world_size).chunk(world_size)[rank].to("sim"))
    if rank == 0:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    # One rank's overflow makes every rank skip the step and lower the scale.
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)) and scaler.get_scale() == 2.0


def test_sharded_scaler_skips_everywhere_when_one_rank_overflows() -> None:
    ranks.run(2, _scaler)


def _dtensor(rank: int, world_size: int) -> None:
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


@pytest.mark.parametrize("world_size", [2, 4])
def test_dtensor_and_its_random_numbers(world_size: int) -> None:
    ranks.run(world_size, _dtensor)


def _distributed_checkpoint(rank: int, world_size: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = _net().to("sim")
        fully_shard(net, mesh=init_device_mesh("sim", (world_size,)))
        return net, torch.optim.Adam(net.parameters(), lr=0.1)

    net, optimizer = make()
    net(_batch(0, world_size).to("sim")).backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    fresh, fresh_optimizer = make()
    model_state, optimizer_state = get_state_dict(fresh, fresh_optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(fresh, fresh_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for one, other in zip(net.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local()) and other.to_local().device.type == "sim"
    buffer = io.BytesIO()
    torch.save(fresh.state_dict(), buffer)
    buffer.seek(0)
    assert {value.device.type for value in torch.load(buffer, weights_only=False).values()} == {"sim"}


def test_distributed_checkpoint_brings_back_model_and_optimizer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(2, _distributed_checkpoint, folder)
