"""Writes a suite for one test, runs it in a subprocess, and parses the results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from test.torch_ext.world.faults import MARK, marked_processes

__all__ = ["CHECKOUT", "DEADLINE_S", "HEADER", "Run", "Suite", "parse_pytest", "parse_runner", "parse_unittest"]

CHECKOUT = Path(__file__).resolve().parents[3]
# Seconds, far above what any run takes: a hang must fail its test, not block the whole run.
DEADLINE_S = 600

HEADER = '''
import os, signal, sys, time, unittest
import torch
import torch.distributed as dist
from test.torch_ext.world.faults import Census, ancestors, inject
from torch_ext.testing._internal.common_distributed import (
    MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase, with_timeout,
)
from torch_ext.testing._internal.common_utils import run_tests

CENSUS = Census(os.environ["CENSUS"])


class Case(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        self.addCleanup(CENSUS.note, self._testMethodName)  # the first to be added runs last
        super().setUp()
        self._spawn_processes()

    def check(self):
        """A test that passes only if both ranks are well."""
        self.join_group()
        ones = torch.ones(3)
        dist.all_reduce(ones)
        self.assertEqual(ones, torch.full((3,), 2.0))

    def join_group(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
'''


@dataclass
class Run:
    """One run of a suite: exit code, output, and the status and report of each test by its bare name."""

    code: int
    out: str
    err: str
    took_s: float
    status: dict[str, str] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    census: list[dict[str, int | str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


class Suite:
    """A test file in its own folder, with its own temporary folder and a mark on its processes."""

    def __init__(self, folder: Path, source: str, name: str = "test_suite.py") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.file = folder / name
        self.add(name, source)
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.census_file = folder / "census"

    def add(self, name: str, source: str) -> None:
        """Write another file of tests, with the same beginning."""
        (self.folder / name).write_text(textwrap.dedent(HEADER) + textwrap.dedent(source))

    def environment(self, extra: Mapping[str, str] = {}) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_EXT_", "PYTEST_"))}
        return {
            **kept, MARK: self.mark, "TMPDIR": str(self.temporary), "CENSUS": str(self.census_file),
            "TORCH_EXT_CACHE": str(self.folder / "cache"), "TORCH_EXT_DEVICE": "cpu", "PYTHONPATH": str(CHECKOUT),
            **extra,
        }  # fmt: skip

    def start(self, command: list[str], extra: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command], cwd=self.folder, env=self.environment(extra), text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def start_runner(self, *arguments: str, extra: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        return self.start([str(CHECKOUT / "run_test.py"), "--root", str(self.folder), "-v", *arguments], extra)

    def finish(self, process: subprocess.Popen[str], parse: Callable[[Run], None]) -> Run:
        """Wait for the process. A run past the deadline is killed, and fails through its exit code."""
        start_s = time.monotonic()
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "\nkilled by the test: it ran past its deadline"
        run = Run(process.returncode, out, err, time.monotonic() - start_s)
        parse(run)
        if self.census_file.exists():
            run.census = [json.loads(line) for line in self.census_file.read_text().splitlines()]
        return run

    def run(self, *arguments: str, extra: Mapping[str, str] = {}) -> Run:
        """Run it by ``run_test.py --root``."""
        return self.finish(self.start_runner(*arguments, extra=extra), parse_runner)

    def run_unittest(self, *tests: str, extra: Mapping[str, str] = {}) -> Run:
        """Run tests, named with their class, by ``python -m unittest``."""
        names = [f"{self.file.stem}.{test}" for test in tests] or [self.file.stem]
        return self.finish(self.start(["-m", "unittest", "-v", *names], extra), parse_unittest)

    def run_pytest(self, *arguments: str, extra: Mapping[str, str] = {}) -> Run:
        command = ["-m", "pytest", "-v", "-rA", "-p", "no:cacheprovider", str(self.file), *arguments]
        return self.finish(self.start(command, extra), parse_pytest)

    def survivors(self) -> dict[int, str]:
        """Return the suite's processes that are still running after five seconds."""
        end = time.monotonic() + 5
        while (found := marked_processes(self.mark)) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def files_left(self) -> list[str]:
        # Importing torch._dynamo creates Inductor's cache folder.
        return [str(path) for path in self.temporary.rglob("*") if not path.name.startswith("torchinductor_")]

    def end_survivors(self) -> None:
        """Kill what a failed test left behind, by pid."""
        for pid in marked_processes(self.mark):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue


def parse_runner(run: Run) -> None:
    for name, status in re.findall(r"^\S+\.py::\w+::(\w+)  (\w[\w ]*)  [\d.]+ s", run.out, re.MULTILINE):
        run.status[name] = status
    for name, text in re.findall(r"^FAILED \S+?(?:::\w+::(\w+))?  [\d.]+ s\n(.*?)^rerun: ", run.out, re.M | re.S):
        run.text[name] = text


def parse_unittest(run: Run) -> None:
    # The parent half may print between a test's name and its result, which then ends a line of its own.
    for name, status in re.findall(
        r"^(\w+) \([\w.]+\)(?:\n[^\n]*?)? \.\.\. (?:.*?\n)*?.*?(ok|FAIL|ERROR|skipped)\b", run.err, re.MULTILINE
    ):
        run.status[name] = {"ok": "passed", "skipped": "skipped"}.get(status, "failed")
    for name, text in re.findall(r"^(?:FAIL|ERROR): (\w+) .*?\n-+\n(.*?)(?=^=====|^-----)", run.err, re.M | re.S):
        run.text[name] = text


def parse_pytest(run: Run) -> None:
    for status, name in re.findall(r"^(PASSED|FAILED|SKIPPED|ERROR) \S+::(\w+)", run.out, re.MULTILINE):
        run.status[name] = status.lower()
    for name, text in re.findall(r"^_+ \w+\.(\w+) _+$(.*?)(?=^_{5,}|^====)", run.out, re.M | re.S):
        run.text[name] = text
