"""The steps of every child of a zygote before it accepts an order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from test.torch_ext.world.suites import suite_of
from torch_ext.world import child

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


def test_every_child_replaces_the_pool_and_leads_a_process_group(tmp_path: Path) -> None:
    """Class processes too: ranks that are threads, and plain classes, run autograd there."""
    with suite_of(tmp_path, SOURCE) as suite:
        run = suite.run(extra={"TEST_CALLS": str(tmp_path / "calls"), "TORCH_EXT_SPARES": "0"})
    assert run.code == 0, run
    called = (tmp_path / "calls").read_text().split()
    ran = [line.split() for line in (tmp_path / "calls.ranks").read_text().splitlines()]
    assert len(ran) == 3
    assert {pid for pid, _ in ran} <= set(called)
    assert [(pid, group) for pid, group in ran if pid != group] == []


def test_the_number_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    child.replace_thread_pool()
    assert asked == [torch.get_num_threads()]


def test_a_zygote_loads_dynamo_for_files_that_look_as_if_they_needed_it(tmp_path: Path) -> None:
    empty, training = tmp_path / "empty.py", tmp_path / "training.py"
    empty.write_text("import torch\n\ndef test_barrier():\n    torch.distributed.barrier()\n")
    training.write_text("import torch\n\noptimizer = torch.optim.SGD([torch.ones(1)])\n")
    assert child.first_uses(str(empty), str(tmp_path / "missing.py")) == ()
    assert child.first_uses(str(empty), str(training)) == ("torch._dynamo",)
