"""Measures the cost of virtual time.

    python benchmarks/clock.py                      # on over off
    python benchmarks/clock.py --before CHECKOUT    # off over another checkout of this repository
    python benchmarks/clock.py --dry                # a dry run over one that computes

Each figure is of processor time, alternates between the two sides in one run and takes the median of the rounds'
ratios, so that a busy machine slows both alike. The body is a training step of a two-layer transformer. Targets: on
1.15, off 1.01, dry 0.5.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformer import training_step

sys.path.append(str(Path(__file__).resolve().parents[1]))  # works in an uninstalled clone, after PYTHONPATH

import torch_ext.sim  # noqa: F401 - registers the device

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 25
ROUNDS_OF_DRY = 7
STEPS = 3
STEPS_OF_A_PROCESS = 20


def seconds(body: Callable[[], None], steps: int) -> float:
    body()
    start = time.process_time()
    for _ in range(steps):
        body()
    return (time.process_time() - start) / steps


def seconds_on(body: Callable[[], None], model: str) -> float:
    from torch_ext.sim import clock  # another checkout may lack it

    with clock.measure(model):
        return seconds(body, STEPS)


def show(name: str, rounds: list[tuple[float, float]], target: float) -> None:
    without, with_it = (statistics.median(side) * 1e3 for side in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b in rounds)
    print(f"{name:>24}: {without:6.2f} ms, {with_it:6.2f} ms, ratio {ratio:.3f} (target {target})")


def seconds_elsewhere(root: str, *words: str) -> float:
    command = [sys.executable, __file__, "--seconds", *words]
    environment = {**os.environ, "PYTHONPATH": root}
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def compare_with(checkout: str) -> None:
    of = seconds_elsewhere
    of(checkout), of(str(ROOT))  # build both
    show("off, before and now", [(of(checkout), of(str(ROOT))) for _ in range(ROUNDS)], 1.01)


def compare_dry() -> None:
    rounds = [(seconds_elsewhere(str(ROOT)), seconds_elsewhere(str(ROOT), "dry")) for _ in range(ROUNDS_OF_DRY)]
    show("computing and dry", rounds, 0.5)


def seconds_of_process(is_dry: bool) -> float:
    if is_dry:
        from torch_ext.sim import dry  # another checkout may lack it

        dry.Program(["0"])
    step = training_step()
    return statistics.median(seconds(step, 1) for _ in range(STEPS_OF_A_PROCESS))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--seconds"]:
        print(seconds_of_process("dry" in sys.argv))
    elif sys.argv[1:] == ["--dry"]:
        compare_dry()
    elif sys.argv[1:2] == ["--before"]:
        compare_with(sys.argv[2])
    else:
        print(f"torch {torch.__version__}, median of {ROUNDS} rounds, one thread")
        step = training_step()
        for model in ("unit", "h100-sxm"):
            show(f"off and on, {model}", [(seconds(step, STEPS), seconds_on(step, model)) for _ in range(ROUNDS)], 1.15)
