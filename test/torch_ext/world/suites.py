"""Writes programs for one test, runs them from outside, and parses the output of their runs.

A program is a file of tests. It runs in its own session, so that its signals to its process group do not reach the
tests that judge it.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from test.torch_ext.interpreter import CHECKOUT, RUN_TEST
from test.torch_ext.servers import eventually, server_for
from test.torch_ext.world.faults import MARK, marked_processes

# In the environment: the factor by which a run may exceed its time on a quiet machine.
PATIENCE = "VERDICT_PATIENCE"
SLOWER = float(os.environ.get(PATIENCE, "1"))
# Seconds, far above the time of any run, and below the limits that a run must not wait for.
DEADLINE_S = 200 * SLOWER
# Variables of the run that runs these tests.
_OUTER = ("TORCH_EXT_", "PYTEST_", "COVERAGE_")
WORDS = "passed|failed|skipped|expected failure|unexpected success"

PREAMBLE = '''
import atexit, contextlib, ctypes, json, multiprocessing, multiprocessing.util, os, signal, subprocess, sys
import threading, time, unittest
from datetime import timedelta
import torch
import torch.distributed as dist
from torch_ext.testing._internal.common_distributed import (
    DistributedTestBase, MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase,
    spawn_threads_and_init_comms, with_timeout,
)
from torch_ext.testing._internal.common_utils import TestCase, run_tests

HERE = os.path.dirname(os.path.abspath(__file__))


def note(name, text=""):
    """Leave a note that another process awaits. The note is there as a whole or not at all."""
    path = os.path.join(HERE, name)
    with open(f"{path}.{os.getpid()}", "w") as stream:
        stream.write(str(text))
    os.rename(f"{path}.{os.getpid()}", path)


def await_note(name):
    path, end = os.path.join(HERE, name), time.monotonic() + 600
    while not os.path.exists(path):
        assert time.monotonic() < end, f"nobody left the note {name}"
        time.sleep(0.01)
    with open(path) as stream:
        return stream.read()


def forever():
    while True:
        time.sleep(1)


def raise_(text="it failed", *_):
    raise ValueError(text)


def in_a_thread(target=raise_, joined=True):
    thread = threading.Thread(target=target, name="a thread")
    thread.start()
    joined and thread.join()


def freeze_clocks():
    """As freezegun does: in every module that has imported them."""
    clocks = time.monotonic, time.time
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if any(value is each for each in clocks):
                setattr(module, name, lambda: 5.0)


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        os.environ["PARENT_HALF"] = str(os.getpid())
        self._spawn_processes()

    def join_group(self, seconds=300):
        store = dist.FileStore(self.file_name, self.world_size)
        store.set_timeout(timedelta(seconds=seconds))
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timedelta(seconds=seconds)
        )
        return store

    def check(self):
        """Passes only if every rank is well."""
        self.join_group()
        ones = torch.ones(3)
        dist.all_reduce(ones)
        self.assertEqual(ones, torch.full((3,), float(self.world_size)))


class Standing(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def check(self):
        ones = torch.ones(3)
        dist.all_reduce(ones)
        self.assertEqual(ones, torch.full((3,), float(self.world_size)))


class Threads(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    check = Standing.check
'''


@dataclass
class Run:
    """One run of a suite. Statuses and reports are found by the last part of a test's, class's or file's id."""

    code: int
    out: str
    err: str
    status: dict[str, str] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    census: list[dict[str, int | str]] = field(default_factory=list)

    def __str__(self):
        return f"exit code {self.code}\n{self.out}\n{self.err}"


class Suite:
    """A folder of programs, with its own temporary folder and a mark on its processes."""

    def __init__(self, folder, source, name="test_suite.py"):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.file = folder / name
        self.add(name, source)
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.census_file = folder / "census"
        self.server = None  # that has started the processes of the last run

    def add(self, name, source):
        """Write another file of tests, with the same beginning."""
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(PREAMBLE + textwrap.dedent(source))

    def environment(self, extra: Mapping[str, str] = {}):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
        return {
            **kept, MARK: self.mark, "TMPDIR": str(self.temporary), "CENSUS": str(self.census_file),
            "TORCH_EXT_CACHE": str(self.folder / "cache"), "TORCH_EXT_DEVICE": "cpu", "PYTHONPATH": str(CHECKOUT),
            **extra,
        }  # fmt: skip

    def start(self, command, extra: Mapping[str, str] = {}, **how):
        """Start a command in its own session; ``how`` goes to ``Popen``."""
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": self.folder, **how}
        return subprocess.Popen(
            [sys.executable, *command], env=self.environment(extra), text=True, errors="replace",
            stdin=subprocess.DEVNULL, start_new_session=True, **how,
        )  # fmt: skip

    def start_runner(self, *arguments, extra: Mapping[str, str] = {}, served=False, **how):
        """Start ``run_test.py --root``. If ``served``, a server may start its processes."""
        variables, self.server = self.environment(extra), None
        on_host = variables["TORCH_EXT_DEVICE"] == "cpu" and "--device" not in arguments
        if served and on_host and "XDG_RUNTIME_DIR" not in extra and (server := server_for("--host", variables)):
            self.server, extra = server, {**extra, "XDG_RUNTIME_DIR": server.runtime}
        return self.start([RUN_TEST, "--root", str(self.folder), "-v", *arguments], extra, **how)

    def finish(self, process, parse=None, deadline_s=DEADLINE_S):
        """Wait for the end. After ``deadline_s``, kill the run and all its processes; it then has no exit code."""
        late = ""
        try:
            out, err = process.communicate(timeout=max(deadline_s, DEADLINE_S))
        except subprocess.TimeoutExpired:
            late = f"\nkilled by the test: it ran past its deadline of {deadline_s} s"
            process.kill()
            self.end_survivors()
            out, err = process.communicate()
        run = Run(process.returncode, out or "", (err or "") + late)
        (parse or _parse)(run)
        if self.census_file.exists():
            run.census = [json.loads(line) for line in self.census_file.read_text().splitlines()]
        return run

    def run(self, *arguments, extra: Mapping[str, str] = {}, **how):
        """Run it by ``run_test.py --root``."""
        return self.finish(self.start_runner(*arguments, extra=extra, served=not how, **how))

    def run_unittest(self, *tests, extra: Mapping[str, str] = {}):
        """Run tests, named with their class, by ``python -m unittest``."""
        names = [f"{self.file.stem}.{test}" for test in tests] or [self.file.stem]
        return self.finish(self.start(["-m", "unittest", "-v", *names], extra), parse_unittest)

    def run_pytest(self, *arguments, extra: Mapping[str, str] = {}):
        command = ["-m", "pytest", "-v", "-rA", "-p", "no:cacheprovider", str(self.file), *arguments]
        return self.finish(self.start(command, extra), parse_pytest)

    def await_note(self, name, process):
        """Return the note that a program left, once it is there."""
        end = time.monotonic() + DEADLINE_S
        while not (self.folder / name).exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, f"nobody left the note {name}"
            time.sleep(0.01)
        return (self.folder / name).read_text()

    def assert_nothing_left(self):
        """Wait up to five seconds for the suite's processes to end; they and its temporary files must be gone."""
        end = time.monotonic() + 5
        while (found := marked_processes(self.mark)) and time.monotonic() < end:
            time.sleep(0.05)
        assert found == {}
        assert self.server is None or eventually(self.server.is_idle), "processes of the run are left"
        # Importing torch._dynamo creates Inductor's cache folder, and pytest keeps those of its fixture.
        files = [str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*")]
        assert [name for name in files if not name.startswith(("torchinductor_", "pytest-of-"))] == []

    def end_survivors(self):
        """Kill what a failed test left behind, by pid."""
        while found := marked_processes(self.mark):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@contextlib.contextmanager
def suite_of(folder, source, name="test_suite.py"):
    """A suite whose processes end with the block. Unless the block raises, none may be left by then."""
    suite = Suite(folder, source, name)
    try:
        yield suite
        suite.assert_nothing_left()
    finally:
        suite.end_survivors()


def endings(run):
    """Return the status and the report of each test, class and file, by its id."""
    texts = dict(re.findall(r"^FAILED (\S+)  [\d.]+ s\n(.*?)^rerun: ", run.out, re.MULTILINE | re.DOTALL))
    found = re.findall(rf"^(\S+\.py(?:::\w+)*)  ({WORDS})  [\d.]+ s", run.out, re.MULTILINE)
    return {name: (status, texts.get(name, "")) for name, status in found}


def _parse(run):
    for name, (status, text) in endings(run).items():
        run.status[name.rpartition("::")[2]] = status
        if text:
            run.text[name.rpartition("::")[2]] = text


def parse_unittest(run):
    # The parent half may print between a test's name and its result, which then stands at the end of another line.
    for name, status in re.findall(
        r"^(\w+) \([\w.]+\)(?:\n[^\n]*?)? \.\.\. (?:.*?\n)*?.*?(ok|FAIL|ERROR|skipped)\b", run.err, re.MULTILINE
    ):
        run.status[name] = {"ok": "passed", "skipped": "skipped"}.get(status, "failed")
    for name, text in re.findall(r"^(?:FAIL|ERROR): (\w+) .*?\n-+\n(.*?)(?=^=====|^-----)", run.err, re.M | re.S):
        run.text[name] = text


def parse_pytest(run):
    for status, name in re.findall(r"^(PASSED|FAILED|SKIPPED|ERROR) \S+::(\w+)", run.out, re.MULTILINE):
        run.status[name] = status.lower()
    for name, text in re.findall(r"^_+ \w+\.(\w+) _+$(.*?)(?=^_{5,}|^====)", run.out, re.M | re.S):
        run.text[name] = text
