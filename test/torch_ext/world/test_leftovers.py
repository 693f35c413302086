"""Helpers that torch starts for a rank end with it, clean up, and are not reported as left behind."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from test.torch_ext.world.suites import suite_of
from torch_ext.world import _os
from torch_ext.world.protocol import LeftBehind
from torch_ext.world.zygote import Leftovers

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


def test_the_manager_of_shared_memory_takes_its_files_with_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    # A short name: the manager's socket lies below it, and the path of a socket has at most 107 characters.
    with suite_of(tmp_path_factory.mktemp("shm"), SHARES_MEMORY) as suite:
        run = suite.run("--show-output")
    assert run.status == {"test_shared_through_files": "passed"}, run
    assert run.out.count("manager True") == 2, run
    assert "left a process behind" not in run.out + run.err


@pytest.mark.parametrize("killed", [False, True])
def test_process_that_its_test_has_killed_is_not_left_behind(monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    """On a busy machine the killed process may need a while to end."""
    child = subprocess.Popen(["sleep", "600"])
    assert not _os.is_ending(child.pid)
    if killed:
        os.kill(child.pid, signal.SIGKILL)
    answers = iter([[child.pid], []])
    monkeypatch.setattr(_os, "children_of", lambda pid: next(answers))
    monkeypatch.setattr(_os, "command_line", lambda pid: "sleep 600")
    found = Leftovers().end_leftovers({}, (), 1)
    assert found == (() if killed else (LeftBehind(1, child.pid, "sleep 600"),))
    child.wait()
    assert not _os.is_ending(child.pid)
