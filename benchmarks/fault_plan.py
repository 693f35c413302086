"""What an armed but idle fault plan costs.

    python -m torch_ext run -n 2 --output rank0 benchmarks/fault_plan.py

Each row alternates in one run between the plan and none, and prints the median of each side in CPU time, with the
median of the rounds' ratios. The plan names a call, a module and a step that are never reached. Target of a step: 1.02.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_ext.faults.plan import parse
from torch_ext.faults.points import Armament

ROUNDS = 21
IDLE = (
    "every rank: kill at all_reduce #999999; every rank: hang at forward of nowhere; every rank: exit at step #999999"
)


def seconds(body: Callable[[], object], times: int, rank: int, *, armed: bool) -> float:
    armament = Armament(parse(IDLE), rank) if armed else None
    body()  # the first call under a plan looks up the modules' names
    dist.barrier()
    started = time.process_time()
    for _ in range(times):
        body()
    took = (time.process_time() - started) / times
    if armament is not None:
        armament.disarm()
    return took


def step_of(model: nn.Module, device: str) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x = torch.randn(16, 32, 128, device=device)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def model_on(device: str) -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(4))).to(device)


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group()
    rank = dist.get_rank()
    torch.get_device_module("sim").set_device(rank)
    sharded = model_on("sim")
    for layer in sharded.children():
        fully_shard(layer)
    fully_shard(sharded)
    small, host = torch.ones(4, device="sim"), torch.ones(4)
    rows: dict[str, tuple[Callable[[], object], int]] = {
        "a step of FSDP2 on sim": (step_of(sharded, "sim"), 2),
        "a step of DDP on cpu": (step_of(nn.parallel.DistributedDataParallel(model_on("cpu")), "cpu"), 2),
        "all_reduce of 4 elements on sim": (lambda: dist.all_reduce(small), 200),
        "all_reduce of 4 elements by gloo": (lambda: dist.all_reduce(host), 100),
    }
    for name, (body, times) in rows.items():
        rounds = [
            [seconds(body, times, rank, armed=bool(armed)) for armed in ((0, 1) if turn % 2 else (1, 0))][
                :: 1 if turn % 2 else -1
            ]
            for turn in range(ROUNDS)
        ]
        off, on = (statistics.median(side) * 1e6 for side in zip(*rounds, strict=True))
        ratio = statistics.median(b / a for a, b in rounds)
        if rank == 0:
            print(f"{name:>34}: off {off:9.1f} us, on {on:9.1f} us, ratio {ratio:.3f}", flush=True)
    dist.destroy_process_group()


main()
