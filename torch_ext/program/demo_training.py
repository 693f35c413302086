"""The program of ``torch_ext demo``: FSDP2, with batches that are copied while the last step is still computed."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(waits: bool) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(rank)
    device = torch.device(f"{torch.accelerator.current_accelerator()}:{rank}")
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies = torch.Stream(device)
    for step in range(3):
        with copies:
            batch = torch.randn(32, 64).pin_memory().to(device, non_blocking=True)
        if waits:
            torch.accelerator.current_stream().wait_stream(copies)
        loss = (model(batch) - 1).square().mean()
        batch.record_stream(torch.accelerator.current_stream())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(waits=sys.argv[1:] != ["without-wait"])
