"""Kills one of three ranks in each round, and checks what its peers get and what is left.

    python -m test.torch_ext.sim.kill_rounds [--rounds 1000] [--seed 0] [--within-s 1]

Every other round kills at a moment drawn anew. The rounds between go through all ranks and all calls of the program:
there a rank ends itself at that call, before its peers have anything of it.

A program of its own, because it forks ranks by the hundred from a process that must not have used a device.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import torch_ext.sim  # noqa: F401 - registers the device
from torch_ext.sim import _native, faults

WORLD_SIZE = 3
CALLS = 8  # of all steps together
TIMEOUT = timedelta(hours=1)  # nothing but the death itself can end a wait


def steps(group: dist.distributed_c10d.Backend, rank: int) -> list[Callable[[], object]]:
    """What each rank does in turn: a small and a large reduction, a gather, and a ring of transfers."""
    small, large = torch.ones(4, device="sim"), torch.ones(1 << 18, device="sim")
    gathered = torch.empty(WORLD_SIZE * 4, device="sim")
    after, before = (rank + 1) % WORLD_SIZE, (rank - 1) % WORLD_SIZE

    def pass_on() -> None:
        group.send([small], after, 0).wait()
        group.recv([small], before, 0).wait()

    def launch_two() -> None:
        first, second = group.allreduce([small]), group.allreduce([large])
        second.wait()
        first.wait()

    return [
        lambda: group.allreduce([small]).wait(),
        lambda: group.allreduce([large]).wait(),
        lambda: group._allgather_base(gathered, small).wait(),
        launch_two,
        pass_on,
        lambda: group.barrier(c10d.BarrierOptions()).wait(),
    ]


def in_rank(rank: int, folder: Path, ready: int, ends_at: int | None) -> None:
    torch.set_num_threads(1)
    torch.get_device_module("sim").set_device(rank)
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    group = _native.ProcessGroupSimCCL(store, rank, list(range(WORLD_SIZE)), TIMEOUT)
    todo = steps(group, rank)
    if ends_at is not None:
        faults.kill(at=ends_at)
    os.write(ready, b"r")
    try:
        while True:
            for step in todo:
                step()
                torch.get_device_module("sim").synchronize()
    except RuntimeError as error:
        (folder / f"told {rank}").write_text(f"{time.monotonic()} {error}")


def fork_rank(rank: int, folder: Path, ready: int, ends_at: int | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        in_rank(rank, folder, ready, ends_at)
    finally:
        os._exit(0)


def round_of(number: int, draw: random.Random) -> float:
    """Kill one rank, and return after how many seconds the last of its peers was told."""
    ends_itself = number % 2 == 1
    victim = number // 2 % WORLD_SIZE if ends_itself else draw.randrange(WORLD_SIZE)
    at = number // 2 // WORLD_SIZE % CALLS + 1
    with tempfile.TemporaryDirectory() as name:
        folder, (reader, writer) = Path(name), os.pipe()
        pids = [
            fork_rank(rank, folder, writer, at if ends_itself and rank == victim else None)
            for rank in range(WORLD_SIZE)
        ]
        for _ in pids:
            os.read(reader, 1)
        if not ends_itself:
            time.sleep(draw.random() * 0.02)
            os.kill(pids[victim], signal.SIGKILL)
        _, status = os.waitpid(pids[victim], 0)
        killed = time.monotonic()
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise AssertionError(f"rank {victim} was not killed: {status}")
        for pid in pids[:victim] + pids[victim + 1 :]:
            os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
        last = 0.0
        for rank in set(range(WORLD_SIZE)) - {victim}:
            moment, _, told = (folder / f"told {rank}").read_text().partition(" ")
            if f"simccl on rank {rank}: rank " not in told or " has " not in told:
                raise AssertionError(f"rank {rank} was told: {told}")
            last = max(last, float(moment) - killed)
        left = {path.name for path in folder.iterdir()} - {"store", *(f"told {rank}" for rank in range(WORLD_SIZE))}
        if left:
            raise AssertionError(f"left behind: {left}")
        return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within-s", type=float, help="fail if a peer was told later than this")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    shared = set(os.listdir("/dev/shm"))
    took = sorted(round_of(number, draw) for number in range(arguments.rounds))
    left = set(os.listdir("/dev/shm")) - shared
    if left:
        raise AssertionError(f"left behind in /dev/shm: {left}")
    if arguments.within_s is not None and took[-1] > arguments.within_s:
        raise AssertionError(f"a peer was told after {took[-1]:.3f} s")
    print(f"{len(took)} rounds; peers told after {took[len(took) // 2]:.3f} s (median), {took[-1]:.3f} s (last)")


if __name__ == "__main__":
    main()
