"""Tests on a Ray cluster: three raylets on this machine, of which one is killed while it runs a class."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from test.torch_ext.interpreter import RUN_TEST
from torch_ext.results import SetupError
from torch_ext.runner.cluster.hosts import HostRanks
from torch_ext.runner.cluster.machines import Machines
from torch_ext.runner.cluster.messages import RankStream
from torch_ext.runner.options import RunOptions
from torch_ext.world import _os

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray; install it with: pip install -e '.[cluster]'"
)
DEADLINE_S = 240

SUITE = """
import os, time
import torch
import torch.distributed as dist
from torch_ext.testing._internal.common_distributed import MultiProcessTestCase

NOTES = {notes!r}


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        with open(os.path.join(NOTES, f"{{type(self).__name__}}.{{self._testMethodName}}"), "a") as stream:
            print(os.environ["RAY_RAYLET_PID"], os.environ["TMPDIR"], os.getcwd(), file=stream)
        self._spawn_processes()

    def check(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        ones = torch.ones(2)
        dist.all_reduce(ones)
        self.assertEqual(ones, torch.full((2,), 2.0))


class TestLost(Ranks):
    def test_1_before(self):
        self.check()

    def test_2_lost(self):
        while not os.path.exists(os.path.join(NOTES, "killed")):
            time.sleep(0.1)
        self.check()

    def test_3_after(self):
        self.check()


class TestOne(Ranks):
    def test_passes(self):
        self.check()

    def test_fails(self):
        self.assertEqual(self.rank, 0)


class TestTwo(Ranks):
    def test_passes(self):
        self.check()


class TestAlone(Ranks):
    alone = True

    def test_passes(self):
        self.check()
        time.sleep(0.5)


del Ranks
"""

ON_TWO_HOSTS = """
import os, tempfile, time
import torch
import torch.distributed as dist
from torch_ext.testing._internal.common_distributed import DistributedTestBase, MultiProcContinuousTest

NOTES = {notes!r}


class TestPair(DistributedTestBase):
    world_size = 4
    hosts = 2

    def test_passes(self):
        self.create_pg("cpu")
        said = [None] * 4
        names = "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "RAY_RAYLET_PID"
        dist.all_gather_object(said, ([os.environ[name] for name in names], tempfile.gettempdir(), self.file_name))
        places, folders, files = zip(*said)
        self.assertEqual([place[:3] for place in places], [[str(r % 2), "2", str(r // 2)] for r in range(4)])
        for same in (folders, files, [place[3] for place in places]):
            self.assertEqual((same[0], same[2]), (same[1], same[3]))
            self.assertNotEqual(same[0], same[2])

    def test_fails(self):
        self.create_pg("cpu")
        print("rank", self.rank, "was here")
        if self.rank == 3:
            raise ValueError("only here")
        dist.barrier()

    def test_hangs(self):
        self.create_pg("cpu")
        if self.rank != 2:
            dist.barrier()


class TestKept(MultiProcContinuousTest):
    world_size = 2
    hosts = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_1(self):
        self.assertEqual(os.environ["LOCAL_RANK"], "0")

    def test_2(self):
        dist.barrier()


class TestThree(DistributedTestBase):
    world_size = 3
    hosts = 3

    def test_skips(self):
        pass


class TestLost(DistributedTestBase):
    world_size = 2
    hosts = 2

    def test_1_before(self):
        self.create_pg("cpu")

    def test_2_lost(self):
        with open(os.path.join(NOTES, f"rank{{self.rank}}"), "w") as stream:
            print(os.environ["RAY_RAYLET_PID"], os.environ["TMPDIR"], file=stream)
        time.sleep(100)
"""


@pytest.fixture
def address():
    """The address of a cluster whose head runs no tests: the driver would go down with the head's raylet."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, include_dashboard=False)
        for _ in range(2):
            cluster.add_node(num_cpus=2, include_dashboard=False)
        yield cluster.address
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def running(folder, source, address, *options):
    """Run a suite on the cluster for the block; yield the run, the folder of its notes and the file of its events."""
    (folder / "notes").mkdir()
    (folder / "suite").mkdir()
    (folder / "suite/test_all.py").write_text(source.format(notes=str(folder / "notes")))
    events = folder / "events.jsonl"
    command = [sys.executable, RUN_TEST, "--root", str(folder / "suite"), "--cluster", address, "--device", "cpu", "-v"]
    with subprocess.Popen(
        [*command, "--json", str(events), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env={**os.environ, "TORCH_EXT_CACHE": str(folder / "cache"), "TORCH_EXT_HANG_AFTER": "3"},
    ) as runner:  # fmt: skip
        try:
            yield runner, folder / "notes", events
        except BaseException:
            runner.kill()
            raise


def kill_machine(raylet):
    for pid in (raylet, *_os.children_of(raylet)):  # Ray's workers too, as when a machine dies
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def results_in(events):
    recorded = [json.loads(line) for line in events.read_text().splitlines()]
    return [one for one in recorded if one["event"] == "result"]


@needs_ray
def test_tests_of_a_lost_machine_run_again_elsewhere(tmp_path, address):
    with running(tmp_path, SUITE, address) as (runner, notes, events):
        raylet, folder, _ = _await(notes / "TestLost.test_2_lost", runner).split()
        _await(events, runner, '"result".*TestLost::test_1_before')  # or the machine's death takes the event along
        kill_machine(int(raylet))
        _await_end(Path(folder))
        (notes / "killed").touch()
        out, err = runner.communicate(timeout=DEADLINE_S)
    assert runner.returncode == 1, (out, err)
    results = results_in(events)
    ended = {one["test"]: one["status"] for one in results}
    assert Counter(ended.values()) == {"passed": 6, "failed": 1}, (out, err)
    assert ended["test_all.py::TestOne::test_fails"] == "failed" and "look at" not in err
    assert len(results) == 7, "each test has one result"
    assert "is lost (" in err and "2 tests of test_all.py::TestLost run again elsewhere" in err
    lost = (notes / "TestLost.test_2_lost").read_text().splitlines()
    assert len(lost) == 2 and len({line.split()[0] for line in lost}) == 2, "it ran again on the other machine"
    assert len((notes / "TestLost.test_1_before").read_text().splitlines()) == 1, "what had ended did not run again"
    ran = [line.split() for note in notes.glob("Test*") for line in note.read_text().splitlines()]
    assert len({(raylet, folder.split("/")[2]) for raylet, folder, _ in ran}) == 2, "each machine has its TMPDIR"
    assert all(not Path(where).is_relative_to(tmp_path) for *_, where in ran), "tests run in a copy"
    for folder in {folder for _, folder, _ in ran}:
        _await_end(Path(folder))


@needs_ray
def test_a_class_on_two_hosts_is_judged_as_one_and_ends_with_either(tmp_path, address):
    with running(tmp_path, ON_TWO_HOSTS, address, "-j", "1") as (runner, notes, events):
        raylet, folder = _await(notes / "rank1", runner).split()
        kill_machine(int(raylet))
        out, err = runner.communicate(timeout=DEADLINE_S)
    _await_end(Path(folder))
    results = {one["test"].removeprefix("test_all.py::"): one for one in results_in(events)}
    ended = {name: one["status"] for name, one in results.items()}
    assert ended == {
        "TestPair::test_passes": "passed",
        "TestPair::test_fails": "failed",
        "TestPair::test_hangs": "failed",
        "TestKept::test_1": "passed",
        "TestKept::test_2": "passed",
        "TestThree::test_skips": "skipped",
        "TestLost::test_1_before": "passed",
        "TestLost": "failed",
    }, (out, err)
    assert "asks for 3 hosts, and the cluster has 2 machines" in results["TestThree::test_skips"]["reason"]
    failure = results["TestPair::test_fails"]
    assert re.search(r"^rank 3 raised ValueError at \S+: only here", failure["text"], re.M)
    assert re.search(r"rank 3 on host 1 \(machine \w{12}\) raised ValueError", failure["text"]), failure["text"]
    assert "Output of rank 3:\n    rank 3 was here" in failure["text"], "what a rank prints comes from its machine"
    assert {one["host"].split()[1] for one in failure["problems"][0]["ranks"]} == {"0", "1"}
    hang = results["TestPair::test_hangs"]["text"]
    assert "never called" in hang and results["TestPair::test_hangs"]["problems"][0]["culprits"] == [2], hang
    assert "host 1 of test_all.py::TestLost, is lost (" in err and "1 test of test_all.py::TestLost" in err, err
    assert "asks for 2 hosts, and the cluster has 1 machine left" in results["TestLost"]["text"]


def _await_end(folder):
    """Wait until the supervisor of a machine has ended and removed its temporary folder."""
    end_s = time.monotonic() + DEADLINE_S
    while folder.exists():
        assert time.monotonic() < end_s, f"{folder} is left behind"
        time.sleep(0.1)


def _await(note, runner, pattern="."):
    """Wait until ``pattern`` matches the text of ``note``, and return the match."""
    end_s = time.monotonic() + DEADLINE_S
    while not note.exists() or not re.search(pattern, note.read_text()):
        assert runner.poll() is None, runner.communicate()
        assert time.monotonic() < end_s, "no machine began the class"
        time.sleep(0.1)
    return note.read_text()


def test_missing_ray_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SetupError, match="--cluster needs Ray, which is not installed here; install it with: pip inst"):
        Machines(RunOptions(Path("/root"), cluster="local:2"))


class Recorder(HostRanks):
    """A host that records its messages."""

    def __init__(self, host, sent):
        super().__init__(1, host, sent.append)
        self.heard: list[Any] = []

    def _receive(self, line):
        self.heard.append(line.payload)


def test_messages_that_overtake_each_other_are_handled_in_order():
    sent = []
    first, second, receiver = Recorder(1, sent), Recorder(2, sent), Recorder(0, [])
    for number in range(3):
        first.send(0, 1, RankStream.OUTPUT, f"first {number}")
        second.send(0, 1, RankStream.OUTPUT, f"second {number}")
    for line in sorted(sent, key=lambda line: (line.source, -line.sequence)):
        receiver.handle(line)
    assert receiver.heard == [f"{name} {number}" for name in ("first", "second") for number in range(3)]
    for each in (first, second, receiver):
        each.close()
