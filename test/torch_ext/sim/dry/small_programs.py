"""Small programs, each run in a child of this script, dry or not: ``python small_programs.py dry|wet NAME...``.

Prints a line of JSON for each: the peaks of the allocator, and of a dry run the whole report.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_ext.sim import dry

SIM = torch.get_device_module("sim")


def train(model, optimizer, batch, *, steps=2, forward=None, scaler=None):
    """Train, and allocate 256 MiB while parameters, gradients and states live: the peak has all of them."""
    scaler = scaler or torch.amp.GradScaler("sim", enabled=False)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale((forward or model)(batch).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.empty(1 << 28, dtype=torch.uint8, device="sim")


def mlp():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)).to("sim")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(8, 256, device="sim"))


def convolution():
    model = nn.Sequential(
        nn.Conv2d(16, 128, 3), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(128, 256, 1)
    )
    model = model.to("sim", memory_format=torch.channels_last)
    train(model, torch.optim.Adam(model.parameters()), torch.randn(4, 16, 18, 18, device="sim"))


def transformer():
    model = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.1, batch_first=True).to("sim")
    scaler = torch.amp.GradScaler("sim", init_scale=1.0)

    def forward(x):
        with torch.autocast("sim", torch.float16):
            return model(x)

    batch = torch.randn(4, 64, 256, device="sim")
    train(model, torch.optim.AdamW(model.parameters()), batch, forward=forward, scaler=scaler)


def lstm():
    model = nn.LSTM(128, 256, num_layers=2).to("sim")
    batch = torch.randn(7, 4, 128, device="sim")
    train(model, torch.optim.RMSprop(model.parameters()), batch, forward=lambda x: model(x)[0])


def embedding():
    model = nn.Embedding(1024, 256).to("sim", torch.bfloat16)
    batch = torch.randint(1024, (4, 32)).to("sim")
    train(model, torch.optim.Adagrad(model.parameters()), batch, forward=lambda x: F.linear(model(x), model.weight))


def checkpointed():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.RMSNorm(256)) for _ in range(4)).to("sim")

    def forward(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    batch = torch.randn(512, 256, device="sim")
    train(layers, torch.optim.AdamW(layers.parameters(), foreach=False), batch, forward=forward)


def attention():
    query = torch.randn(2, 8, 64, 32, device="sim", dtype=torch.bfloat16, requires_grad=True)
    keys = torch.randn(2, 2, 64, 32, device="sim", dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(query, keys, keys, dropout_p=0.1, is_causal=True, enable_gqa=True).sum().backward()


def operators():
    x = torch.randn(300, 700, device="sim")
    values, places = x.topk(5, dim=1)
    y = torch.cat([x, x.t().contiguous().t()]).cumsum(0, dtype=torch.float64)
    y[:5] += torch.zeros(700, device="sim").scatter_add_(0, places[:, 0], values[:, 0])
    out = torch.empty(0, device="sim")
    torch.add(x, 1, out=out)
    x[torch.tensor([1, 2])] = 3.0
    z = torch.einsum("ij,kj->ik", x, out).softmax(1).masked_fill(torch.ones(300, 300, device="sim").tril() > 0, 0)
    torch.linalg.solve(torch.eye(300, device="sim"), torch.distributions.Normal(z, 1.0).sample())
    half = x.bfloat16().requires_grad_()
    F.smooth_l1_loss(half, half.detach() * 2).backward()
    F.embedding_bag(torch.zeros(300, 700, dtype=torch.int64, device="sim"), x)
    torch.randperm(50, device="sim")[z.argmax(1) % 50].sort()
    torch.histc(x.to(torch.bfloat16).float(), 10, 0, 1).unique(return_inverse=False) if not dry_run else None


def untouched():
    model = torch.empty(100, 1 << 28, device="sim")  # 100 GiB
    model.normal_().add_(1).clone().resize_(101, 1 << 28)
    with open("/proc/self/statm", encoding="ascii") as file:
        assert int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") < 2 << 30


dry_run = sys.argv[1] == "dry"


def run(name):
    if dry_run:
        program = dry.Program(())
        SIM.memory.set_memory_limit(1 << 40)
    torch.manual_seed(0)
    globals()[name]()
    peaks = {"allocated": SIM.max_memory_allocated(), "reserved": SIM.max_memory_reserved()}
    peaks["random"] = SIM.get_rng_state().tolist()
    if dry_run:
        with tempfile.TemporaryDirectory() as folder:
            peaks["report"] = program.end(Path(folder) / "snapshot")
    print(json.dumps([name, peaks]), flush=True)


if __name__ == "__main__":
    for each in sys.argv[2:]:
        if not (pid := os.fork()):
            run(each)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"{each} failed")
