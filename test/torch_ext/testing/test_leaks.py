"""``--check-leaks``: each kind of leak is found by name, and a test that cleans up passes."""

import re

import pytest

from test.torch_ext.interpreter import RUN_TEST, python

TEST = """
import gc
import subprocess
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch_ext import accelerator
from torch_ext.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

KEPT = []


class TestLeaks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def tensor(self, size):
        return torch.ones(size, device=accelerator.current_device(self.rank))

    def group(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group(accelerator.backend(), store=store, rank=self.rank, world_size=2)

    def test_clean(self):
        self.group()
        cycle = [self.tensor(10)]
        cycle.append(cycle)
        weight = self.tensor(10).requires_grad_()
        dist.all_reduce(weight.exp().sum())
        weight.square().sum().backward()
        threading.Thread(target=time.sleep, args=(0.2,)).start()
        shared = symm_mem.empty(4, device=weight.device)  # with a thread of the harness's
        symm_mem.rendezvous(shared, dist.group.WORLD).barrier()
        with tempfile.TemporaryFile() as file, subprocess.Popen(["true"]):
            file.write(b"1")

    def test_memory(self):
        if self.rank == 1:
            KEPT.append(self.tensor(100))

    def test_thread(self):
        threading.Thread(target=time.sleep, args=(60,), daemon=True, name="poller").start()

    def test_child(self):
        KEPT.append(subprocess.Popen(["sleep", "61"]))

    def test_file(self):
        KEPT.append(open(__file__))

    def test_a_failure_stays_itself(self):
        KEPT.append(self.tensor(100))
        self.fail("its own reason")


class TestGroup(TestLeaks):
    destroy_pg_upon_exit = False
    test_clean = test_memory = test_thread = test_child = test_file = test_a_failure_stays_itself = None

    def test_group(self):
        self.group()


class TestContinuous(MultiProcContinuousTest):
    world_size = 2

    def test_first_uses_the_group_of_the_class(self):
        dist.all_reduce(torch.ones(1, device=accelerator.current_device(self.rank)))

    def test_second_leaks(self):
        KEPT.append(torch.ones(1000, device=accelerator.current_device(self.rank)))
"""
FOUND = {
    "TestLeaks::test_memory": r"rank 1 raised .* left 512 bytes of device memory, allocated at test_own.py:25\.",
    "TestLeaks::test_thread": r"ranks 0, 1 raised LeakError: the test left the daemon thread poller\.",
    "TestLeaks::test_child": r"ranks 0, 1 raised LeakError: the test left the child process \d+, sleep 61\.",
    "TestLeaks::test_file": r"ranks 0, 1 raised LeakError: the test left the open file /.*test_own.py\.",
    "TestLeaks::test_a_failure_stays_itself": r"ranks 0, 1 raised AssertionError at test_own.py:\d+: its own reason",
    "TestGroup::test_group": r"the test left the process group \S+ of ranks 0, 1\.",
    "TestContinuous::test_second_leaks": r"ranks 0, 1 raised .* left 4096 bytes .*allocated at test_own.py:77",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "test_own.py").write_text(TEST)
    return python(RUN_TEST, "--check-leaks", "-v", "--device", "sim", folder)


@pytest.mark.costly
def test_what_a_test_leaves_fails_it(ended):
    blocks = re.split(r"^FAILED ", ended.stdout, flags=re.MULTILINE)[1:]
    by_test = {block.split()[0].partition("::")[2]: block for block in blocks}
    assert by_test.keys() == FOUND.keys(), ended.stdout + ended.stderr
    missing = {name: by_test[name] for name, words in FOUND.items() if not re.search(words, by_test[name])}
    assert not missing, missing
    assert "rerun:" in by_test["TestLeaks::test_file"] and "--check-leaks" in by_test["TestLeaks::test_file"]
    assert "2 passed, 7 failed" in ended.stdout


@pytest.mark.costly
def test_without_the_option_nothing_is_checked(tmp_path):
    (tmp_path / "test_own.py").write_text(TEST)
    ended = python(RUN_TEST, "-k", "not a_failure_stays_itself", "--device", "sim", tmp_path)
    assert "0 failed" in ended.stdout, ended.stdout + ended.stderr
