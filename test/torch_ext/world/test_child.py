"""The steps of every child of a zygote before it accepts an order, and what its zygote ends after it."""

import os
import signal
import subprocess

import pytest
import torch

from test.torch_ext.interpreter import CHECKOUT
from test.torch_ext.world.suites import suite_of
from torch_ext.world import _os, child
from torch_ext.world.protocol import LeftBehind
from torch_ext.world.zygote import Leftovers

SOURCE = """
import torch_ext.world.child as child

if os.environ.get("TEST_CALLS"):
    replace = child.replace_thread_pool

    def note_and_replace():
        with open(os.environ["TEST_CALLS"], "a") as stream:
            stream.write(f"{os.getpid()}\\n")
        replace()

    child.replace_thread_pool = note_and_replace


class TestPool(Ranks):
    def test_pool(self):
        with open(os.environ["TEST_CALLS"] + ".ranks", "a") as stream:
            stream.write(f"{os.getpid()} {os.getpgrp()}\\n")

    def test_seeds_without_stacks(self):
        import traceback, unittest.mock
        with unittest.mock.patch("traceback.format_stack", side_effect=AssertionError("this takes long")):
            torch.manual_seed(7)


class TestPlain(unittest.TestCase):
    def test_plain(self):
        with open(os.environ["TEST_CALLS"] + ".ranks", "a") as stream:
            stream.write(f"{os.getpid()} {os.getpgrp()}\\n")
"""


def test_every_child_replaces_the_pool_and_leads_a_process_group(tmp_path):
    """Class processes too: ranks that are threads, and plain classes, run autograd there."""
    with suite_of(tmp_path, SOURCE) as suite:
        run = suite.run(extra={"TEST_CALLS": str(tmp_path / "calls"), "TORCH_EXT_SPARES": "0"})
    assert run.code == 0, run
    called = (tmp_path / "calls").read_text().split()
    ran = [line.split() for line in (tmp_path / "calls.ranks").read_text().splitlines()]
    assert len(ran) == 3
    assert {pid for pid, _ in ran} <= set(called)
    assert [(pid, group) for pid, group in ran if pid != group] == []


def test_the_number_of_threads_stays(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    child.replace_thread_pool()
    assert asked == [torch.get_num_threads()]


def test_a_zygote_loads_dynamo_for_files_that_look_as_if_they_needed_it(tmp_path):
    empty, training = tmp_path / "empty.py", tmp_path / "training.py"
    empty.write_text("import torch\n\ndef test_barrier():\n    torch.distributed.barrier()\n")
    training.write_text("import torch\n\noptimizer = torch.optim.SGD([torch.ones(1)])\n")
    assert child.first_uses(str(empty), str(tmp_path / "missing.py")) == ()
    assert child.first_uses(str(empty), str(training)) == ("torch._dynamo",)


BASE = """
class Loaded(Ranks):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        assert "torch._dynamo" in sys.modules
"""
USER = "import base\n\nclass TestUser(base.Loaded):\n    def test_passes(self):\n        pass\n"


@pytest.mark.long
def test_dynamo_is_loaded_before_the_process_of_a_class(tmp_path):
    """``TestCase.run`` of torch needs it: each class would import it anew. No word of the file tells so."""
    with suite_of(tmp_path, BASE, name="base.py") as suite:
        (suite.folder / "test_user.py").write_text(USER)
        run = suite.run("-i", "test_user", extra={"PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(suite.folder)])})
        plain = suite.finish(suite.start(["-m", "unittest", "-v", "test_user"]))
    assert (run.code, plain.code) == (0, 0), (run, plain)


# Helpers that torch starts for a rank end with it, clean up, and are not reported as left behind

SHARES_MEMORY = """
import torch.multiprocessing

class TestSharedMemory(Ranks):
    def test_shared_through_files(self):
        torch.multiprocessing.set_sharing_strategy("file_system")
        tensor = torch.ones(3).share_memory_()
        handle = tensor.untyped_storage()._share_filename_cpu_()
        self.assertEqual(tensor.sum().item(), 3.0)
        print("manager", os.path.exists(handle[0]))
"""


def test_the_manager_of_shared_memory_takes_its_files_with_it(tmp_path_factory):
    # A short name: the manager's socket lies below it, and the path of a socket has at most 107 characters.
    with suite_of(tmp_path_factory.mktemp("shm"), SHARES_MEMORY) as suite:
        run = suite.run("--show-output")
    assert run.status == {"test_shared_through_files": "passed"}, run
    assert run.out.count("manager True") == 2, run
    assert "left a process behind" not in run.out + run.err


@pytest.mark.parametrize("killed", [False, True])
def test_process_that_its_test_has_killed_is_not_left_behind(monkeypatch, killed):
    """On a busy machine the killed process may need a while to end."""
    child = subprocess.Popen(["sleep", "600"])
    assert not _os.is_ending(child.pid)
    if killed:
        os.kill(child.pid, signal.SIGKILL)
    answers = iter([[child.pid], []])
    monkeypatch.setattr(_os, "children_of", lambda pid: next(answers))
    monkeypatch.setattr(_os, "command_line", lambda pid: "sleep 600")
    found = Leftovers().end_leftovers({}, (), 1)
    assert found == (() if killed else (LeftBehind(1, "sleep 600"),))
    child.wait()
    assert not _os.is_ending(child.pid)
