"""Helpers that torch starts for a rank end with it, clean up, and are not reported as left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.torch_ext.world.suites import Suite

SHARES_MEMORY = """
import torch.multiprocessing

class TestSharedMemory(Case):
    def test_shared_through_files(self):
        torch.multiprocessing.set_sharing_strategy("file_system")
        tensor = torch.ones(3).share_memory_()
        handle = tensor.untyped_storage()._share_filename_cpu_()
        self.assertEqual(tensor.sum().item(), 3.0)
        print("manager", os.path.exists(handle[0]))
"""


@pytest.fixture
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    # A short name: the manager's socket lies below it, and the path of a socket has at most 107 characters.
    suite = Suite(tmp_path_factory.mktemp("shm"), SHARES_MEMORY)
    yield suite
    suite.end_survivors()


def test_the_manager_of_shared_memory_takes_its_files_with_it(suite: Suite) -> None:
    run = suite.run("--show-output")
    assert run.status == {"test_shared_through_files": "passed"}, run
    assert run.out.count("manager True") == 2, run
    assert "left a process behind" not in run.out + run.err
    assert suite.survivors() == {}
    assert suite.files_left() == []
