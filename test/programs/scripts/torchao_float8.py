"""torchao's float8 training under FSDP2, whose all-gather carries float8. Argument: ignored, cpu to use no device."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

rank = int(os.environ["LOCAL_RANK"])
on_host = sys.argv[2:] == ["cpu"]
if not on_host:
    torch.cuda.set_device(rank)
dist.init_process_group("gloo" if on_host else "nccl")
kind = "cpu" if on_host else "cuda"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(torch.device(kind, 0 if on_host else rank))
config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
convert_to_float8_training(model, config=config)
mesh = dist.init_device_mesh(kind, (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(4):
    batch = torch.randn(16, 16).to(kind)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print("result", f"{loss.item():.7f}", loss.device.type, type(model[0]).__name__, flush=True)
dist.destroy_process_group()
