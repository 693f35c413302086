"""What slots bring: runs of the suites one class at a time and packed on slots, in turns; and the policy on paper.

    python benchmarks/runner.py [--repeats 3] [--slots 4 8 12] [-i PATTERN ...] [--paper-only]

First runs the suites once, one class at a time, to record how long each test takes. Prints what the packed policy makes
of these times on 8 and 64 slots against the lower bound, for the suites as they are and twenty times as many. Then runs
the command itself, serial and packed in turns, and prints for each repeat the ratio of the wall times, and how much
processor time both took. Ratios are of neighbouring runs, so they hold on a machine that does other work too.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from torch_ext import cache
from torch_ext.runner.discovery import find_test_files
from torch_ext.runner.names import NameCache, surroundings
from torch_ext.runner.results import TestName
from torch_ext.runner.schedule import Packed, Plan, make_plan
from torch_ext.runner.schedule.simulate import lower_bound, makespan

REPOSITORY = Path(__file__).resolve().parents[1]
_LINE = re.compile(r"^(\S+)::(\w+)::(\w+)  (?:passed|skipped|expected failure)  ([\d.]+) s")


def run(*arguments: str) -> tuple[float, float, str]:
    """Run the command; return wall and processor seconds, and its output. Exits if a test fails."""
    command = [sys.executable, str(REPOSITORY / "run_test.py"), *arguments]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    took_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def recorded(output: str) -> dict[TestName, float]:
    """Return how long each test of a verbose run took, in seconds."""
    matches = filter(None, map(_LINE.match, output.splitlines()))
    return {TestName(found[1], found[2], found[3]): float(found[4]) for found in matches}


def plan_of(times: Mapping[TestName, float]) -> Plan:
    """Return the plan of the recorded tests, with what each needs as the run has remembered it."""
    names = NameCache(cache.folder(), surroundings(os.environ.get("TORCH_EXT_DEVICE", "")))
    files = [file for file in find_test_files(REPOSITORY / "test") if any(test.file == file.name for test in times)]
    remembered = [found for file in files if (found := names.load(file)) is not None]
    needs = {test: need for found in remembered for test, need in zip(found.tests, found.needs, strict=True)}
    return make_plan(files, times, needs, times.__getitem__)


def on_paper(plan: Plan) -> None:
    copies = Plan(tuple(batch._replace(cls=f"{batch.cls}{copy}") for batch in plan for copy in range(20)))
    for what, each in (("the suites", plan), ("twenty times the suites", copies)):
        for slots in (8, 64):
            bound, span = lower_bound(each, slots), makespan(each, Packed(slots), slots)
            total = f"{len(each.batches)} classes, {sum(batch.expected_s for batch in each):.0f} s"
            print(f"  {what} ({total}) on {slots} slots: {span:.1f} s, {span / bound:.2f} of the lower bound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 8, 12], metavar="N")
    parser.add_argument("-i", "--include", nargs="+", default=["distributed/fsdp"], metavar="PATTERN")
    parser.add_argument("--paper-only", action="store_true", help="only the policy on paper")
    options = parser.parse_args()
    selected = ("-v", "-i", *options.include)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    _, _, output = run("-j", "1", *selected)
    times = recorded(output)
    plan = plan_of(times)
    print(f"{len(times)} tests in {len(plan.batches)} classes, {sum(times.values()):.1f} s of bodies; on paper:")
    on_paper(plan)
    if options.paper_only:
        return
    ratios: dict[int, list[float]] = {slots: [] for slots in options.slots}
    for _ in range(options.repeats):
        for slots in options.slots:
            serial_s, serial_cpu_s, _ = run("-j", "1", *selected)
            packed_s, packed_cpu_s, output = run("--slots", str(slots), *selected)
            if recorded(output).keys() != times.keys():
                raise SystemExit("the packed run did not run the same tests")
            ratios[slots].append(packed_s / serial_s)
            idle = 1 - serial_cpu_s / serial_s / (os.cpu_count() or 1)
            print(
                f"  {slots} slots: {packed_s:.1f} s against {serial_s:.1f} s, ratio {packed_s / serial_s:.2f}; "
                f"processor {packed_cpu_s:.0f} s against {serial_cpu_s:.0f} s, idle one by one {idle:.0%}",
                flush=True,
            )
    for slots, values in ratios.items():
        print(f"{slots} slots: median ratio {statistics.median(values):.2f} of {len(values)}")


if __name__ == "__main__":
    main()
