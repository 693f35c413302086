"""How long ranks take to go on after a death, over a cold start of the same program.

    python benchmarks/restart.py [--repeats 5] [--ranks 4]

Each run starts the program under ``run --restart POLICY`` and kills rank 1 after the first reduction. It gives both
sides of a ratio: the time from the command to the first reduction of all ranks, and the time from the death to the
first reduction of the next generation. The policies take turns. Prints medians.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
POLICIES = ("rank", "shrink", "world")
# All processes of a machine share the clock.
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist

def meet():
    dist.init_process_group()
    for when in ("met", "ended"):
        dist.all_reduce(x := torch.ones(3, device=device))
        x.sum().item()
        print(f"generation {generation} {when} at {time.monotonic()}", flush=True)

device = torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
done = False
while not done:
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    try:
        meet()
        done = True
    except dist.DistError:
        if sys.argv[1] == "world":
            raise  # a rank that waits instead gets seconds to report its error
    dist.destroy_process_group()
    while not done and os.environ["TORCHELASTIC_RESTART_COUNT"] == generation:
        time.sleep(0.001)
"""


def run(program: Path, policy: str, ranks: int) -> tuple[float, float]:
    """Return the seconds of a cold start and of a restart. Exits if the ranks do not recover."""
    options = ["-n", str(ranks), "--restart", policy, "--faults", "rank 1: kill at all_reduce #2"]
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch_ext", "run", *options, str(program), policy],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    at = re.findall(r"\[rank (\d)\] generation (\d) met at ([\d.]+)", done.stdout)
    first, second = ([float(s) for _, generation, s in at if generation == number] for number in "01")
    if done.returncode or len(first) != ranks or len(second) != ranks - (policy == "shrink"):
        raise SystemExit(done.stdout)
    lost_s = next(float(s) for rank, generation, s in at if (rank, generation) == ("1", "0"))  # it dies at once
    return max(first) - began_s, max(second) - lost_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        runs = [[run(program, policy, options.ranks) for policy in POLICIES] for _ in range(options.repeats)]
    for policy, pairs in zip(POLICIES, zip(*runs, strict=True), strict=True):
        cold_s, restart_s = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(restart / cold for cold, restart in pairs)
        print(f"{policy:>6}: cold start {cold_s:.2f} s, restart {restart_s:.2f} s, ratio {ratio:.2f}", flush=True)


main()
