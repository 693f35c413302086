"""What collectives of ``simccl`` cost beside gloo's, in one run and in the same ranks.

    python benchmarks/collectives.py [--worlds 2 4] [--rounds 5]

Each row alternates between a group of gloo on host tensors and a group of simccl on sim tensors, and prints the median
of each over the rounds, as the slowest rank has it, with the ratio. Both groups have the same ranks, so the load of the
machine is the same for both. The last rows make a group, use it once and destroy it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import torch_ext.sim  # noqa: F401  # registers the device

LARGE = 16 << 20  # bytes


Timed = tuple[Callable[[Any], object], int]  # the function to time on a group, and its calls per round


def operations(device: str, devices: list[int] | None, world_size: int) -> dict[str, Timed]:
    """Return the functions to time, by name. ``devices``: the ``device_ids`` of ``barrier``; None for the host."""
    small = torch.ones(4, device=device)
    whole = torch.ones(LARGE // 4, device=device)
    part = torch.ones(LARGE // 4 // world_size, device=device)
    return {
        "all_reduce, 4 elements": (lambda group: dist.all_reduce(small, group=group), 200),
        "barrier": (lambda group: dist.barrier(group, device_ids=devices), 200),
        "all_reduce, 16 MiB": (lambda group: dist.all_reduce(whole, group=group), 5),
        "all_gather_into_tensor, 16 MiB": (lambda group: dist.all_gather_into_tensor(whole, part, group=group), 5),
        "reduce_scatter_tensor, 16 MiB": (lambda group: dist.reduce_scatter_tensor(part, whole, group=group), 5),
    }


def seconds(call: Callable[[], object], times: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def new_group(backend: str, device: str) -> None:
    group = dist.new_group(backend=backend)
    dist.all_reduce(torch.ones(4, device=device), group=group)
    dist.destroy_process_group(group)


def in_rank(rank: int, world_size: int, port: int, rounds: int, results: Any) -> None:
    # Newer releases deprecate some of these calls: both sides pay for the warning.
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    torch.get_device_module("sim").set_device(rank)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    kinds = {"gloo": "cpu", "simccl": "sim"}
    devices = {"gloo": None, "simccl": [rank]}
    groups = {backend: dist.new_group(backend=backend) for backend in kinds}
    rows = {backend: operations(device, devices[backend], world_size) for backend, device in kinds.items()}
    for name in rows["gloo"]:
        times: dict[str, list[float]] = {backend: [] for backend in kinds}
        for turn in range(rounds + 1):
            for backend, group in groups.items():
                call, count = rows[backend][name]
                took = seconds(lambda call=call, group=group: call(group), count)  # type: ignore[misc]
                if turn:  # the first round warms up
                    times[backend].append(took)
        results.put((name, times))
    made: dict[str, list[float]] = {backend: [] for backend in kinds}
    for turn in range(2 * rounds + 1):
        for backend, device in kinds.items():
            took = seconds(lambda backend=backend, device=device: new_group(backend, device), 1)  # type: ignore[misc]
            if turn:
                made[backend].append(took)
    results.put(("new group, all_reduce, destroy", made))
    dist.barrier()
    results.put(None)
    dist.destroy_process_group()


def run(world_size: int, rounds: int) -> None:
    context = multiprocessing.get_context("fork")
    queues = [context.SimpleQueue() for _ in range(world_size)]
    with socket.create_server(("127.0.0.1", 0)) as listener:  # fork first: the parent's store has threads
        port = listener.getsockname()[1]
        members = [
            context.Process(target=in_rank, args=(rank, world_size, port, rounds, queues[rank]))
            for rank in range(world_size)
        ]
        for member in members:
            member.start()
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        while True:
            rows = [queue.get() for queue in queues]
            if rows[0] is None:
                break
            name = rows[0][0]
            median = {
                backend: max(statistics.median(times[backend]) for _, times in rows) for backend in ("gloo", "simccl")
            }
            print(
                f"| {world_size} | {name} | {1e6 * median['gloo']:,.0f} | {1e6 * median['simccl']:,.0f} "
                f"| {median['gloo'] / median['simccl']:.1f} |",
                flush=True,
            )
        for member in members:
            member.join()
        del store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("| ranks | what | gloo, us | simccl, us | ratio |\n| --- | --- | --- | --- | --- |")
    for world_size in arguments.worlds:
        run(world_size, arguments.rounds)


if __name__ == "__main__":
    main()
