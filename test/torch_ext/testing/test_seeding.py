"""Seeding in ranks: the same numbers as ever, without the stacks that nobody will look at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from test.torch_ext.world.suites import CHECKOUT, Suite

PROGRAM = """
import traceback, unittest.mock
import torch
from torch_ext.compat._seeding import seed_without_stacks

def seeded():
    with unittest.mock.patch("traceback.format_stack", wraps=traceback.format_stack) as stacks:
        torch.manual_seed(7)
        return stacks.call_count, torch.rand(3).tolist()

kinds = (torch.cuda, torch.xpu, torch.mtia)
for kind in kinds:
    kind._is_compiled = lambda: {compiled}
stacks, numbers = seeded()
assert stacks == 3, stacks
seed_without_stacks()
seed_without_stacks()  # a served process has done it before
assert seeded() == ({left}, numbers), seeded()
for kind in kinds:
    assert kind.traceback.format_list is traceback.format_list
"""


@pytest.mark.parametrize(("compiled", "left"), [(False, 0), (True, 3)])
def test_only_kinds_that_torch_was_built_without_go_without_stacks(compiled: bool, left: int) -> None:
    program = PROGRAM.format(compiled=compiled, left=left)
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_ranks_of_a_run_seed_so(tmp_path: Path) -> None:
    suite = Suite(
        tmp_path,
        """
        import unittest.mock

        class TestSeeds(Case):
            def test_seed(self):
                kept = sum(kind._is_compiled() for kind in (torch.cuda, torch.xpu, torch.mtia))
                with unittest.mock.patch("traceback.format_stack") as stacks:
                    torch.manual_seed(1)
                self.assertEqual(stacks.call_count, kept)
        """,
    )
    assert suite.run().status == {"test_seed": "passed"}
