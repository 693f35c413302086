"""accelerate's own example loop: prepare, backward, clip, step, gather. Argument: ddp, fsdp1 or fsdp2."""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

kind = sys.argv[1]
plugin = None
if kind != "ddp":
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(kind[-1]), auto_wrap_policy="size_based_wrap", min_num_params=1
    )
accelerator = Accelerator(fsdp_plugin=plugin)
torch.manual_seed(0)
inputs = torch.randn(64, 16)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
loader = torch.utils.data.DataLoader(data, batch_size=8)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
if kind == "fsdp1":  # it flattens parameters, which an optimizer must not have seen before
    model = accelerator.prepare(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
if kind == "fsdp1":
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
else:
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for _ in range(2):
    for batch, wanted in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), wanted)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
total = accelerator.gather(loss.detach()).mean().item()
accelerator.print("result", f"{total:.7f}", accelerator.device.type, type(model).__name__, flush=True)
accelerator.end_training()
