"""The eight DDP-under-distributed-autograd tests on plain cpu: torch's own copy and ours, side by side.

    python benchmarks/ddp_under_dist_autograd.py [--repeats 3]
    python benchmarks/ddp_under_dist_autograd.py --soak 100 [--busy 4]

The first form prints, for each row, the median seconds of the eight tests over its repeats, and the ratio to torch's
copy under torch's harness, which runs once. The second form repeats ours, beside that many busy loops, and counts the
runs with a failure. Every run is its own process. The rows do not check the same: ours compares every gradient with a
model in one process, torch's copy compares fewer.
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

REPOSITORY = Path(__file__).resolve().parents[1]
ROW_VARIABLE = "TORCH_EXT_BENCHMARK_ROW"
ROWS = {
    "released": "torch's copy, torch's harness",
    "released-on-ours": "torch's copy, our harness",
    "ours": "our copy, our harness",
}
SUITES = ("DdpUnderDistAutogradTest", "DdpComparisonTest")
TESTS = 8

if ROW_VARIABLE in os.environ:
    # `python benchmarks/...` puts only this folder on the path.
    sys.path.insert(0, str(REPOSITORY))


def classes_of(row: str) -> dict[str, type]:
    """Return the row's test classes, for this module's namespace, where ranks look them up."""
    if row == "ours":
        from torch_ext.testing._internal.distributed import ddp_under_dist_autograd_test as ours
        from torch_ext.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as our_agent
        from torch_ext.testing._internal.distributed.rpc_utils import generate_tests

        suites = [getattr(ours, name) for name in SUITES]
        return generate_tests("Row", our_agent.TensorPipeRpcAgentTestFixture, suites, __name__)

    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as released
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as agent

    if row == "released":
        from torch.testing._internal.distributed.rpc_utils import SpawnHelper
    else:
        from torch_ext.testing._internal.distributed.rpc_utils import SpawnHelper
    bases = [(getattr(released, name), agent.TensorPipeRpcAgentTestFixture, SpawnHelper) for name in SUITES]
    return {
        f"Row{own.__name__}": type(f"Row{own.__name__}", (own, *rest), {"__module__": __name__}) for own, *rest in bases
    }


if ROW_VARIABLE in os.environ:
    # At module level: the released harness's ranks import this file to find the classes.
    globals().update(classes_of(os.environ[ROW_VARIABLE]))


def run_row() -> None:
    """Run this process's row; print seconds, tests run and failures as one line of JSON."""
    loader = unittest.defaultTestLoader
    suite = unittest.TestSuite(loader.loadTestsFromTestCase(globals()[f"Row{name}"]) for name in SUITES)
    start = time.monotonic()
    result = unittest.TextTestRunner(stream=sys.stderr).run(suite)
    seconds = time.monotonic() - start
    bad = len(result.failures) + len(result.errors) + len(result.skipped)
    print(json.dumps({"seconds": seconds, "tests": result.testsRun, "bad": bad}), flush=True)


def measure(row: str) -> dict[str, float]:
    """Run ``row`` in a fresh process and return its result; print the tests' output if a test failed."""
    environment = os.environ | {ROW_VARIABLE: row, "TORCH_EXT_DEVICE": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    last = done.stdout.strip().rpartition("\n")[2]
    answer: dict[str, float] = json.loads(last) if last.startswith("{") else {"seconds": 0, "tests": 0, "bad": 1}
    if answer["tests"] != TESTS or answer["bad"]:
        print(done.stderr[-8000:], file=sys.stderr)
        answer["bad"] = max(1, answer["bad"])
    return answer


def compare(repeats: int) -> int:
    reference, worst = 0.0, 0
    for row, what in ROWS.items():
        runs = [measure(row) for _ in range(1 if row == "released" else repeats)]
        median = statistics.median(run["seconds"] for run in runs)
        reference = reference or median
        bad = int(sum(run["bad"] for run in runs))
        worst = max(worst, bad if row == "ours" else 0)
        print(f"{what:32} {median:7.2f} s  {reference / median:6.1f}x  {len(runs)} runs, {bad} bad tests", flush=True)
    return 1 if worst else 0


def soak(times: int, busy: int) -> int:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    runs = []
    try:
        for number in range(1, times + 1):
            runs.append(measure("ours"))
            if number % 10 == 0:  # report progress: a soak may be interrupted
                print(f"{number} runs, {sum(bool(run['bad']) for run in runs)} with a failure", flush=True)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    bad = sum(1 for run in runs if run["bad"])
    median = statistics.median(run["seconds"] for run in runs)
    print(f"{times} runs beside {busy} busy loops: {bad} with a failure, median {median:.2f} s")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row but the first")
    parser.add_argument("--soak", type=int, default=0, help="repeat ours this often instead of comparing")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the soak")
    options = parser.parse_args()
    return soak(options.soak, options.busy) if options.soak else compare(options.repeats)


if __name__ == "__main__":
    if ROW_VARIABLE in os.environ:
        run_row()
    else:
        raise SystemExit(main())
