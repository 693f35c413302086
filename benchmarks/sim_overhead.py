"""Measures the overhead of the simulated accelerator over the host.

    python benchmarks/sim_overhead.py

Each figure alternates between the two sides in one run and takes the median over rounds, so that a busy machine slows
both alike. Targets: at most 8 microseconds more than the host for a small operator, 1.3 times the host for a training
step of a two-layer transformer, 1.2 for a step of nanoGPT and of a six-layer Llama (1.4 with the check for races), and
1.15 times gloo for an all-reduce of 16 MiB over two ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in an uninstalled clone

import torch_ext.sim  # noqa: F401 - registers the device

ROUNDS = 15


def _seconds(body: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        body()
    return (time.perf_counter() - start) / repeat


def _side_by_side(host: Callable[[], object], device: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Return the median seconds of one call on each side."""
    _seconds(host, repeat), _seconds(device, repeat)  # the first calls fill caches
    rounds = [(_seconds(host, repeat), _seconds(device, repeat)) for _ in range(ROUNDS)]
    return statistics.median(a for a, _ in rounds), statistics.median(b for _, b in rounds)


def small_operators() -> None:
    for name, call in {
        "add": lambda x: x + x,
        "add_": lambda x: x.add_(1.0),
        "mm": lambda x: x @ x,
        "relu": torch.relu,
    }.items():
        host, device = torch.ones(4, 4), torch.ones(4, 4, device="sim")
        a, b = _side_by_side(lambda: call(host), lambda: call(device), 2000)  # noqa: B023 - called at once
        print(f"{name:>5}: host {a * 1e6:5.2f} us, sim {b * 1e6:5.2f} us, extra {(b - a) * 1e6:5.2f} us (target 8)")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, *, rotary: bool) -> None:
        super().__init__()
        self.heads, self.size, self.shared, self.rotary = heads, width // heads, shared, rotary
        self.qkv = nn.Linear(width, (heads + 2 * heads // shared) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        few = self.heads // self.shared
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2).split([self.heads, few, few], 1)
        if self.rotary:
            frequencies = 10_000.0 ** -(torch.arange(0, self.size, 2, device=x.device) / self.size)
            angles = torch.outer(torch.arange(x.size(1), device=x.device), frequencies)
            sine, cosine = (each.to(x.dtype).repeat(1, 2) for each in (angles.sin(), angles.cos()))
            q, k = (
                each * cosine + torch.cat([-each.chunk(2, -1)[1], each.chunk(2, -1)[0]], -1) * sine for each in (q, k)
            )
        k, v = (each.repeat_interleave(self.shared, 1) for each in (k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """nanoGPT with its settings for a CPU, or a small Llama: rotary positions, RMSNorm, SwiGLU, shared keys."""

    def __init__(self, *, llama: bool) -> None:
        super().__init__()
        layers, width, heads, length, vocabulary = (6, 256, 8, 128, 1000) if llama else (4, 128, 4, 64, 65)
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = None if llama else nn.Embedding(length, width)
        norm = nn.RMSNorm if llama else nn.LayerNorm
        gelu = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            attention = Attention(width, heads, 1 + llama, rotary=llama)
            feed = SwiGLU(width) if llama else copy.deepcopy(gelu)
            self.blocks.append(nn.ModuleList([norm(width), attention, norm(width), feed]))
        self.norm = norm(width)
        self.batch = torch.randint(vocabulary, (4 if llama else 12, length + 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.size(1), device=tokens.device))
        for norm, attention, other, feed in self.blocks:
            x = x + attention(norm(x))
            x = x + feed(other(x))
        return self.norm(x) @ self.tokens.weight.T  # the weights of the first layer are those of the last


def _make_step(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], device: str, dtype: torch.dtype
) -> Callable[[], None]:
    torch.manual_seed(0)
    net, batch = make()
    net, batch = net.to(device, dtype), batch.to(device, dtype if batch.is_floating_point() else batch.dtype)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        if batch.is_floating_point():
            loss = net(batch).square().mean()
        else:
            loss = nn.functional.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step


def _encoder() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(8, 64, 128)


def _decoder(*, llama: bool) -> tuple[nn.Module, torch.Tensor]:
    net = Decoder(llama=llama)
    return net, net.batch


def training_steps() -> None:
    models = {
        "encoder": (_encoder, 1.3),
        "nanoGPT": (functools.partial(_decoder, llama=False), 1.2),
        "Llama": (functools.partial(_decoder, llama=True), 1.2),
    }
    for name, (make, target) in models.items():
        for dtype in (torch.float32, torch.bfloat16):
            steps = [_make_step(make, device, dtype) for device in ("cpu", "sim")]
            for checked in (False, True):
                with torch.sim.races.check() if checked else contextlib.nullcontext():
                    a, b = _side_by_side(*steps, 1 if name == "Llama" else 3)
                figures = f"host {a * 1e3:.1f} ms, sim {b * 1e3:.1f} ms, ratio {b / a:.2f}"
                how = f"{str(dtype).removeprefix('torch.')}{', races checked' if checked else ''}"
                print(f"step of {name}, {how}: {figures} (target {target + 0.2 * checked:.1f})", flush=True)


def _all_reduce(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.get_device_module("sim").set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group(rank=rank, world_size=2, store=store, timeout=timedelta(seconds=60))
    host = torch.ones(4 << 20)  # 16 MiB
    device = host.to("sim")
    a, b = _side_by_side(lambda: dist.all_reduce(host), lambda: dist.all_reduce(device), 3)
    if rank == 0:
        print(f"all-reduce of 16 MiB: gloo {a * 1e3:.1f} ms, simccl {b * 1e3:.1f} ms, ratio {b / a:.2f} (target 1.15)")
    dist.destroy_process_group()


def all_reduce() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_all_reduce, args=(rank, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, median of {ROUNDS} rounds, one thread a process")
    small_operators()
    training_steps()
    all_reduce()
