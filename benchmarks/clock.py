"""Measures the cost of virtual time.

    python benchmarks/clock.py                      # on over off
    python benchmarks/clock.py --before CHECKOUT    # off over another checkout of this repository
    python benchmarks/clock.py --dry                # a dry run over one that computes
    python benchmarks/clock.py --program            # run --clock over run: with the names of modules

Each figure is of processor time, alternates between the two sides in one run and takes the median of the rounds'
ratios, so that a busy machine slows both alike. The body is a training step of a two-layer transformer. Targets: on
1.15, off 1.01, dry 0.5.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time  # the machine's, also within virtual time

import torch
from transformer import training_step

sys.path.append(str(Path(__file__).resolve().parents[1]))  # works in an uninstalled clone, after PYTHONPATH

import torch_ext.sim  # noqa: F401 - registers the device

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 25
ROUNDS_OF_PROCESSES = 7
STEPS = 3
STEPS_OF_A_PROCESS = 20


def seconds(body: Callable[[], None], steps: int) -> float:
    body()
    start = process_time()
    for _ in range(steps):
        body()
    return (process_time() - start) / steps


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


def compare_processes(side: str, name: str, target: float) -> None:
    of = seconds_elsewhere
    show(name, [(of(str(ROOT)), of(str(ROOT), side)) for _ in range(ROUNDS_OF_PROCESSES)], target)


def seconds_of_process(side: str) -> float:
    if side == "dry":
        from torch_ext.sim import dry  # another checkout may lack it

        dry.Program(["0"])
    elif side == "program":
        from torch_ext.sim import clock

        clock.Program("h100-sxm")
    step = training_step()
    return statistics.median(seconds(step, 1) for _ in range(STEPS_OF_A_PROCESS))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--seconds"]:
        print(seconds_of_process(sys.argv[-1]))
    elif sys.argv[1:] == ["--dry"]:
        compare_processes("dry", "computing and dry", 0.5)
    elif sys.argv[1:] == ["--program"]:
        compare_processes("program", "run and run --clock", 1.15)
    elif sys.argv[1:2] == ["--before"]:
        compare_with(sys.argv[2])
    else:
        print(f"torch {torch.__version__}, median of {ROUNDS} rounds, one thread")
        step = training_step()
        for model in ("unit", "h100-sxm"):
            show(f"off and on, {model}", [(seconds(step, STEPS), seconds_on(step, model)) for _ in range(ROUNDS)], 1.15)
