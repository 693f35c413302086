"""Train with DDP through the loss of ranks, from checkpoints: under torchrun, or torch_ext run --restart.

python -m torch_ext run -n 4 --restart rank --faults "rank 1: kill at all_reduce #7" examples/recover.py checkpoint.pt
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY, CHECKPOINT = 10, 2, sys.argv[1]


def train(device):
    dist.init_process_group()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device))
    optimizer, first = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, STEPS):
        x = torch.arange(16.0, device=device).view(2, 8).add(step * dist.get_world_size() + dist.get_rank()).sin()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)  # the host reads here, so a lost peer raises here
        if dist.get_rank() == 0 and (step + 1) % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, f"{CHECKPOINT}.new")
            os.replace(f"{CHECKPOINT}.new", CHECKPOINT)  # never half of one


def main():
    device = torch.accelerator.current_accelerator()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    while True:
        generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
        try:
            train(device)
            break
        except dist.DistError as error:
            print(f"generation {generation}: {error}", flush=True)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        while os.environ["TORCHELASTIC_RESTART_COUNT"] == generation:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
