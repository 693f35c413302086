"""What a harness adds to a test: each test creates one process group and calls one barrier.

    python benchmarks/harness_overhead.py [--tests 40] [--released-tests 3]
    python benchmarks/harness_overhead.py --device-rounds 5 --world-sizes 2
    python benchmarks/harness_overhead.py --against CHECKOUT [--rounds 9]

Compares the installed torch's classes with ours at world sizes 2, 4 and 8, in one run on one machine. Prints medians
per test and ratios, each with its isolation level. Every row runs in its own process, so none inherits another's state.
With ``--device-rounds`` it compares a test of ours on the simulated accelerator with the same over gloo on the host and
with one that makes no group, in turns, and prints the ratios of the medians.

With ``--against``, compares our classes in this tree with those of another checkout. The two take turns, each going
first in every other round. Each figure is the median over the rounds of the ratio within one: of the time a test takes,
and of the processor time that all processes of the row take for each test, start included, which other load on the
machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import unittest
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ROW_VARIABLE = "TORCH_EXT_BENCHMARK_ROW"


def suite(base: str, world_size: int, tests: int) -> type[unittest.TestCase]:
    """Return a test case class with ``tests`` identical tests on the named harness."""
    import torch.distributed as dist

    from torch_ext import accelerator

    backend = accelerator.backend() if base == "ours on sim" else "gloo"
    if base.startswith("ours"):
        from torch_ext.testing._internal import common_distributed as harness
    else:
        from torch.testing._internal import common_distributed as harness

    def nothing(self: unittest.TestCase) -> None:
        """The cost without a backend: ranks start and end."""

    def group_and_barrier(self: unittest.TestCase) -> None:
        store = dist.FileStore(self.file_name, world_size)
        if backend != "gloo":
            accelerator.set_device_index(self.rank)
        dist.init_process_group(backend, rank=self.rank, world_size=world_size, store=store)
        dist.barrier(device_ids=None if backend == "gloo" else [self.rank])

    def new_group_and_barrier(self: unittest.TestCase) -> None:
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)

    continuous = base.endswith("continuous")
    fresh = nothing if base == "ours without a group" else group_and_barrier
    body = new_group_and_barrier if continuous else fresh
    members = {f"test_{number:03}": body for number in range(tests)}
    if continuous:
        members |= {"world_size": world_size, "backend_str": classmethod(lambda cls: "gloo")}
        return type("Suite", (harness.MultiProcContinuousTest,), {**members, "__module__": __name__})

    def setUp(self: unittest.TestCase) -> None:
        harness.MultiProcessTestCase.setUp(self)
        self._spawn_processes()

    members |= {"world_size": world_size, "setUp": setUp}
    return type("Suite", (harness.MultiProcessTestCase,), {**members, "__module__": __name__})


if ROW_VARIABLE in os.environ and "bare" not in os.environ[ROW_VARIABLE]:
    # At module level: the released harness's ranks import this file to find the class.
    Suite = suite(**json.loads(os.environ[ROW_VARIABLE]))


def bare_fork(world_size: int, tests: int) -> None:
    """Fork, rendezvous, barrier and exit without a harness: the cost of fresh processes on this machine.

    Prints the same data as run_row().
    """
    import tempfile

    import torch
    import torch.distributed as dist

    from torch_ext.testing._internal import common_distributed  # noqa: F401  # as much memory to fork as in the other rows

    torch.set_num_threads(1)
    seconds = []
    for _ in range(tests):
        with tempfile.NamedTemporaryFile() as file:
            started, pids = time.perf_counter(), []
            for rank in range(world_size):
                pid = os.fork()
                if pid == 0:
                    store = dist.FileStore(file.name, world_size)
                    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
                    dist.barrier()
                    dist.destroy_process_group()
                    os._exit(0)
                pids.append(pid)
            if any(os.waitpid(pid, 0)[1] for pid in pids):
                raise SystemExit("a bare fork failed")
            seconds.append(time.perf_counter() - started)
    print(json.dumps({"tests": seconds, "class": sum(seconds)}))


class _Timed(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._from = time.perf_counter()

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self.seconds.append(time.perf_counter() - self._from)


def run_row() -> None:
    """Run this process's suite; print the seconds of each test and of the class as JSON."""
    result, started = _Timed(), time.perf_counter()
    unittest.defaultTestLoader.loadTestsFromTestCase(Suite).run(result)
    whole = time.perf_counter() - started
    if not result.wasSuccessful() or result.skipped:
        raise SystemExit(f"the suite did not pass: {result.errors or result.failures or result.skipped}")
    print(json.dumps({"tests": result.seconds, "class": whole}))


def measure(base: str, world_size: int, tests: int, tree: Path = REPOSITORY) -> dict[str, float]:
    """Return the median, worst and amortized milliseconds per test of one row, with our classes taken from ``tree``.

    ``processor`` is the processor time of the row's processes, in milliseconds per test.
    """
    row = json.dumps({"base": base, "world_size": world_size, "tests": tests})
    environment = {**os.environ, ROW_VARIABLE: row, "PYTHONPATH": str(tree), "GLOO_SOCKET_IFNAME": "lo"}
    environment["OPENBLAS_NUM_THREADS"] = "1"
    environment["TORCH_EXT_DEVICE"] = "sim" if base == "ours on sim" else "cpu"
    environment["TORCH_EXT_SPARES"] = "0" if base == "ours, nothing ahead" else "1"
    command = [sys.executable, str(Path(__file__).resolve())]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr)
    told = json.loads(done.stdout.splitlines()[-1])
    seconds = told["tests"]
    return {
        "median": 1e3 * statistics.median(seconds),
        "worst": 1e3 * max(seconds),
        "amortized": 1e3 * told["class"] / len(seconds),
        "processor": 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / len(seconds),
    }


ROWS = (
    ("bare fork", "none: no harness, no verdict"),
    ("released", "fresh processes per test, spawned"),
    ("released continuous", "processes shared by the class, new group per test"),
    ("ours", "fresh processes per test, next ones forked ahead"),
    ("ours, nothing ahead", "fresh processes per test"),
    ("ours continuous", "processes shared by the class, new group per test"),
)


def compare(other: Path, world_sizes: list[int], tests: int, rounds: int) -> None:
    """Print the ratio of the cost of our rows in this tree to their cost in ``other``."""
    for world_size in world_sizes:
        print(f"\nworld size {world_size:<25} {'here':>8} {'there':>8} {'ratio':>8}  ratios of {rounds} rounds")
        for base in ("ours", "ours, nothing ahead", "ours continuous"):
            here: list[dict[str, float]] = []
            there: list[dict[str, float]] = []
            for number in range(rounds):
                turns = [(here, REPOSITORY), (there, other)]
                for found, tree in turns if number % 2 else reversed(turns):
                    found.append(measure(base, world_size, tests, tree))
            for kind in ("amortized" if base == "ours continuous" else "median", "processor"):
                ours, theirs = ([each[kind] for each in found] for found in (here, there))
                ratios = sorted(one / two for one, two in zip(ours, theirs, strict=True))
                name = f"{base}, processor time" if kind == "processor" else base
                print(
                    f"  {name:<34} {statistics.median(ours):8.1f} {statistics.median(theirs):8.1f} "
                    f"{statistics.median(ratios):8.3f}  {ratios[0]:.3f} to {ratios[-1]:.3f}",
                    flush=True,
                )


def compare_devices(world_size: int, tests: int, rounds: int) -> None:
    """Print the cost of a test on the simulated accelerator, over gloo on the host and without a group, in turns."""
    medians: dict[str, list[float]] = {"ours": [], "ours on sim": [], "ours without a group": []}
    for _ in range(rounds):
        for base, found in medians.items():
            found.append(measure(base, world_size, tests)["median"])
    host, sim, least = (statistics.median(found) for found in medians.values())
    ratios = [b / a for a, b, _ in zip(*medians.values(), strict=True)]
    print(f"\nworld size {world_size}: gloo on the host {host:.1f} ms, on sim {sim:.1f} ms, ratio {sim / host:.2f}")
    print(f"  by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    print(f"  without a group {least:.1f} ms: a backend that takes no time would have {least / host:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=int, default=40, help="tests a class, except of the slow row")
    parser.add_argument("--released-tests", type=int, default=3, help="tests of the row that spawns interpreters")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--against", type=Path, help="another checkout to compare this tree with")
    parser.add_argument("--rounds", type=int, default=9, help="how often the two trees of --against take turns")
    parser.add_argument("--device-rounds", type=int, help="compare the simulated accelerator with gloo on the host")
    options = parser.parse_args()
    import torch

    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; milliseconds per test")
    if options.against is not None:
        compare(options.against.resolve(), options.world_sizes, options.tests, options.rounds)
        return
    for world_size in options.world_sizes:
        if options.device_rounds:
            compare_devices(world_size, options.tests, options.device_rounds)
            continue
        print(f"\nworld size {world_size:<25} {'median':>8} {'worst':>8} {'amortized':>10}  isolation")
        found = {}
        for base, isolation in ROWS:
            tests = options.released_tests if base == "released" else options.tests
            found[base] = row = measure(base, world_size, tests)
            print(
                f"  {base:<34} {row['median']:8.1f} {row['worst']:8.1f} {row['amortized']:10.1f}  {isolation}",
                flush=True,
            )
        print(f"  ratio released / ours: {found['released']['median'] / found['ours']['median']:.1f}")
        print(f"  ratio ours / bare fork: {found['ours']['median'] / found['bare fork']['median']:.2f}")
        shared = found["released continuous"]["amortized"] / found["ours"]["amortized"]
        print(f"  ratio released continuous / ours, amortized over {options.tests} tests: {shared:.2f}")


if __name__ == "__main__":
    row = json.loads(os.environ.get(ROW_VARIABLE, "{}"))
    if row.get("base") == "bare fork":
        bare_fork(row["world_size"], row["tests"])
    elif row:
        run_row()
    else:
        main()
