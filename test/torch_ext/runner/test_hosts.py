"""Classes that ask for several hosts, for which this machine stands. Those on a cluster are in ``test_cluster.py``."""

import json
import re

import pytest

from test.torch_ext.interpreter import RUN_TEST, python
from torch_ext.world import settings

SUITE = """
import os
import tempfile
from datetime import timedelta

import torch.distributed as dist
from torch_ext.testing._internal.common_distributed import DistributedTestBase, MultiProcContinuousTest


class TestPair(DistributedTestBase):
    world_size = 4
    hosts = 2

    def test_passes(self):
        self.create_pg("cpu")
        said = [None] * 4
        names = "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "RANK", "WORLD_SIZE"
        dist.all_gather_object(said, ([os.environ[name] for name in names], tempfile.gettempdir(), self.file_name))
        places, folders, files = zip(*said)
        self.assertEqual(list(places), [[str(r % 2), "2", str(r // 2), "2", str(r), "4"] for r in range(4)])
        for same in (folders, files):
            self.assertEqual((same[0], same[2]), (same[1], same[3]))
            self.assertNotEqual(same[0], same[2])

    def test_no_file_connects_hosts(self):
        store = dist.FileStore(self.file_name, 4)
        store.set(str(self.rank), "here")
        store.wait([str(self.rank ^ 1)], timedelta(seconds=60))
        self.create_pg("cpu")
        dist.barrier()
        self.assertFalse(store.check([str(self.rank ^ 2)]))

    def test_fails_on_host_1(self):
        dist.init_process_group("gloo")
        if self.rank == 2:
            raise ValueError("only here")
        dist.barrier()


class TestKept(MultiProcContinuousTest):
    world_size = 2
    hosts = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_ranks_have_a_host_each(self):
        self.assertEqual(os.environ["LOCAL_RANK"], "0")
        dist.barrier()


class TestOdd(DistributedTestBase):
    world_size = 3
    hosts = 2

    def test_cannot_be_divided(self):
        pass
"""


@pytest.mark.costly
def test_this_machine_stands_for_two_and_the_report_names_the_host_of_each_rank(tmp_path):
    (tmp_path / "test_hosts.py").write_text(SUITE)
    done = python(RUN_TEST, "--root", tmp_path, "--device", "cpu", "--json", "-", folder=tmp_path)
    recorded = [json.loads(line) for line in done.stdout.splitlines()]
    results = {one["method"]: one for one in recorded if one["event"] == "result"}
    assert {name: one["status"] for name, one in results.items()} == {
        "test_passes": "passed",
        "test_fails_on_host_1": "failed",
        "test_ranks_have_a_host_each": "passed",
        "test_no_file_connects_hosts": "passed",
        "test_cannot_be_divided": "failed",
    }, done.stderr
    failure = results["test_fails_on_host_1"]
    assert re.search(r"^rank 2 raised ValueError at \S+: only here", failure["text"], re.M)
    assert re.search(r"^  rank 2 on host 1 raised ValueError at \S+: only here  <- first", failure["text"], re.M)
    assert [one["host"] for one in failure["problems"][0]["ranks"]] == ["host 0", "host 0", "host 1", "host 1"]
    assert "got 3 ranks for 2 hosts, expected a multiple of 2" in results["test_cannot_be_divided"]["text"]
    (plan,) = (one for one in recorded if one["event"] == "plan")
    assert {one["class"]: one["hosts"] for one in plan["tests"]} == {"TestPair": 2, "TestKept": 2, "TestOdd": 2}


@pytest.mark.parametrize(("asked", "number"), [(2, 2), (1, 1), (0, 1), (-3, 1), (True, 1), ("2", 1), (["a", "b"], 1)])
def test_hosts_must_be_a_number(asked, number):
    assert settings.hosts_of(type("TestA", (), {"hosts": asked})) == number


def test_an_interface_is_known_by_its_address():
    name = settings.interface_of("127.0.0.1")
    assert name and settings.interface_of("203.0.113.7") == ""
    variables = {"GLOO_SOCKET_IFNAME": name, "TP_SOCKET_IFNAME": name}
    assert settings.interface_variables("127.0.0.1", {}) == variables
    assert settings.interface_variables("127.0.0.1", variables) == {}, "what the machine says counts"
