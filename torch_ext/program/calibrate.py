"""``torch_ext calibrate``: measures a cost model of this machine's accelerator, and compares it with ten programs.

Under ``torchrun --nproc-per-node N -m torch_ext calibrate`` the model has the constants of collectives as well, with
``--nnodes`` those between nodes, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

MODEL = "torch_ext_model.json"
_MIB = 1 << 20
_ROUND_S, _ROUNDS = 0.05, 5
_NS = 1e9
_TYPES = {"Float": torch.float32, "BFloat16": torch.bfloat16, "Half": torch.float16, "Double": torch.float64}

Body = Callable[[], Any]
Measure = Callable[[str, Body], float]  # a title and a body -> nanoseconds of one call


def main(arguments: list[str]) -> int:
    """Run the command with these arguments and return its exit code: 0, or 2 for a usage error."""
    parser = argparse.ArgumentParser("torch_ext calibrate", description=__doc__.split("\n")[0].split(": ")[1])
    parser.add_argument("--device", help="the device to measure; by default torch's accelerator, else cpu")
    parser.add_argument(
        "--out", type=Path, default=Path(MODEL), metavar="FILE", help="for run --clock FILE: %(default)s"
    )
    parser.add_argument("--size", type=int, default=1024, metavar="N", help="rows of the matrices (%(default)s)")
    parser.add_argument("--predict", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if found.predict:
        print(json.dumps(_predict(found.predict, found.size)))
        return 0
    try:
        torch.empty(1, device=found.device)
        found.out.touch()
    except (RuntimeError, OSError) as error:
        parser.error(str(error).partition("\n")[0])
    found.device = found.device or str(getattr(torch.accelerator.current_accelerator(), "type", "cpu"))
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        if _is_accelerator(found.device):
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    measured = constants(found.device, found.size, partial(_measure, found.device))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        _write(found.out, found.device, measured)
        _compare(found.out, found.device, found.size)
    return 0


def constants(device: str, size: int, measure: Measure) -> dict[str, float]:
    """Return the constants of a cost model, in nanoseconds and per nanosecond, as the package's models name them.
    ``measure`` times a body. Types that the device has no matrix product for are left out.
    """
    one = torch.ones(1, device=device)
    found = {"kernel": measure("a kernel of one element", lambda: one.add_(1))}
    for name, kind in _TYPES.items():
        try:
            matrix = torch.ones(size, size, device=device, dtype=kind)
            took = measure(f"a matrix product, {name}", lambda matrix=matrix: matrix @ matrix)  # type: ignore[misc]
        except (RuntimeError, TypeError):
            continue
        found[f"flops.{name}"] = 2 * size**3 / max(took - found["kernel"], 1)
    large = torch.ones(64 * _MIB // 4, device=device)
    other = torch.empty_like(large)
    took = measure("a copy within the device", lambda: other.copy_(large))
    found["memory"] = 2 * large.nbytes / max(took - found["kernel"], 1)
    if _is_accelerator(device):
        host, little = torch.ones(large.shape, pin_memory=True), torch.ones(1, pin_memory=True)
        found["copy"] = measure("a copy of one element", lambda: one.copy_(little, non_blocking=True))
        for name, target, source in (("to_device", large, host), ("to_host", host, large)):
            took = measure(name, lambda a=target, b=source: a.copy_(b, non_blocking=True))  # type: ignore[misc]
            found[name] = host.nbytes / max(took - found["copy"], 1)
    if dist.is_initialized() and (world := dist.get_world_size()) > 1:
        found["collective"] = measure("an all-reduce of one element", lambda: dist.all_reduce(one))
        node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        nodes = {"link": node} if node == world else {"link": node, "network": world}
        for name, ranks in nodes.items():
            if ranks > 1:
                group = dist.new_subgroups(ranks)[0]
                took = measure(f"an all-reduce, {name}", lambda group=group: dist.all_reduce(large, group=group))  # type: ignore[misc]
                # A rank of NCCL's ring sends 2 (n - 1) / n of the bytes; all of a node share those that leave it. See
                # Note [Traffic] in sim/csrc/traffic.h.
                sent = 2 * (ranks - 1) / ranks * large.nbytes / (node if name == "network" else 1)
                found[name] = sent / max(took - found["collective"], 1)
        if node < world:
            found["node"] = node
    return found


def programs(device: str, size: int) -> dict[str, Body]:
    """Return ten programs on square matrices of ``size`` rows, by their names."""
    torch.manual_seed(0)
    x, weight = (torch.randn(size, size, device=device, requires_grad=True) for _ in range(2))
    images = torch.randn(8, 16, 64, 64, device=device)
    filters = torch.randn(32, 16, 3, 3, device=device)
    heads = torch.randn(1, 8, size // 4, 64, device=device)
    table, rows = torch.randn(size, 256, device=device), torch.arange(size, device=device)
    parameter = torch.nn.Parameter(torch.randn(size, size, device=device))
    parameter.grad = torch.ones_like(parameter)
    adam = torch.optim.AdamW([parameter])
    plain = x.detach()
    half = plain.bfloat16()
    return {
        "product": lambda: plain @ plain,
        "product of bfloat16": lambda: half @ half,
        "linear, forward and backward": lambda: F.linear(x, weight).sum().backward(),
        "MLP": lambda: F.linear(F.gelu(F.linear(plain, weight)), weight),
        "convolution": lambda: F.conv2d(images, filters, padding=1),
        "layer norm": lambda: F.layer_norm(plain, (size,)),
        "softmax": lambda: plain.softmax(-1),
        "attention": lambda: F.scaled_dot_product_attention(heads, heads, heads),
        "embedding": lambda: F.embedding(rows, table),
        "AdamW": adam.step,
    }


def _is_accelerator(device: str) -> bool:
    own = torch.accelerator.current_accelerator()
    return own is not None and own.type == device


def _measure(device: str, _title: str, body: Body) -> float:
    """Return the nanoseconds of one call: the median of rounds that each end when the device is idle."""

    def round_of(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            body()
        if _is_accelerator(device):
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    round_of(2)
    calls = max(1, int(_ROUND_S / max(round_of(1), 1e-7)))
    if dist.is_initialized():  # collectives: as many calls on every rank
        agreed = torch.tensor([calls], device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        calls = int(agreed.item())
    return statistics.median(round_of(calls) for _ in range(_ROUNDS)) / calls * _NS


def _predict(model: Path, size: int) -> dict[str, float]:
    """Return the virtual nanoseconds of the programs by a model."""
    from torch_ext.sim import clock

    predicted = {}
    for name, body in programs("sim", size).items():
        body()
        with clock.measure(str(model)) as trace:
            body()
        predicted[name] = float(trace.time)
    return predicted


def _write(path: Path, device: str, measured: Mapping[str, float], **more: Any) -> None:
    module = getattr(torch, device, None)
    named = getattr(module, "get_device_name", lambda: device)()
    quote = f"torch_ext calibrate on {named}, torch {torch.__version__}, {date.today()}"
    rows = {
        key: {"value": float(f"{value:.4g}"), "source": "measured", "quote": quote} for key, value in measured.items()
    }
    about = {"about": quote, "validated": bool(more), "constants": rows}
    path.write_text(json.dumps(about | more, indent=2) + "\n", encoding="utf-8")


def _compare(path: Path, device: str, size: int) -> None:
    """Print the programs' measured times beside the model's, and write them into the model."""
    command = [sys.executable, "-m", "torch_ext", "calibrate", "--predict", str(path), "--size", str(size)]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    predicted = json.loads(subprocess.run(command, env=alone, stdout=subprocess.PIPE, check=True).stdout)
    rows = {name: (_measure(device, name, body), predicted[name]) for name, body in programs(device, size).items()}
    print(f"{'program':30} {'measured':>12} {'predicted':>12}   predicted / measured")
    for name, (took, expected) in rows.items():
        print(f"{name:30} {took / 1e3:>9.1f} us {expected / 1e3:>9.1f} us   {expected / took:.2f}")
    written = json.loads(path.read_text(encoding="utf-8"))["constants"]
    _write(path, device, {name: row["value"] for name, row in written.items()}, compared=rows)
    print(f"model: {path.absolute()}; use it by: run --clock {path}")
