"""Measures the cost of the race checker.

    python benchmarks/races.py [--suites]

Each figure alternates between the two sides in one run and takes the median of the rounds' ratios, so that a busy
machine slows both alike. Target: a training step of a two-layer transformer takes at most 1.25 times as long with the
checker as without it. ``--suites`` runs two FSDP suites instead; target: at most 1.15 times as long.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformer import training_step

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in an uninstalled clone

import torch_ext.sim  # noqa: F401 - registers the device
from torch_ext.sim import races

ROUNDS = 25
SUITE_ROUNDS = 5


def _seconds(body: Callable[[], object], repeat: int, *, checked: bool) -> float:
    if checked:
        races.start()
    body()  # warm up the checker's caches
    start = time.perf_counter()
    for _ in range(repeat):
        body()
    took = (time.perf_counter() - start) / repeat
    if checked:
        found = races.stop()
        if found:
            raise AssertionError(races.RaceError(found))
    return took


def _compare(name: str, body: Callable[[], object], repeat: int, unit: str, per_second: float, target: str) -> None:
    rounds = [(_seconds(body, repeat, checked=False), _seconds(body, repeat, checked=True)) for _ in range(ROUNDS)]
    off, on = (statistics.median(side) * per_second for side in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b in rounds)
    print(f"{name:>15}: off {off:6.2f} {unit}, on {on:6.2f} {unit}, ratio {ratio:.2f}{target}")


def small_operators() -> None:
    x = torch.ones(4, 4, device="sim")
    for name, call in {"add": lambda: x + x, "add_": lambda: x.add_(1.0), "mm": lambda: x @ x}.items():
        _compare(name, call, 1000, "us", 1e6, "")


def compare_training_step() -> None:
    _compare("training step", training_step(), 3, "ms", 1e3, " (target 1.25)")


def suites() -> None:
    root = Path(__file__).resolve().parents[1]
    files = ["distributed/fsdp/test_fsdp_anatomy.py", "distributed/_composable/fsdp/test_fully_shard_anatomy.py"]

    def seconds(races: str) -> float:
        command = [sys.executable, str(root / "run_test.py"), "-q", "--device", "sim", "--races", races, "-i", *files]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    seconds("off")  # builds the simulator and caches names
    rounds = [(seconds("off"), seconds("error")) for _ in range(SUITE_ROUNDS)]
    off, on = (statistics.median(side) for side in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b in rounds)
    print(f"{'FSDP suites':>15}: off {off:6.2f} s, on {on:6.2f} s, ratio {ratio:.2f} (target 1.15)")


if __name__ == "__main__":
    if sys.argv[1:] == ["--suites"]:
        suites()
        sys.exit()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, median of {ROUNDS} rounds, one thread")
    small_operators()
    compare_training_step()
