"""Trains a small model with FSDP2, one rank for each device. Nothing here knows what kind of device that is."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(rank)
    device = torch.device(torch.accelerator.current_accelerator().type, rank)
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        batch = torch.randn(32, 64).to(device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
