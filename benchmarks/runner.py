"""What slots bring: runs of the suites one class at a time and packed on slots, in turns; and the policy on paper.

    python benchmarks/runner.py [--repeats 3] [--slots 4 8 12] [-i PATTERN ...] [--paper-only | --costs-only]

First runs the suites once, one class at a time, to record how long each test takes. Prints what the packed policy makes
of these times on 8 and 64 slots against the lower bound, for the suites as they are and twenty times as many, and what
a cluster makes of 10,000 tests on 64 hosts. Then runs the command itself, serial and packed in turns, and prints for
each repeat the ratio of the wall times, how much processor time both took, the wall time over the lower bound of the
bodies that it ran, and the memory of the supervisor. Ratios of wall times are of neighbouring runs, so they hold on a
machine that does other work too. Last, it lists 2,000 tests from the cache.
"""

from __future__ import annotations

import argparse
import heapq
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from simulate import lower_bound, makespan

from torch_ext import cache
from torch_ext.results import TestName
from torch_ext.runner.names import NameCache, environment_key, find_test_files
from torch_ext.runner.schedule import Plan, make_plan, slots_of

REPOSITORY = Path(__file__).resolve().parents[1]
_LINE = re.compile(r"^(\S+)::(\w+)::(\w+)  (?:passed|skipped|expected failure)  ([\d.]+) s")


class Run(NamedTuple):
    """One run of the command: wall and processor seconds, the supervisor's peak memory, and the output."""

    wall_s: float
    cpu_s: float
    supervisor_mib: float
    output: str


def run(*arguments: str) -> Run:
    """Run the command. Exits if a test fails."""
    command = [sys.executable, str(REPOSITORY / "run_test.py"), *arguments]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT, text=True)
        peak_kib = 0
        while process.poll() is None:
            peak_kib = max(peak_kib, _peak_kib(process.pid))
            time.sleep(0.05)
        took_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        printed.seek(0)
        output = printed.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{output}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(took_s, cpu_s, peak_kib / 1024, output)


def _peak_kib(pid: int) -> int:
    """Return the peak resident memory of the process, without its children, in KiB."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) if found else 0


def recorded(output: str) -> dict[TestName, float]:
    """Return the duration of each test in the output of a verbose run, in seconds."""
    matches = filter(None, map(_LINE.match, output.splitlines()))
    return {TestName(found[1], found[2], found[3]): float(found[4]) for found in matches}


def plan_of(times: Mapping[TestName, float]) -> Plan:
    """Return the plan of the recorded tests, with the needs that the run has cached."""
    names = NameCache(cache.folder(), environment_key(os.environ.get("TORCH_EXT_DEVICE", "")))
    files = [file for file in find_test_files(REPOSITORY / "test") if any(test.file == file.name for test in times)]
    cached = [found for file in files if (found := names.load(file)) is not None]
    needs = {test: need for found in cached for test, need in zip(found.tests, found.needs, strict=True)}
    return make_plan(files, times, needs, times.__getitem__)


def on_paper(plan: Plan) -> None:
    copies = Plan(tuple(batch._replace(cls=f"{batch.cls}{copy}") for batch in plan for copy in range(20)))
    for what, each in (("the suites", plan), ("twenty times the suites", copies)):
        for slots in (8, 64):
            bound, span = lower_bound(each, slots), makespan(each, slots)
            total = f"{len(each.batches)} classes, {sum(batch.expected_s for batch in each):.0f} s"
            print(f"  {what} ({total}) on {slots} slots: {span:.1f} s, {span / bound:.2f} of the lower bound")


def makespan_on_hosts(plan: Plan, hosts: int, slots: int, start_s: float) -> float:
    """Return the seconds that ``plan`` takes on machines of ``slots`` slots each, which start at ``start_s`` seconds.

    The longest class goes first, to the machine with the most room, as Ray places them; no class spans two machines.
    """
    free = [slots] * hosts
    ends: list[tuple[float, int, int]] = []  # time, machine, number of slots
    now_s = start_s
    for batch in sorted(plan, key=lambda batch: -batch.expected_s):
        wanted = slots_of(batch.need, slots)
        while max(free) < wanted:
            now_s, host, given_back = heapq.heappop(ends)
            free[host] += given_back
        host = free.index(max(free))
        free[host] -= wanted
        heapq.heappush(ends, (now_s + batch.expected_s, host, wanted))
    return max(end_s for end_s, *_ in ends)


def on_paper_on_hosts(plan: Plan, tests: int, hosts: int, slots: int, start_s: float) -> None:
    copies = -(-tests // len(plan.tests))
    whole = Plan(tuple(batch._replace(cls=f"{batch.cls}{copy}") for batch in plan for copy in range(copies)))
    bound, span = lower_bound(whole, hosts * slots), makespan_on_hosts(whole, hosts, slots, 0.0)
    total = f"{copies * len(plan.tests)} tests in {len(whole.batches)} classes"
    print(
        f"  {total} on {hosts} hosts of {slots} slots: {span:.1f} s, {span / bound:.2f} of the lower bound; with "
        f"{start_s:g} s to start each host {makespan_on_hosts(whole, hosts, slots, start_s):.1f} s"
    )


def list_from_cache(tests: int = 2000, files: int = 50) -> float:
    """Return the seconds in which the command lists this number of cached tests: the best of three runs."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(files):
            methods = "".join(f"    def test_{each}(self): ...\n" for each in range(tests // files))
            text = f"import unittest\n\n\nclass TestA(unittest.TestCase):\n{methods}"
            Path(folder, f"test_{number}.py").write_text(text)
        first = run("--list", "--root", folder)
        if not first.output.endswith(f"\n{tests} tests\n"):
            raise SystemExit(first.output)
        return min(run("--list", "--root", folder).wall_s for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 8, 12], metavar="N")
    parser.add_argument("-i", "--include", nargs="+", default=["distributed/fsdp"], metavar="PATTERN")
    parser.add_argument("--paper-only", action="store_true", help="only the policy on paper")
    parser.add_argument("--costs-only", action="store_true", help="only the list from the cache")
    options = parser.parse_args()
    selected = ("-v", "-i", *options.include)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if options.costs_only:
        print(f"2,000 tests listed from the cache: {list_from_cache():.2f} s")
        return
    times = recorded(run("-j", "1", *selected).output)
    plan = plan_of(times)
    print(f"{len(times)} tests in {len(plan.batches)} classes, {sum(times.values()):.1f} s of bodies; on paper:")
    on_paper(plan)
    on_paper_on_hosts(plan, 10_000, 64, 8, 10.0)
    if options.paper_only:
        return
    ratios: dict[int, list[float]] = {slots: [] for slots in options.slots}
    for _ in range(options.repeats):
        for slots in options.slots:
            serial, packed = run("-j", "1", *selected), run("--slots", str(slots), *selected)
            ran = recorded(packed.output)
            if ran.keys() != times.keys():
                raise SystemExit("the packed run did not run the same tests")
            ratios[slots].append(packed.wall_s / serial.wall_s)
            idle = 1 - serial.cpu_s / serial.wall_s / (os.cpu_count() or 1)
            bound_s = lower_bound(plan_of(ran), slots)
            print(
                f"  {slots} slots: {packed.wall_s:.1f} s against {serial.wall_s:.1f} s, ratio {ratios[slots][-1]:.2f}; "
                f"processor {packed.cpu_s:.0f} s against {serial.cpu_s:.0f} s, idle one by one {idle:.0%}; "
                f"{packed.wall_s / bound_s:.2f} of its bodies packed perfectly; "
                f"supervisor {packed.supervisor_mib:.0f} MiB",
                flush=True,
            )
    for slots, values in ratios.items():
        print(f"{slots} slots: median ratio {statistics.median(values):.2f} of {len(values)}")
    print(f"2,000 tests listed from the cache: {list_from_cache():.2f} s")


if __name__ == "__main__":
    main()
