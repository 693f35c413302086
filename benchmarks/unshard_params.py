"""What the harness adds to a real suite: test_fsdp_unshard_params.py on the released harness and on ours.

    python benchmarks/unshard_params.py [--only TestUnshardParamsErrors] [--repeat 3]

Each row is its own process. For the released harness, torch's ``common_distributed`` replaces ours before the suite is
imported, so helpers, models and test bodies are the same on both sides. Both start fresh processes for the ranks of
every test. Prints the seconds per test, the ratio, and the sums.

A small ratio means a long body: such tests run dozens of sub-cases. Nearly all of a test's time on ours is its body,
since starting its ranks takes about 0.05 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import unittest
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SUITE = "test.distributed.fsdp.test_fsdp_unshard_params"
ROW_VARIABLE = "TORCH_EXT_BENCHMARK_ROW"
CLASSES = ("TestUnshardParams", "TestUnshardParamsNoShard", "TestUnshardParamsErrors")

# At module level: the released harness's ranks import this file and must find the same classes.
if os.environ.get(ROW_VARIABLE) == "released":
    import torch.testing._internal.common_distributed

    sys.modules["torch_ext.testing._internal.common_distributed"] = torch.testing._internal.common_distributed


class TimedResult(unittest.TestResult):
    """Records the wall time of each test, including ``setUp`` and ``tearDown``."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._start_s = time.perf_counter()

    def stopTest(self, test: unittest.TestCase) -> None:
        self.seconds[test.id().removeprefix(f"{SUITE}.")] = time.perf_counter() - self._start_s
        super().stopTest(test)


def run_row(only: list[str]) -> None:
    """Run the suite on this process's harness; print the seconds of each test as JSON."""
    loader = unittest.TestLoader()
    result = TimedResult()
    loader.loadTestsFromNames([f"{SUITE}.{name}" for name in only]).run(result)
    for test, trace in (*result.failures, *result.errors):
        print(f"{test}\n{trace}", file=sys.stderr)
    if result.failures or result.errors or result.skipped:
        raise SystemExit(f"not all tests passed: {len(result.skipped)} were skipped, failures are shown above")
    print(json.dumps(result.seconds))


def row(harness: str, only: list[str]) -> dict[str, float]:
    """Return the seconds of each test on ``harness``, measured in its own process."""
    environment = os.environ | {ROW_VARIABLE: harness, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, __file__, *(f"--only={name}" for name in only)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{harness}: {done.stderr.decode(errors='replace')}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {test: statistics.median(seconds[test] for seconds in rows) for test in rows[0]}


def main(options: Any) -> None:
    released = row("released", options.only)
    ours = medians([row("ours", options.only) for _ in range(options.repeat)])
    print(f"{'test':90} {'released':>9} {'ours':>8} {'ratio':>7}")
    for test, seconds in released.items():
        print(f"{test:90} {seconds:8.2f}s {ours[test]:7.3f}s {seconds / ours[test]:6.1f}x")
    total, own = sum(released.values()), sum(ours.values())
    print(f"{'sum':90} {total:8.2f}s {own:7.3f}s {total / own:6.1f}x")
    print(
        f"isolation: fresh processes for every test on both; ours: median of {options.repeat} runs, released: one run"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a class, or Class.test, of the suite; may be repeated")
    parser.add_argument("--repeat", type=int, default=3, help="runs on our harness (default 3)")
    arguments = parser.parse_args()
    arguments.only = arguments.only or list(CLASSES)
    if ROW_VARIABLE in os.environ:
        run_row(arguments.only)
    else:
        main(arguments)
