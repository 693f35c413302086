"""A failure of ranks as pytest shows it: the report of the ranks, without the harness's own frames."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]

SUITE = """
from torch_ext.testing._internal.common_distributed import MultiProcessTestCase, MultiThreadedTestCase

class TestRanks(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_fails(self):
        self.assertEqual(self.rank, 0)

class TestThreads(MultiThreadedTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_threads()
    def test_fails(self):
        self.assertEqual(self.rank, 0)
"""


def test_a_failure_shows_no_frames_of_the_harness(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(SUITE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_two.py"],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "TORCH_EXT_DEVICE": "cpu"},
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    shown = done.stdout.split("_ TestRanks.test_fails _")[1].split("short test summary")[0]
    ours = [line for line in shown.splitlines() if line.strip() and not line.startswith(("E  ", "_"))]
    assert shown.count("WorldFailure: rank 1 raised AssertionError at test_two.py:") == 2, done.stdout
    assert len(ours) <= 14, shown
    assert "testPartExecutor" not in shown and "raise_verdict" not in shown
