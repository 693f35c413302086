"""``torch_ext run`` beside torchrun, and a rank of ``sim`` beside one of the host.

    python benchmarks/programs.py [--repeats 5] [--ranks 8 16 32]

Prints, all sides measured in turns in one run: seconds until the first line of a script that only imports torch, on 4
ranks, by torchrun, by ``torch_ext run``, and by the same with ``torch_ext serve`` running; seconds of a run of four
tests, without and with ``serve``; the step time of FSDP2 on ``sim`` over that on ``cpu`` with gloo, at 2 and 4 ranks;
and the private memory of a rank that has imported torch and made a process group. Medians of times, and medians of the
ratios within a turn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ONLY_IMPORTS = "import torch\nprint('first line', flush=True)\n"

STEPS = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

found = torch.accelerator.current_accelerator()
rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cpu") if found is None else torch.device(found.type, rank)
if found is not None:
    torch.accelerator.set_device_index(rank)
dist.init_process_group("gloo" if found is None else None)
mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to(device)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(64, 512, device=device)
times = []
for _ in range(40):
    begun = time.perf_counter()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if found is not None:
        torch.accelerator.synchronize()
    times.append(time.perf_counter() - begun)
if rank == 0:
    print("step", sorted(times[10:])[15], flush=True)
dist.destroy_process_group()
"""

MEMORY = """
import os, torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
kib = {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if "kB" in line}
told = [None] * dist.get_world_size()
dist.all_gather_object(told, kib["Private_Dirty"] + kib["Private_Clean"])
if dist.get_rank() == 0:
    print("memory", max(told) / 1024, flush=True)
"""


def ours(ranks: int, *words: str) -> list[str]:
    """Return the command that runs a program on ``ranks`` ranks with ``torch_ext run``."""
    return [sys.executable, "-m", "torch_ext", "run", "-n", str(ranks), "--output", "rank0", *words]


def torchrun(ranks: int) -> list[str]:
    """Return the same command with torchrun."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]


def until_first_line(command: list[str], environment: dict[str, str] | None = None) -> float:
    """Return the seconds until ``command`` prints its first line; exit if it prints none."""
    begun = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        line = process.stdout.readline() if process.stdout is not None else ""
        took_s = time.perf_counter() - begun
    if "first line" not in line:
        raise SystemExit(f"no line came from {' '.join(command)}")
    return took_s


def number(command: list[str], name: str) -> float:
    """Return the number that ``command`` prints after ``name``; exit if it prints none."""
    done = subprocess.run(command, capture_output=True, text=True)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(f"{name} ")]
    if not found:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return float(found[0])


def in_turns(repeats: int, *sides: Callable[[], float]) -> list[tuple[float, ...]]:
    """Measure all sides, one after the other, ``repeats`` times; return the turns."""
    return [tuple(side() for side in sides) for _ in range(repeats)]


def medians(turns: list[tuple[float, ...]], over: int, under: int) -> tuple[float, float, float]:
    """Return the medians of sides ``over`` and ``under`` of the turns, and the median of their ratios."""
    return (
        statistics.median(turn[over] for turn in turns),
        statistics.median(turn[under] for turn in turns),
        statistics.median(turn[over] / turn[under] for turn in turns),
    )


@contextlib.contextmanager
def serving(runtime: str) -> Iterator[dict[str, str]]:
    """Context: run ``torch_ext serve``; yield the environment for commands that use it."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": runtime}
    command = [sys.executable, "-m", "torch_ext", "serve"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or "serving" not in process.stdout.readline():
                raise SystemExit("serve does not serve")
            yield environment
        finally:
            process.terminate()


def run_of_tests(environment: dict[str, str] | None = None) -> float:
    """Return the seconds of a run of four tests."""
    begun = time.perf_counter()
    command = [sys.executable, str(REPOSITORY / "run_test.py"), "-q", "-i", "distributed/fsdp/test_fsdp_input"]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


def first_lines(repeats: int, file: str, folder: str) -> None:
    """Print the seconds until the first line of ``file`` for each command, and those of a run of tests."""
    with serving(folder) as served:
        turns = in_turns(
            repeats,
            lambda: until_first_line([*torchrun(4), file]),
            lambda: until_first_line([*ours(4), file]),
            lambda: until_first_line([*ours(4), file], served),
            run_of_tests,
            lambda: run_of_tests(served),
        )
    for name, side in (("run", 1), ("run with serve", 2)):
        theirs, own, ratio = medians(turns, 0, side)
        print(f"first line, 4 ranks: torchrun {theirs:.2f} s, {name} {own:.2f} s, {ratio:.1f} times", flush=True)
    cold, warm, ratio = medians(turns, 3, 4)
    print(f"four tests: {cold:.2f} s, with serve {warm:.2f} s, {ratio:.1f} times", flush=True)


def step_times(repeats: int, file: str, ranks: int) -> None:
    """Print the step time on ``sim`` and on the host."""
    turns = in_turns(
        repeats,
        lambda: number([*ours(ranks), file], "step"),
        lambda: number([*ours(ranks, "--device", "cpu"), file], "step"),
    )
    sim, host, ratio = medians(turns, 0, 1)
    print(f"step, {ranks} ranks: sim {1e3 * sim:.1f} ms, cpu {1e3 * host:.1f} ms, {ratio:.2f} times", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, text in (("first", ONLY_IMPORTS), ("steps", STEPS), ("memory", MEMORY)):
            files[name] = str(Path(folder) / f"{name}.py")
            Path(files[name]).write_text(text, encoding="utf-8")
        first_lines(options.repeats, files["first"], folder)
        for ranks in (2, 4):
            step_times(options.repeats, files["steps"], ranks)
        for ranks in options.ranks:
            mib = number([*ours(ranks), files["memory"]], "memory")
            print(f"private memory of an idle rank, {ranks} ranks: {mib:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
