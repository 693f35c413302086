"""``--upstream``: a file that imports torch's own harness, as upstream's files do, runs on ours without a change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]

# Imports what upstream's files import; DTensorTestBase is torch's class on top of torch's harness.
FILE = """
import os
import sys
import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, has_efa, skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, get_devtype
from torch.testing._internal.common_utils import run_tests


class TestProcesses(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_harness_is_ours_and_other_names_are_torchs(self):
        self.assertTrue(MultiProcessTestCase.__module__.startswith("torch_ext."))
        self.assertEqual(has_efa.__module__, "torch.testing._internal.common_distributed")

    def test_death_of_rank_1_is_seen(self):
        if self.rank == 1:
            os._exit(0)


class TestShards(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_group_is_there(self):
        tensor = torch.ones(1, device=get_devtype())
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)


if __name__ == "__main__":
    run_tests()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCH_EXT_DEVICE": "cpu"}
    command = [sys.executable, str(REPOSITORY / "run_test.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_unmodified_file_runs_on_our_ranks_and_cannot_pass_falsely(tmp_path: Path) -> None:
    file = tmp_path / "test_unmodified.py"
    file.write_text(FILE)
    done = run("--upstream", str(file), "-v")
    assert "2 passed, 1 failed, 0 skipped" in done.stdout, done.stdout + done.stderr
    assert "rank 1 of 2 left with code 0 without a receipt" in done.stdout
    assert f"-i test_unmodified.py::TestProcesses::test_death_of_rank_1_is_seen --upstream {file}" in done.stdout
    assert done.returncode == 1


def test_missing_file_is_a_usage_error_that_names_it() -> None:
    done = run("--upstream", "no_such_file.py")
    assert done.returncode == 2
    assert "no_such_file.py, which is no file" in done.stderr
