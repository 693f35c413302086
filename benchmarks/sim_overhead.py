"""Measures the overhead of the simulated accelerator over the host.

    python benchmarks/sim_overhead.py

Each figure alternates between the two sides in one run and takes the median over rounds, so that a busy machine slows
both alike. Targets: at most 8 microseconds more than the host for a small operator, 1.3 times the host for a training
step of a two-layer transformer, and 1.15 times gloo for an all-reduce of 16 MiB over two ranks.
"""

from __future__ import annotations

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


def training_step() -> None:
    def make(device: str) -> Callable[[], None]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
        optimizer = torch.optim.AdamW(net.parameters())
        x = torch.randn(8, 64, 128).to(device)

        def step() -> None:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

        return step

    a, b = _side_by_side(make("cpu"), make("sim"), 3)
    print(f"training step: host {a * 1e3:.1f} ms, sim {b * 1e3:.1f} ms, ratio {b / a:.2f} (target 1.3)")


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
    training_step()
    all_reduce()
