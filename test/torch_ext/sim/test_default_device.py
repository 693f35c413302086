"""Which device a run chooses by itself, and that the simulated one has as many devices as a test asks for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).resolve().parents[3]
DEADLINE_S = 300

SUITE = """
import torch
from torch_ext.testing._internal.common_distributed import (
    MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase, requires_world_size, skip_if_lt_x_gpu,
)
from torch_ext.testing._internal.common_utils import run_tests

class TestProcesses(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    @skip_if_lt_x_gpu(6)
    def test_asks_for_six(self):
        self.assertEqual(torch.accelerator.device_count(), 6)
        self.assertEqual(torch.ones(1, device=f"sim:{4 + self.rank}").item(), 1)
    def test_asks_for_none(self):
        self.assertEqual(torch.accelerator.device_count(), 4)
    @skip_if_lt_x_gpu(2)
    def test_asks_for_few(self):
        self.assertEqual(torch.accelerator.device_count(), 4)

class TestLargeWorld(MultiProcessTestCase):
    world_size = 5
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_has_a_device_a_rank(self):
        self.assertEqual(torch.accelerator.device_count(), 5)

class TestThreads(MultiThreadedTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_threads()
    @skip_if_lt_x_gpu(7)
    def test_asks_for_seven(self):
        self.assertEqual(torch.accelerator.device_count(), 7)

class TestStandingRanks(MultiProcContinuousTest):
    world_size = 2
    @requires_world_size(6)
    def test_asks_for_six(self):
        self.assertEqual(torch.accelerator.device_count(), 6)

if __name__ == "__main__":
    run_tests()
"""
WHERE = """
import torch
from torch_ext import accelerator
from torch_ext.testing._internal.common_distributed import MultiProcessTestCase
from torch_ext.testing._internal.common_utils import run_tests

class TestWhere(MultiProcessTestCase):
    world_size = 1
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_where(self):
        print("this rank is on", accelerator.device_type())

if __name__ == "__main__":
    run_tests()
"""


EMPTY = """
import json, os, sys
from torch_ext.testing._internal.common_distributed import MultiProcessTestCase
from torch_ext.testing._internal.common_utils import run_tests

# What a forked rank finds at its start.
LOADED = set()
os.register_at_fork(after_in_child=lambda: LOADED.update(sys.modules))

class TestEmpty(MultiProcessTestCase):
    world_size = 1
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_empty(self):
        with open("imported", "w") as stream:
            json.dump(sorted(set(sys.modules) - LOADED), stream)

if __name__ == "__main__":
    run_tests()
"""
WAYS = {
    "run_test.py": (str(CHECKOUT / "run_test.py"), "--root", "."),
    "file": ("test_suite.py",),
    "file with --device": ("test_suite.py", "--device", "sim"),
    "unittest": ("-m", "unittest", "test_suite"),
    "pytest": ("-m", "pytest", "-q", "test_suite.py"),
}


def run(folder: Path, suite: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(textwrap.dedent(suite), encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_EXT_DEV")}
    return subprocess.run(
        [sys.executable, str(CHECKOUT / "run_test.py"), "--root", str(folder), "--show-output", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=folder, env={**inherited, **environment},
    )  # fmt: skip


def test_there_are_as_many_devices_as_a_test_asks_for(tmp_path: Path) -> None:
    finished = run(tmp_path, SUITE, "--device", "sim")
    assert "6 passed, 0 failed, 0 skipped" in finished.stdout, finished.stdout + finished.stderr


def test_a_number_that_the_user_sets_goes_before_what_a_test_asks_for(tmp_path: Path) -> None:
    finished = run(tmp_path, SUITE, "--device", "sim", "-k", "asks_for_six or asks_for_few", TORCH_EXT_SIM_DEVICES="4")
    assert "1 passed, 0 failed, 2 skipped" in finished.stdout, finished.stdout + finished.stderr
    assert "Needs 6 accelerator devices" in finished.stdout


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_rank_imports_nothing_however_its_file_is_started(way: str, tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(EMPTY, encoding="utf-8")
    device = "" if "--device" in WAYS[way] else "sim"
    finished = subprocess.run(
        [sys.executable, *WAYS[way]], capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "TORCH_EXT_DEVICE": device},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert json.loads((tmp_path / "imported").read_text()) == []


@pytest.mark.skipif(
    "torch.accelerator.current_accelerator().type != 'sim'", reason="torch prefers an accelerator of this machine"
)
def test_a_machine_without_accelerator_runs_on_the_simulated_one(tmp_path: Path) -> None:
    finished = run(tmp_path, WHERE)
    assert "this rank is on sim" in finished.stdout + finished.stderr, finished.stdout + finished.stderr
    by_hand = subprocess.run(
        [sys.executable, "-m", "unittest", "test_suite"], capture_output=True, text=True, timeout=DEADLINE_S,
        check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "TORCH_EXT_DEVICE": "", "TORCH_EXT_SHOW_OUTPUT": "1"},
    )  # fmt: skip
    assert "this rank is on sim" in by_hand.stdout + by_hand.stderr, by_hand.stdout + by_hand.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the run would choose the accelerator of this machine")
def test_without_a_compiler_the_host_is_taken_and_the_message_says_what_to_install(tmp_path: Path) -> None:
    missing = {"CXX": str(tmp_path / "no-compiler"), "TORCH_EXT_CACHE": str(tmp_path / "cache")}
    finished = run(tmp_path, WHERE, **missing)
    shown = finished.stdout + finished.stderr
    assert finished.returncode == 0 and "this rank is on cpu" in shown, shown
    told = re.findall(r"^torch_ext: no accelerator here.*", finished.stderr, re.MULTILINE)
    assert len(told) == 1 and "apt install g++" in told[0] and "python -m torch_ext build" in told[0], shown

    refused = run(tmp_path, WHERE, "--device", "sim", **missing)
    assert refused.returncode != 0 and "apt install g++" in refused.stdout + refused.stderr, refused.stderr
